"""Rings of real ranks against dense float64 attention: output and all gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dynapar.attention.api import attend
from dynapar.attention.bands import Bands, causal, full, prefix, spans, window
from dynapar.attention.exchange import Exchange, Transport
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.attention.shards import Layout
from dynapar.runtime.order import OrderLog
from tests.attention.oracle import dense_attention, dense_mask
from tests.distributed import run_ranks

WORLD = 4
HEADS = (4, 2, 2, 4)
"""Of q, k, v and the output."""
HEAD_DIM = 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}

RINGS = [[[0, 1, 2], [3]], [[3, 0], [2, 1]], [[2, 0, 3, 1]], [[0], [1, 2, 3]]]
"""Each entry splits the four ranks into rings that run at the same time."""


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    bands: tuple[Bands, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


CASES = {
    "causal": Case((37, 5, 1, 130, 64), tuple(causal(n) for n in (37, 5, 1, 130, 64))),
    "full": Case((50, 33), (full(50), full(33))),
    "tiny": Case((1, 2, 3), (causal(1), causal(2), full(3))),
    "windows": Case((90, 41, 8), tuple(window(n, width=w) for n, w in ((90, 16), (41, 7), (8, 9)))),
    "spans": Case(
        (100, 70, 40),
        (
            spans(100, [(3, 20), (50, 83)], width=20, beyond_width=True),
            spans(70, [(10, 60)], width=20),
            prefix(40, tokens=17),
        ),
    ),
}


def sharings(case: Case, degree: int) -> list[tuple[Layout, list[list[int]] | None]]:
    """All layouts, and sequences that live on some positions: unsorted, or whole on one."""
    one = [[i % degree] for i in range(len(case.lengths))]
    some = [list(range(i % degree, degree))[::-1] for i in range(len(case.lengths))]
    return [("zigzag", None), ("contiguous", None), ("zigzag", some), ("zigzag", one)]


def inputs(case: Case, dtype: torch.dtype, seed: int = 7) -> tuple[list[Tensor], Tensor]:
    """float64 tensors, rounded to `dtype`: q, k, v and the output's gradient; and sinks."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(case.tokens, heads, HEAD_DIM) for heads in HEADS]
    whole = [torch.randn(s, generator=rng, dtype=torch.float64).to(dtype).double() for s in shapes]
    return whole, torch.randn(HEADS[0], generator=rng, dtype=torch.float64).to(dtype).double()


