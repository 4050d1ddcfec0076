from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.catalog import load_model_shape
from dynapar.errors import ConfigError
from dynapar.memory import (
    POLICIES,
    MemoryLimits,
    MemoryModel,
    Policy,
    PolicyLimits,
    Sharding,
    memory_limits,
    parse_bytes,
)

SHAPE = load_model_shape("qwen2.5-vl-7b")
MODEL = MemoryModel(shape=SHAPE, sharding="full", ranks=64, peers=63)


def limits(memory: str = "80GB", *policies: Policy, model: MemoryModel = MODEL) -> MemoryLimits:
    return memory_limits(model, memory=parse_bytes(memory), policies=policies or POLICIES)


def peak(own: PolicyLimits, tokens: int, encoder_tokens: int) -> int:
    return int(own.peak(np.array([tokens]), np.array([encoder_tokens]))[0])


@pytest.mark.parametrize("sharding", ["zero1", "gathered", "full"])
def test_a_rank_full_of_both_fits_and_one_token_more_does_not(sharding: Sharding) -> None:
    found = limits(model=replace(MODEL, sharding=sharding))
    assert found.budget == int(80e9 * 0.92)
    for own in found.policies:
        assert own.encoder_capacity == 4 * own.capacity
        assert peak(own, own.capacity, own.encoder_capacity) <= found.budget
        assert peak(own, own.capacity + 1, own.encoder_capacity + 4) > found.budget


def test_a_policy_that_keeps_less_holds_more() -> None:
    capacities = [own.capacity for own in limits().policies]
    assert capacities == sorted(set(capacities))
    assert limits().capacity == capacities[-1]


def test_an_encoder_capacity_that_is_given_leaves_the_rest() -> None:
    found = memory_limits(
        MODEL, memory=parse_bytes("80GB"), policies=("full",), encoder_capacity=30_000
    )
    (own,) = found.policies
    assert own.encoder_capacity == 30_000
    assert peak(own, own.capacity, 30_000) <= found.budget < peak(own, own.capacity + 1, 30_000)


def test_without_media_all_of_the_budget_is_for_tokens() -> None:
    for own, text in zip(limits().policies, limits().without_media().policies, strict=True):
        assert text.capacity > own.capacity
        assert peak(text, text.capacity, 1) <= limits().budget < peak(text, text.capacity + 1, 1)


@given(
    policy=st.integers(1, len(POLICIES) - 1),
    tokens=st.integers(0, 500_000),
    encoder_tokens=st.integers(0, 500_000),
    low=st.booleans(),
)
def test_bytes_never_grow_from_a_policy_to_the_next(
    policy: int, tokens: int, encoder_tokens: int, low: bool
) -> None:
    model = replace(MODEL, sharding="ddp", low_precision=low)
    before, after = (
        max(p.fixed + p.token * tokens + p.encoder_token * encoder_tokens for p in model.pieces(q))
        for q in (POLICIES[policy - 1], POLICIES[policy])
    )
    assert after <= before


def test_policies_under_which_nothing_fits_are_left_out() -> None:
    model = replace(MODEL, sharding="gathered")
    assert [own.policy for own in limits("60.3GB", model=model).policies] == [
        "selective",
        "full",
        "offload",
    ]


@pytest.mark.parametrize(
    ("model", "memory", "message"),
    [
        (
            replace(MODEL, sharding="ddp"),
            "80GB",
            r"memory 80\.0 GB, less 8% that stays free, is 73\.6 GB; states alone take 199\.0 GB: "
            r"weights 33\.2 GB, gradients 66\.3 GB, optimizer 66\.3 GB \(qwen2\.5-vl-7b, sharding "
            r"'ddp', ranks 64\), and the optimizer's step 33\.2 GB\. Give more memory, or shard",
        ),
        (
            replace(MODEL, sharding="gathered"),
            "60GB",
            r"a microbatch of 16 tokens under recompute 'none' takes \d+\.\d GB, of which states "
            r"51\.3 GB: .* Give more memory, a smaller loss_chunk \(now 1024\), or allow recompute",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_its_bytes(
    model: MemoryModel, memory: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        limits(memory, "none", model=model)
