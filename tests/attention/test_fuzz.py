"""Every mask, kernel and degree, and random bands, against dense attention pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynapar.attention.api import attend
from dynapar.attention.bands import UNLIMITED, Band, Bands, check_bands
from dynapar.attention.evenly import cut_evenly
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.attention.select import select
from dynapar.attention.shards import Layout
from dynapar.attention.tokens import shard, unshard
from tests.attention.loopback import LoopbackTransport, run_loopback
from tests.attention.oracle import MASKS, dense_attention

LENGTHS = (53, 1, 2, 30)
KERNELS = ("cpu_flash", "math")
HEADS = ((4, 4), (8, 2), (7, 1))
"""Query heads and key/value heads: each key head for 1, 4 and 7 query heads."""
WIDTHS = (64, 72, 128)


@dataclass(frozen=True)
class Problem:
    """A packed microbatch and the gradient that comes down on its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    down: Tensor
    mask: Tensor
    softcap: float | None = None
    sinks: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Problem:
        """Rounded to a type; the mask as it is."""
        parts = {n: getattr(self, n).to(dtype) for n in ("q", "k", "v", "down")}
        return Problem(**{**self.__dict__, **parts})


def problem(mask: Tensor, heads: tuple[int, int], width: int, seed: int = 0) -> Problem:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(len(mask), n, width) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, down = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    return Problem(q, k, v, down, mask)


def wanted(p: Problem) -> list[Tensor]:
    """The output and the gradients of q, k and v (and sinks), in float64."""
    leaves = [x.double().requires_grad_() for x in (p.q, p.k, p.v)]
    sinks = None if p.sinks is None else p.sinks.double().requires_grad_()
    out = dense_attention(*leaves, mask=p.mask, softcap=p.softcap, sinks=sinks)
    used = leaves if sinks is None else [*leaves, sinks]
    return [out.detach(), *torch.autograd.grad(out, used, p.down.double())]


def computed(p: Problem, plan: AttentionPlan, kernel: str) -> list[Tensor]:
    """The same over all positions of a ring."""
    ranks = list(range(plan.degree))[::-1]

    def rank(transport: LoopbackTransport) -> list[Tensor]:
        bound = plan.bind(ranks=ranks, transport=transport, kernel=kernel)
        q, k, v, down = (shard(x, plan, bound.position, dim=0) for x in (p.q, p.k, p.v, p.down))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        sinks = None if p.sinks is None else p.sinks.to(q.dtype).requires_grad_()
        out = attend(q, k, v, bound, softcap=p.softcap, sinks=sinks)
        used = leaves if sinks is None else [*leaves, sinks]
        return [out.detach(), *torch.autograd.grad(out, used, down)]

    columns = list(zip(*run_loopback(plan.degree, rank)[::-1], strict=True))
    packed = [unshard(column, plan, dim=0) for column in columns[:4]]
    # Sinks are on every rank: their gradient is the sum of all parts.
    return [*packed, *(torch.stack(column).sum(0) for column in columns[4:])]


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """Root mean square, relative, of the output and each gradient."""
    return [
        math.sqrt(float((a.double() - b).square().sum() / b.square().sum().clamp_min(1e-300)))
        for a, b in zip(got, want, strict=True)
    ]