def wanted(case: Case, whole: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """The oracle's output and gradients of q, k, v (and sinks)."""
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    used = leaves if sinks is None else [*leaves, sinks.clone().requires_grad_()]
    out = dense_attention(
        *leaves, mask=dense_mask(case.lengths, case.bands), sinks=None if sinks is None else used[3]
    )
    return [out.detach(), *torch.autograd.grad(out, used, whole[3])]


def worst(got: Sequence[Tensor], want: Sequence[Tensor], index: Tensor) -> float:
    """The largest error relative to the largest value (0.1 or more), over output and gradients."""
    return max(
        (
            float((a.double() - b[index]).abs().max() / b.abs().max().clamp_min(0.1))
            for a, b in zip(got, want, strict=True)
            if a.numel()
        ),
        default=0.0,
    )


def run(
    plan: AttentionPlan,
    ranks: Sequence[int],
    transport: Exchange,
    whole: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    stages: int | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[list[Tensor], Tensor]:
    """This rank's output and gradients, and the index of its rows."""
    bound = plan.bind(ranks=ranks, transport=transport, stages=stages, kernel=kernel)
    index = torch.from_numpy(plan.index(bound.position))
    local = [x[index].to(dtype).requires_grad_() for x in whole[:3]]
    used = local if sinks is None else [*local, sinks.to(dtype).requires_grad_()]
    q, k, v = local
    out = attend(q, k, v, bound, sinks=None if sinks is None else used[3])
    assert out.dtype == dtype
    gradients = torch.autograd.grad(out, used, whole[3][index].to(dtype))
    return [out.detach(), *gradients], index


def sum_over(x: Tensor, ranks: Sequence[int], transport: Transport) -> Tensor:
    others = [rank for rank in ranks if rank != transport.rank]
    received = [(rank, torch.empty_like(x)) for rank in others]
    transport.exchange([(rank, x) for rank in others], received, operation="test sum").wait()
    return x + sum(part for _, part in received)


def check_exact(rank: int, rings: list[list[int]]) -> OrderLog:
    log = OrderLog(rank)
    transport = Transport(recorder=log)
    transport.warm_up()
    ranks = next(ring for ring in rings if rank in ring)
    for name, case in CASES.items():
        for dtype, tolerance in TOLERANCE.items():
            whole, sinks = inputs(case, dtype)
            want = wanted(case, whole, None)
            want_sinks = wanted(case, whole, sinks)
            for layout, positions in sharings(case, len(ranks)):
                plan = plan_attention(
                    case.lengths,
                    degree=len(ranks),
                    bands=case.bands,
                    positions=positions,
                    layout=layout,
                )
                for stages in (None, 1, 2):
                    got, index = run(plan, ranks, transport, whole, dtype, stages=stages)
                    error = worst(got, want, index)
                    assert error < tolerance, (name, dtype, layout, positions, stages, error)
                got, index = run(plan, ranks, transport, whole, dtype, sinks=sinks)
                total = sum_over(got.pop(), ranks, transport)
                error = max(
                    worst(got, want_sinks[:4], index),
                    float((total - want_sinks[4]).abs().max() / want_sinks[4].abs().max()),
                )
                assert error < tolerance, (name, dtype, layout, positions, "sinks", error)
    return log


@pytest.mark.parametrize("rings", RINGS, ids=str)
def test_ring_equals_dense_attention(rings: list[list[int]], tmp_path: Path) -> None:
    run_ranks(check_exact, WORLD, tmp_path, rings)


def check_recomputation(rank: int) -> OrderLog:
    """Layers that are recomputed run the exchange again, in one order on all ranks; same bits."""
    log = OrderLog(rank)
    transport = Transport(recorder=log)
    transport.warm_up()
    plan = plan_attention([300, 2], degree=WORLD, bands=[causal(300), full(2)])
    bound = plan.bind(ranks=[2, 0, 3, 1], transport=transport)
    rng = torch.Generator().manual_seed(2)
    index = torch.from_numpy(plan.index(bound.position))
    local = [torch.randn(302, n, 16, generator=rng)[index].requires_grad_() for n in (4, 2, 2)]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 1.5, k * 1.0, v * 1.0, bound).sin()

    def saved(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        if op == torch.ops.dynapar.attend.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def count() -> int:
        return sum(op.operation == "attention forward rows" for op in log.operations)

    direct = torch.autograd.grad(layer(*local).sum(), local)
    once = count()
    assert once > 0
    out = checkpoint(layer, *local, use_reentrant=False)
    again = torch.autograd.grad(out.sum(), local)
    assert count() == 3 * once
    out = checkpoint(
        layer,
        *local,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(saved),
    )
    selective = torch.autograd.grad(out.sum(), local)
    assert count() == 4 * once
    assert all(torch.equal(a, b) for a, b in zip(direct, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(direct, selective, strict=True))
    return log


def test_recomputation_in_a_ring(tmp_path: Path) -> None:
    run_ranks(check_recomputation, WORLD, tmp_path)


def check_isolation(rank: int) -> OrderLog:
    """Change one sequence: nothing of the others moves, by a single bit."""
    log = OrderLog(rank)
    transport = Transport(recorder=log)
    transport.warm_up()
    lengths = [37, 50, 20]
    plan = plan_attention(
        lengths, degree=3, bands=[causal(n) for n in lengths], positions=[[0, 1, 2], [2, 1], [0]]
    )
    whole, _ = inputs(Case(tuple(lengths), tuple(map(causal, lengths))), torch.float32)
    changed = [x.clone() for x in whole]
    for x in changed[:3]:
        x[37:87] = 9.0
    before, index = run(plan, [0, 1, 2], transport, whole, torch.float32)
    after, _ = run(plan, [0, 1, 2], transport, changed, torch.float32)
    others = (index < 37) | (index >= 87)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[others], b[others])
    return log


def test_sequences_never_see_each_other(tmp_path: Path) -> None:
    run_ranks(check_isolation, 3, tmp_path)


def check_empty_rank(rank: int) -> OrderLog:
    """A rank without a token goes through several layers, forward and backward, with the others."""
    log = OrderLog(rank)
    transport = Transport(recorder=log)
    transport.warm_up()
    lengths = [1, 2, 3]
    plan = plan_attention(lengths, degree=4, bands=[causal(n) for n in lengths])
    assert plan.tokens == (3, 0, 2, 1)
    bound = plan.bind(ranks=[0, 1, 2, 3], transport=transport)
    x = torch.randn(plan.tokens[rank], 2, 8, requires_grad=True)
    weight = torch.tensor(1.5, requires_grad=True)
    y = x * weight
    for _ in range(3):
        y = attend(y, y * 0.5, y, bound)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert bool(weight.grad == 0) == (rank == 1)
    return log


def test_a_rank_without_tokens_takes_part(tmp_path: Path) -> None:
    run_ranks(check_empty_rank, 4, tmp_path)
