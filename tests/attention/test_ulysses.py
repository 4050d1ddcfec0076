"""Shared heads against dense float64 attention: any degree, heads, masks and shards, in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dynapar.attention.api import attend
from dynapar.attention.bands import Bands, causal, full, spans, window
from dynapar.attention.exchange import Exchange, Transport
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.attention.select import Scheme, select
from dynapar.attention.tokens import unshard
from dynapar.runtime.order import OrderLog
from tests.attention.loopback import LoopbackTransport, run_loopback
from tests.attention.oracle import MASKS, dense_attention, dense_mask
from tests.attention.test_ring import CASES, RINGS, TOLERANCE, WORLD, sharings, sum_over, worst
from tests.attention.test_tiles import plans
from tests.distributed import run_ranks

F64 = torch.float64

PACK = ((61, 5, 1, 38), (causal(61), full(5), causal(1), spans(38, [(3, 20)], width=9)))
"""Lengths and masks."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """A packed microbatch: q, k, v, the output's gradient and sinks in float64."""

    qkv: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    sinks: Tensor
    softcap: float | None = None

    def dense(self, lengths: Sequence[int], bands: Sequence[Bands]) -> list[Tensor]:
        """Output and gradients of q, k, v and sinks."""
        leaves = [x.clone().requires_grad_() for x in (*self.qkv, self.sinks)]
        q, k, v, sinks = leaves
        mask = dense_mask(lengths, bands)
        out = dense_attention(q, k, v, mask=mask, sinks=sinks, softcap=self.softcap)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]

    def on(
        self, plan: AttentionPlan, ranks: Sequence[int], transport: Exchange, dtype: torch.dtype
    ) -> tuple[list[Tensor], Tensor]:
        """This rank's output and gradients of q, k, v and sinks, and the index of its rows."""
        bound = plan.bind(ranks=ranks, transport=transport)
        index = torch.from_numpy(plan.index(bound.position))
        local = [x[index].to(dtype).requires_grad_() for x in self.qkv]
        used = [*local, self.sinks.to(dtype).requires_grad_()]
        q, k, v = local
        out = attend(q, k, v, bound, sinks=used[3], softcap=self.softcap)
        assert out.dtype == dtype
        gradients = torch.autograd.grad(out, used, self.grad[index].to(dtype))
        assert {x.dtype for x in gradients} == {dtype}
        return [out.detach(), *gradients], index


def whole(
    tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, softcap: float | None = None
) -> Whole:
    """Values that `dtype` holds exactly; heads are those of q, of k and v, and their width."""
    q_heads, kv_heads, width = heads
    rng = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=F64).to(dtype).double()

    return Whole(
        qkv=(
            draw(tokens, q_heads, width),
            draw(tokens, kv_heads, width),
            draw(tokens, kv_heads, width),
        ),
        grad=draw(tokens, q_heads, width),
        sinks=draw(q_heads),
        softcap=softcap,
    )


def check(
    plan: AttentionPlan, bands: Sequence[Bands], data: Whole, dtype: torch.dtype = F64
) -> None:
    want = data.dense(plan.lengths, bands)
    ranks = list(range(plan.degree))[::-1]

    def rank(transport: LoopbackTransport) -> tuple[float, Tensor]:
        got, index = data.on(plan, ranks, transport, dtype)
        return worst(got[:4], want[:4], index), got[4].double()

    errors, sinks = zip(*run_loopback(plan.degree, rank), strict=True)
    total = float((sum(sinks) - want[4]).abs().max() / want[4].abs().max())
    assert max(*errors, total) < TOLERANCE[dtype], (plan.scheme, errors, total)


def schemes(degree: int) -> list[Scheme]:
    """All that share heads."""
    shares = [u for u in range(2, degree) if degree % u == 0]
    hybrids = [select(degree, name="hybrid", share=u) for u in shares]
    return [select(degree, name="ulysses"), *hybrids]


@st.composite
def shared(draw: st.DrawFn) -> tuple[AttentionPlan, list[Bands], tuple[int, int, int]]:
    """A plan of any shards and masks by a scheme that shares heads, and heads."""
    plan, bands = draw(plans())
    scheme = draw(st.sampled_from(schemes(plan.degree)))
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4)), kv_heads, 4
    spans = plan.spans
    return (
        plan_attention(plan.lengths, degree=plan.degree, bands=bands, spans=spans, scheme=scheme),
        bands,
        heads,
    )


@settings(max_examples=60)
@given(shared(), st.booleans())
def test_any_shards_masks_and_heads(
    drawn: tuple[AttentionPlan, list[Bands], tuple[int, int, int]], capped: bool
) -> None:
    plan, bands, heads = drawn
    check(plan, bands, whole(sum(plan.lengths), heads, F64, softcap=2.0 if capped else None))


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 72), (8, 2, 128), (7, 1, 64), (14, 2, 64), (3, 3, 8)])
def test_heads_that_do_not_divide(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths, bands = PACK
    data = whole(sum(lengths), heads, dtype)
    for degree in (2, 3, 4):
        for scheme in schemes(degree):
            plan = plan_attention(lengths, degree=degree, bands=bands, scheme=scheme)
            check(plan, bands, data, dtype)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str) -> None:
    lengths = (40, 1, 23)
    bands = [MASKS[mask].bands(n) for n in lengths]
    data = whole(sum(lengths), (6, 2, 8), F64)
    for scheme in (select(3, name="ulysses"), select(4, name="hybrid", share=2)):
        plan = plan_attention(lengths, degree=scheme.degree, bands=bands, scheme=scheme)
        check(plan, bands, data)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [5, 6, 7])
