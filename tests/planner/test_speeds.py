"""A step dealt by speed is valid, gives a slow rank less, and never ends later than before.

So it is with rules for rings, with equal counts, and within a budget of bytes.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.errors import PlanError
from dynapar.memory import (
    POLICIES,
    MemoryLimits,
    MemoryModel,
    Piece,
    Policy,
    PolicyLimits,
    memory_limits,
    parse_bytes,
)
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan, plan_digest, validate
from dynapar.planner import PlannerConfig, plan_step
from dynapar.planner.speeds import deal_by_speed, paced_makespan
from dynapar.speeds import FULL, predict_ranks

COSTS = load_costs(None)
CLUSTER = Cluster(nodes=1, ranks_per_node=4)
CONFIG = PlannerConfig(capacity=16_384, encoder_capacity=65_536)


def table(n: int, seed: int, longest: int = 40_000) -> SampleTable:
    draw = np.random.default_rng(seed)
    tokens = np.clip(draw.lognormal(7.5, 1.2, n), 16, longest).astype(np.int64)
    units = draw.integers(0, 3, n)
    return SampleTable(
        ids=tuple(f"s{i}" for i in range(n)),
        llm_tokens=tokens,
        text_tokens=tokens,
        label_tokens=tokens - 1,
        modalities=(units > 0).astype(np.uint8),
        unit_offsets=np.concatenate(([0], np.cumsum(units))).astype(np.int64),
        unit_tokens=draw.integers(16, 4000, int(units.sum())),
    )


def planned(n: int, seed: int, longest: int = 40_000, config: PlannerConfig = CONFIG) -> StepPlan:
    samples = table(n, seed, longest)
    return plan_step(samples, step=0, cluster=CLUSTER, costs=COSTS, config=config)


def dealt(plan: StepPlan, speeds: list[int], config: PlannerConfig = CONFIG) -> StepPlan:
    return deal_by_speed(plan, speeds=speeds, cluster=CLUSTER, costs=COSTS, config=config)


def paced(plan: StepPlan, speeds: list[int]) -> float:
    """The slow obvious way, rounding apart."""
    own = predict_ranks(plan, COSTS)
    place, free = [0] * plan.ranks, [0.0] * plan.ranks
    for micro in plan.microbatches:
        lasts = max(own[rank][place[rank]] * FULL / speeds[rank] for rank in micro.ranks)
        end = max(free[rank] for rank in micro.ranks) + lasts
        for rank in micro.ranks:
            free[rank], place[rank] = end, place[rank] + 1
    return max(free)


BYTES: dict[Policy, tuple[int, int]] = {"none": (100, 10), "selective": (40, 4), "full": (20, 2)}
"""Of a token and of an encoder token."""


def budget(whole: int) -> MemoryLimits:
    """Two moments may be the peak; a rank that is full of both kinds of tokens fits."""
    policies = []
    for policy, (token, encoder_token) in BYTES.items():
        pieces = (Piece(1000, token, encoder_token), Piece(90_000, token // 2, 2 * encoder_token))
        both = [(whole - p.fixed) // (p.token + 4 * p.encoder_token) for p in pieces]
        capacity = min(both)
        policies.append(
            PolicyLimits(
                policy=policy, pieces=pieces, capacity=capacity, encoder_capacity=4 * capacity
            )
        )
    return MemoryLimits(budget=whole, policies=tuple(policies))


speeds_of_four = st.lists(st.integers(200, 1000), min_size=4, max_size=4)
configs = st.builds(
    PlannerConfig,
    capacity=st.just(16_384),
    encoder_capacity=st.just(65_536),
    degrees=st.sampled_from(["any", "pow2"]),
    windows=st.sampled_from(["any", "aligned"]),
    peer_budget=st.sampled_from([None, 64, 3, 2]),
    equal_counts=st.booleans(),
    memory=st.sampled_from([None, budget(1_300_000), budget(500_000)]),
)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 9), speeds_of_four, configs)
def test_it_is_valid_and_never_later(
    n: int, seed: int, speeds: list[int], config: PlannerConfig
) -> None:
    try:
        plan = planned(n, seed, config=config)
    except PlanError:  # no equal counts, or rings that are too small for the longest sample
        return
    again = dealt(plan, speeds, config)
    validate(again, COSTS)
    assert again.samples is plan.samples
    assert (again.memory, again.equal_counts) == (plan.memory, plan.equal_counts)
    assert paced_makespan(again, COSTS, speeds) <= paced_makespan(plan, COSTS, speeds)
    for each in (plan, again):
        assert paced_makespan(each, COSTS, speeds) == pytest.approx(
            paced(each, speeds) * 1e6, abs=10 * len(each.microbatches)
        )
    assert plan_digest(dealt(plan, speeds, config)) == plan_digest(again)


def halved(config: PlannerConfig, *, n: int, seed: int, longest: int) -> tuple[float, float]:
    """Work of a rank of half speed over the others', and makespan over that of equal ranks."""
    plan, speeds = planned(n, seed, longest, config), [FULL, FULL, FULL // 2, FULL]
    again = dealt(plan, speeds, config)
    validate(again, COSTS)
    work = [sum(own) for own in predict_ranks(again, COSTS)]
    return 3 * work[2] / (sum(work) - work[2]), paced(again, speeds) * 1e6 / plan.makespan


@pytest.mark.parametrize("seed", range(3))
def test_so_it_does_within_a_budget_of_bytes(seed: int) -> None:
    """Also where most samples have to recompute."""
    for whole in (1_300_000, 500_000):
        config = replace(CONFIG, memory=budget(whole))
        share, longer = halved(config, n=120, seed=seed, longest=8_000)
        assert 0.4 <= share <= 0.6
        assert longer <= 1.3  # of 8/7 at best


@pytest.mark.parametrize("seed", range(3))
def test_with_equal_counts_samples_are_swapped(seed: int) -> None:
    """Where microbatches have room: full ones leave a slow rank more than half of the work."""
    config = replace(CONFIG, equal_counts=True, max_degree=1)
    plan = planned(60, seed, 3_000, config)
    again = dealt(plan, [FULL, FULL, FULL // 2, FULL], config)
    assert [m.ranks for m in again.microbatches] == [m.ranks for m in plan.microbatches]
    assert {place.sample for m in again.microbatches for place in m.placements} == set(range(60))
    share, longer = halved(config, n=60, seed=seed, longest=3_000)
    assert 0.4 <= share <= 0.6
    assert longer <= 1.25


def test_a_real_model_in_real_bytes() -> None:
    model = MemoryModel(shape=load_model_shape("qwen2.5-vl-7b"), sharding="gathered", ranks=8)
    memory = memory_limits(model, memory=parse_bytes("80GB"), policies=POLICIES)
    config = replace(CONFIG, memory=memory)
    share, longer = halved(config, n=96, seed=1, longest=3_000)
    assert 0.4 <= share <= 0.6
    assert longer <= 1.2


def test_ranks_in_waves_keep_their_plan() -> None:
    config = replace(CONFIG, sync="microbatch")
    plan = planned(20, 0, config=config)
    assert dealt(plan, [FULL, 300, FULL, FULL], config) is plan


def test_a_sample_that_finds_no_room_leaves_the_plan_alone() -> None:
    config = replace(CONFIG, equal_counts=True, max_degree=1)
    plan = planned(40, 0, 6_000, config)
    assert dealt(plan, [FULL, 300, FULL, FULL], config) is not plan
    with patch(
        "dynapar.planner.alone.Bins.room", lambda bins, row: np.zeros(len(bins.tokens), bool)
    ):
        assert dealt(plan, [FULL, 300, FULL, FULL], config) is plan


def test_a_rank_of_half_speed_gets_half_the_work() -> None:
    """Of what fits one rank: a ring of three of the four ranks cannot avoid the slow one."""
    for seed in range(5):
        plan = planned(120, seed, longest=16_384)
        again = dealt(plan, [FULL, FULL, FULL // 2, FULL])
        work = [sum(own) for own in predict_ranks(again, COSTS)]
        others = (sum(work) - work[2]) / 3
        assert 0.4 <= work[2] / others <= 0.6
        # Three ranks and a half do what four did: a seventh more time at best.
        assert paced(again, [FULL, FULL, FULL // 2, FULL]) <= 1.16 * plan.makespan / 1e6


def test_equal_speeds_leave_the_plan_alone() -> None:
    plan = planned(20, 0)
    assert dealt(plan, [FULL] * 4) is plan
    assert paced_makespan(plan, COSTS, [FULL] * 4) == plan.makespan