def plan_of(
    lengths: Sequence[int], bands: Sequence[Bands], degree: int, how: str, scheme: str = "staged"
) -> AttentionPlan:
    spans = cut_evenly(lengths, degree=degree, masks=[bands]) if how == "evenly" else None
    layout: Layout = "contiguous" if how == "contiguous" else "zigzag"
    chosen = select(degree, name=scheme, share=degree // 2 if scheme == "hybrid" else None)
    return plan_attention(
        lengths, degree=degree, bands=bands, layout=layout, spans=spans, scheme=chosen
    )


CUTS = ("zigzag", "contiguous", "evenly")


def check_matrix(mask: str, kernel: str, degrees: Sequence[int], turns: Sequence[int]) -> None:
    """Float64 to 1e-12, float32 to 5e-6, bfloat16 to 1.5 times the error of degree 1."""
    bands = [MASKS[mask].bands(length) for length in LENGTHS]
    dense = torch.block_diag(*(MASKS[mask].dense(length) for length in LENGTHS)).bool()
    number = list(MASKS).index(mask)
    for turn in turns:
        heads = HEADS[(number + turn) % 3]
        exact = problem(dense, heads, WIDTHS[turn], seed=number)
        alone: list[float] = []
        for degree in degrees:
            plan = plan_of(LENGTHS, bands, degree, CUTS[(number + turn + degree) % 3])
            assert max(errors(computed(exact, plan, kernel), wanted(exact))) < 1e-12, degree
            single = exact.to(torch.float32)
            assert max(errors(computed(single, plan, kernel), wanted(single))) < 5e-6, degree
            low = exact.to(torch.bfloat16)
            error = errors(computed(low, plan, kernel), wanted(low))
            alone = alone or error
            assert max(alone) < 1e-2
            for one, many in zip(alone, error, strict=True):
                assert many <= 1.5 * one, (degree, heads, alone, error)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_kernel_and_degree_is_exact(mask: str, kernel: str) -> None:
    check_matrix(mask, kernel, (1, 2, 3, 4), (0, 1, 2))


@pytest.mark.parametrize("mask", MASKS)
def test_higher_degrees_are_exact(mask: str) -> None:
    check_matrix(mask, "cpu_flash", (1, 5, 6, 7), (0,))


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_and_scheme_is_exact(mask: str) -> None:
    """Where heads are shared too, also unevenly, and among more ranks than key/value heads."""
    bands = [MASKS[mask].bands(length) for length in LENGTHS]
    dense = torch.block_diag(*(MASKS[mask].dense(length) for length in LENGTHS)).bool()
    heads = HEADS[list(MASKS).index(mask) % 3]
    exact = problem(dense, heads, 64)
    low = exact.to(torch.bfloat16)
    alone = errors(computed(low, plan_of(LENGTHS, bands, 1, "zigzag"), "cpu_flash"), wanted(low))
    for degree, scheme in ((2, "ulysses"), (3, "ulysses"), (4, "ulysses"), (4, "hybrid")):
        plan = plan_of(LENGTHS, bands, degree, CUTS[degree % 3], scheme)
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
            given = exact.to(dtype)
            found = errors(computed(given, plan, "cpu_flash"), wanted(given))
            assert max(found) < limit, (degree, scheme, dtype)
        for one, many in zip(alone, errors(computed(low, plan, "cpu_flash"), wanted(low)),
                             strict=True):  # fmt: skip
            assert many <= 1.5 * one, (degree, scheme, one, many)


@pytest.mark.parametrize("mask", MASKS)
def test_sinks_and_softcaps_are_exact_under_every_mask(mask: str) -> None:
    bands = [MASKS[mask].bands(length) for length in LENGTHS]
    dense = torch.block_diag(*(MASKS[mask].dense(length) for length in LENGTHS)).bool()
    base = problem(dense, (4, 2), 64)
    sinks = torch.linspace(-2, 3, 4, dtype=torch.float64)
    for softcap, kernel in ((None, "cpu_flash"), (1.5, "math")):
        given = Problem(**{**base.__dict__, "sinks": sinks, "softcap": softcap})
        for degree in (1, 3):
            plan = plan_of(LENGTHS, bands, degree, "evenly")
            assert max(errors(computed(given, plan, kernel), wanted(given))) < 1e-12


@st.composite
def random_bands(draw: st.DrawFn, length: int) -> Bands:
    """Rectangles that a sequence is cut into again and again, each between two diagonals."""
    bands: list[Band] = []

    def cut(q0: int, q1: int, k0: int, k1: int, depth: int) -> None:
        if q0 == q1 or k0 == k1:
            return
        how = draw(st.sampled_from(["queries", "keys", "stop"])) if depth else "stop"
        if how == "queries":
            at = draw(st.integers(q0, q1))
            cut(q0, at, k0, k1, depth - 1)
            cut(at, q1, k0, k1, depth - 1)
        elif how == "keys":
            at = draw(st.integers(k0, k1))
            cut(q0, q1, k0, at, depth - 1)
            cut(q0, q1, at, k1, depth - 1)
        elif draw(st.booleans()):
            near = st.integers(-length, length)
            lo, hi = draw(st.just(-UNLIMITED) | near), draw(st.just(UNLIMITED) | near)
            bands.append(Band(q0, q1, k0, k1, lo, hi))

    cut(0, length, 0, length, 4)
    return tuple(bands)


def by_brute_force(length: int, bands: Bands) -> Tensor:
    """(length, length) bool, by asking every band about every pair."""
    pairs = torch.zeros(length, length, dtype=torch.bool)
    for q in range(length):
        for k in range(length):
            held = [
                b for b in bands
                if b.q0 <= q < b.q1 and b.k0 <= k < b.k1 and b.lo <= q - k <= b.hi
            ]  # fmt: skip
            assert len(held) <= 1
            pairs[q, k] = bool(held)
    return pairs


@settings(max_examples=40)
@given(st.data())
def test_random_bands_are_exact(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    bands = [data.draw(random_bands(length)) for length in lengths]
    for length, mask in zip(lengths, bands, strict=True):
        check_bands(length, mask)
    dense = torch.block_diag(*map(by_brute_force, lengths, bands)).bool()
    degree = data.draw(st.integers(1, 6))
    schemes = ["staged", "ulysses", *(["hybrid"] if degree in (4, 6) else [])]
    scheme = data.draw(st.sampled_from(schemes))
    plan = plan_of(lengths, bands, degree, data.draw(st.sampled_from(CUTS)), scheme)
    given = problem(dense, data.draw(st.sampled_from(HEADS)), 8)
    got = computed(given, plan, data.draw(st.sampled_from(KERNELS)))
    for a, b in zip(got, wanted(given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