def test_wide_rings(degree: int) -> None:
    lengths, bands = PACK
    some = [[0], [degree - 1, 2], [1], list(range(degree))[::-1]]
    for heads in ((8, 2, 64), (7, 1, 72), (4, 4, 128)):
        data = whole(sum(lengths), heads, F64, softcap=3.0)
        for scheme in schemes(degree):
            for positions in (None, some):
                check(
                    plan_attention(
                        lengths, degree=degree, bands=bands, positions=positions, scheme=scheme
                    ),
                    bands,
                    data,
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_no_sequence_sees_another(mask: str, dtype: torch.dtype) -> None:
    """Change the middle sequence, or a token of it: nothing else moves, by a single bit."""
    lengths, changed = (41, 90, 26), slice(41, 131)
    bands = [MASKS[mask].bands(n) for n in lengths]
    data = whole(sum(lengths), (6, 2, 8), dtype)
    outside = torch.ones(sum(lengths), dtype=torch.bool)
    outside[changed] = False
    for scheme, positions in (
        (select(2, name="ulysses"), None),
        (select(3, name="ulysses"), [[0], [2, 1, 0], [2]]),
        (select(4, name="hybrid", share=2), None),
    ):
        plan = plan_attention(
            lengths, degree=scheme.degree, bands=bands, positions=positions, scheme=scheme
        )
        before = packed(plan, data, dtype)
        for tokens in (changed, slice(41, 42), slice(130, 131), slice(70, 71)):
            other = [x.clone() for x in data.qkv]
            for x in other:
                x[tokens] = 9.0
            q, k, v = other
            after = packed(plan, dataclasses.replace(data, qkv=(q, k, v)), dtype)
            for a, b in zip(before, after, strict=True):
                assert torch.equal(a[outside], b[outside]), (scheme, tokens)
            assert not torch.equal(before[0], after[0])


def packed(plan: AttentionPlan, data: Whole, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of q, k, v of the whole microbatch."""

    def rank(transport: LoopbackTransport) -> list[Tensor]:
        return data.on(plan, list(range(plan.degree)), transport, dtype)[0][:4]

    by_position = zip(*run_loopback(plan.degree, rank), strict=True)
    return [unshard(parts, plan, dim=0) for parts in by_position]


def test_a_scheme_of_another_degree_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ulysses'.* is for degree 3; expected one for 2, t"):
        plan_attention([5], degree=2, bands=[causal(5)], scheme=select(3, name="ulysses"))


def check_rings(rank: int, rings: list[list[int]]) -> OrderLog:
    """Rings side by side on real ranks, by every scheme."""
    log = OrderLog(rank)
    transport = Transport(recorder=log)
    transport.warm_up()
    ranks = next(ring for ring in rings if rank in ring)
    for name, case in CASES.items():
        for dtype, tolerance in TOLERANCE.items():
            data = whole(case.tokens, (6, 2, 16), dtype)
            want = data.dense(case.lengths, case.bands)
            for layout, positions in sharings(case, len(ranks)):
                for scheme in schemes(len(ranks)):
                    plan = plan_attention(
                        case.lengths,
                        degree=len(ranks),
                        bands=case.bands,
                        positions=positions,
                        layout=layout,
                        scheme=scheme,
                    )
                    got, index = data.on(plan, ranks, transport, dtype)
                    total = sum_over(got[4], ranks, transport)
                    error = max(
                        worst(got[:4], want[:4], index),
                        float((total - want[4]).abs().max() / want[4].abs().max()),
                    )
                    assert error < tolerance, (name, dtype, layout, positions, scheme, error)
    return log


@pytest.mark.parametrize("rings", RINGS[1:], ids=str)
def test_rings_of_real_ranks_equal_dense_attention(rings: list[list[int]], tmp_path: Path) -> None:
    run_ranks(check_rings, WORLD, tmp_path, rings)


def check_layers(rank: int) -> OrderLog:
    """A rank without tokens, and one without heads, go through layers that are computed again."""
    log = OrderLog(rank)
    transport = Transport(recorder=log)
    transport.warm_up()
    for scheme in schemes(WORLD):
        plan = plan_attention(
            [1, 2, 3], degree=WORLD, bands=[causal(1), causal(2), window(3, width=2)], scheme=scheme
        )
        assert plan.tokens == (3, 0, 2, 1)
        bound = plan.bind(ranks=[0, 1, 2, 3], transport=transport)
        x = torch.randn(plan.tokens[rank], 2, 8, generator=torch.Generator().manual_seed(rank))
        x.requires_grad_()

        def layer(x: Tensor, bound: object = bound) -> Tensor:
            return attend(x * 1.5, x[:, :1] * 0.5, x[:, 1:], bound).sin()  # type: ignore[arg-type]

        direct = torch.autograd.grad(layer(layer(x)).sum(), x)
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)
        again = torch.autograd.grad(y.sum(), x)
        assert torch.equal(direct[0], again[0])
        assert direct[0].shape == x.shape
    return log


def test_ranks_without_tokens_or_heads_take_part_and_compute_again(tmp_path: Path) -> None:
    run_ranks(check_layers, WORLD, tmp_path)
