"""Recompute policies change what microbatches keep, and not a bit of any gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dynapar.attention.exchange import Transport
from dynapar.errors import ModelError
from dynapar.memory import POLICIES, Policy
from dynapar.runtime import recompute
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.order import OrderLog
from dynapar.runtime.recompute import recomputing
from dynapar.runtime.reference import count_targets
from tests.distributed import TIMEOUT, run_ranks
from tests.models import Recipe, gradients, make_sample, small_model
from tests.plans import Written, hand_plan

RECIPES: dict[str, Recipe] = {
    "text": [23],
    "long": [97],
    "images": [4, (1, 8, 4), 3, (1, 4, 4), 5, (1, 12, 8), 8],
    "video": [5, (3, 4, 4), 11],
    "late": [19, (1, 12, 8), 3],
}
ROWS = {name: row for row, name in enumerate(RECIPES)}
STEP: list[Written] = [
    ([0, 1, 2, 3], {ROWS["long"]: [0, 1, 2, 3], ROWS["images"]: [0, 1, 2, 3]}),
    ([0, 1, 2], {ROWS["video"]: [0, 1, 2]}),
    ([3], {ROWS["text"]: [3]}),
    ([2, 3], {ROWS["late"]: [2, 3]}),
]
CHOICES: list[list[Policy]] = [
    ["full", "selective", "none", "offload"],
    ["offload", "none", "full", "selective"],
    ["selective"] * 4,
    ["full"] * 4,
]


def run_with(
    executor: StepExecutor, policies: Sequence[Policy]
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients of the step, and how often what was exchanged."""
    model, log = executor.adapter.model, executor._log
    assert log is not None
    samples = [make_sample(model, r, seed=s) for s, r in enumerate(RECIPES.values())]
    model.zero_grad()
    plan = hand_plan(samples, dist.get_world_size(), STEP)
    numbers = np.array([POLICIES.index(policy) for policy in policies], np.int64)
    plan = replace(plan, columns=replace(plan.columns, recompute=numbers))
    before = len(log.operations)
    executor.run(executor.prepare(plan, dict(enumerate(samples))), targets=count_targets(samples))
    issued = Counter(operation.operation for operation in log.operations[before:])
    return gradients(model), issued


def check_policies(rank: int, autocast: torch.dtype | None) -> OrderLog:
    log = OrderLog(rank)
    transport = Transport(dist.new_group(timeout=TIMEOUT), recorder=log)
    executor = StepExecutor(
        Adapter(small_model()), transport=transport, log=log, loss_chunk=16, autocast=autocast
    )
    want, once = run_with(executor, ["none"] * 4)
    for policies in CHOICES:
        got, issued = run_with(executor, policies)
        assert all(torch.equal(got[name], want[name]) for name in want), policies
        again = issued["attention forward rows"] - once["attention forward rows"]
        assert (again > 0) == any(
            policy in ("full", "offload")
            for policy, (ranks, _) in zip(policies, STEP, strict=True)
            if rank in ranks and len(ranks) > 1
        ), policies
        assert issued["attention backward rows"] == once["attention backward rows"]
        assert issued["embedding rows"] == once["embedding rows"]
    # As checks in float64 run, whatever their plans say.
    with patch.object(executor, "_recompute", False):
        assert run_with(executor, ["full"] * 4)[1] == once
    return log


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_gradients_are_the_very_same_under_every_policy(
    autocast: torch.dtype | None, tmp_path: Path
) -> None:
    run_ranks(check_policies, 4, tmp_path, autocast)


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_is_left_as_it_was(policy: Policy) -> None:
    model = small_model()
    layers = layers_of(model)
    assert len(layers) == 6  # three of the encoder, three of the language model
    model.activation_checkpointing_enable()
    before = [layer._gradient_checkpointing_func for layer in layers]
    layers[0].gradient_checkpointing = False

    def fail_inside() -> None:
        with recomputing(model, policy):
            on = [layer.gradient_checkpointing for layer in layers]
            assert on == [policy != "none", *[True] * 5]
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert [layer.gradient_checkpointing for layer in layers] == [False, *[True] * 5]
    assert [layer._gradient_checkpointing_func for layer in layers] == before


def test_offload_sends_each_layer_input_to_the_host_and_back() -> None:
    """On a CPU there is no other memory: what goes through the copies is counted."""
    model = small_model()
    layer = model.model.language_model.layers[0]
    states = torch.randn(1, 7, 64, requires_grad=True)
    tables = torch.ones(1, 7, 16), torch.zeros(1, 7, 16)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "sdpa"})
    want = layer(states, position_embeddings=tables).sum()
    (gradient,) = torch.autograd.grad(want, states)
    sent: list[Tensor] = []
    real = recompute.to_host

    def to_host(tensor: Tensor) -> Tensor:
        sent.append(real(tensor))
        return sent[-1]

    with patch.object(recompute, "to_host", to_host), recomputing(model, "offload"):
        got = layer(states, position_embeddings=tables).sum()
    (back,) = torch.autograd.grad(got, states)
    assert torch.equal(back, gradient)
    assert [copy.shape for copy in sent] == [states.shape]
    assert sent[0].data_ptr() != states.data_ptr()


def test_a_model_without_such_layers_is_named() -> None:
    with (
        pytest.raises(ModelError, match=r"Linear has no layers that can be recomputed .*'full'"),
        recomputing(nn.Linear(2, 2), "full"),
    ):
        pass
