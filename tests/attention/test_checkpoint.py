"""Recomputed attention gives the very same bits, or is kept and not computed twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dynapar.attention.api import attend
from dynapar.attention.kernels_cpu import CpuFlash
from dynapar.attention.kernels_math import Math
from dynapar.attention.plan import BoundPlan, plan_attention
from dynapar.attention.select import Scheme, select
from dynapar.attention.tokens import shard
from tests.attention.loopback import LoopbackTransport, run_loopback
from tests.attention.oracle import MASKS

LENGTHS = (53, 2, 30)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])

Context = AbstractContextManager[None]
Step = Callable[..., list[Tensor]]
"""(layer, *inputs) -> gradients of the inputs."""


def direct(layer: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(layer(*inputs).sum(), inputs))


def recomputed(layer: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    out = checkpoint(layer, *inputs, use_reentrant=False)
    return list(torch.autograd.grad(out.sum(), inputs))


def kept(layer: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        if op == torch.ops.dynapar.attend.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[Context, Context]:
        made: tuple[Context, Context] = create_selective_checkpoint_contexts(policy)
        return made

    out = checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)
    return list(torch.autograd.grad(out.sum(), inputs))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with each forward of a kernel."""
    made: list[str] = []
    for kernel in (CpuFlash, Math):
        real = kernel.forward

        def counted(
            self: object, *args: object, real: Callable[..., object] = real, **options: object
        ) -> object:
            made.append("forward")
            return real(self, *args, **options)

        monkeypatch.setattr(kernel, "forward", counted)
    return made


SCHEMES = (select(3), select(3, name="ulysses"), select(4, name="hybrid", share=2))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.share} of {scheme.degree}")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mask", MASKS)
def test_bits_are_the_same_and_kept_attention_runs_once(
    mask: str, softcap: float | None, scheme: Scheme, launches: list[str]
) -> None:
    bands = [MASKS[mask].bands(n) for n in LENGTHS]
    plan = plan_attention(LENGTHS, degree=scheme.degree, bands=bands, scheme=scheme)
    rng = torch.Generator().manual_seed(0)
    whole = [torch.randn(85, heads, 16, generator=rng) for heads in (4, 2, 2)]

    def all_ranks(step: Step) -> tuple[list[list[Tensor]], int]:
        def rank(transport: LoopbackTransport) -> list[Tensor]:
            bound = plan.bind(ranks=[2, 0, 1, 3][: scheme.degree], transport=transport)
            local = [shard(x, plan, bound.position, dim=0).requires_grad_() for x in whole]
            return step(layer(bound), *local, SINKS.clone().requires_grad_())

        def layer(bound: BoundPlan) -> Callable[..., Tensor]:
            return lambda q, k, v, sinks: attend(
                q * 1.5, k.sin(), v, bound, softcap=softcap, sinks=sinks
            ).sin()

        launches.clear()
        return run_loopback(scheme.degree, rank), len(launches)

    want, once = all_ranks(direct)
    for step, times in ((recomputed, 2), (kept, 1)):
        got, count = all_ranks(step)
        assert count == times * once
        for mine, theirs in zip(got, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
