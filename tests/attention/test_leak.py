"""Changing one sequence changes nothing of another, by a single bit, in every mask and degree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dynapar.attention.bands import Band, Bands
from dynapar.attention.evenly import cut_evenly
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.attention.tokens import unshard
from dynapar.attention.trees import tree
from tests.attention.loopback import LoopbackTransport, run_loopback
from tests.attention.oracle import MASKS
from tests.attention.test_ring import Case, inputs, run

LENGTHS = (41, 90, 26)
CHANGED = slice(41, 131)
"""The tokens of the middle sequence."""


def results(
    plan: AttentionPlan, whole: Sequence[Tensor], dtype: torch.dtype, sinks: Tensor | None = None
) -> list[Tensor]:
    """Packed output and gradients of q, k, v, whatever the degree."""

    def rank(transport: LoopbackTransport) -> list[Tensor]:
        ranks = list(range(plan.degree))[::-1]
        return run(plan, ranks, transport, whole, dtype, sinks=sinks)[0][:4]

    by_position = run_loopback(plan.degree, rank)[::-1]
    return [unshard(parts, plan, dim=0) for parts in zip(*by_position, strict=True)]


def planned(bands: Sequence[Bands], degree: int, how: str) -> AttentionPlan:
    some = [[0], list(range(degree))[::-1], [degree - 1]]
    if how == "evenly":
        spans = cut_evenly(LENGTHS, degree=degree, masks=[bands])
        return plan_attention(LENGTHS, degree=degree, bands=bands, spans=spans)
    positions = some if how == "some positions" else None
    return plan_attention(LENGTHS, degree=degree, bands=bands, positions=positions)


def changed(whole: Sequence[Tensor], tokens: slice | int) -> list[Tensor]:
    """Other queries, keys and values there; the output's gradient stays."""
    copies = [x.clone() for x in whole]
    for x in copies[:3]:
        x[tokens] = 9.0
    return copies


def same_outside(before: Sequence[Tensor], after: Sequence[Tensor], tokens: slice) -> bool:
    outside = torch.ones(len(before[0]), dtype=torch.bool)
    outside[tokens] = False
    return all(torch.equal(a[outside], b[outside]) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_no_sequence_sees_another(mask: str, dtype: torch.dtype) -> None:
    bands = [MASKS[mask].bands(length) for length in LENGTHS]
    whole, sinks = inputs(Case(LENGTHS, tuple(bands)), dtype)
    for degree, how in ((1, "zigzag"), (2, "zigzag"), (3, "some positions"), (4, "evenly")):
        plan = planned(bands, degree, how)
        before = results(plan, whole, dtype, sinks)
        for tokens in (CHANGED, CHANGED.start, CHANGED.stop - 1, 70):
            after = results(plan, changed(whole, tokens), dtype, sinks)
            assert same_outside(before, after, CHANGED), (degree, how, tokens)
            assert not torch.equal(before[0], after[0])


def test_no_branch_of_a_tree_sees_another() -> None:
    """Nor does what they share see either of them; only its keys' gradients come from both."""
    nodes = [30, 25, 20]
    case = Case((75,), (tree(nodes, [-1, 0, 0]),))
    whole, _ = inputs(case, torch.float32)
    first, second = slice(30, 55), slice(55, 75)
    for degree in (1, 2, 3):
        plan = plan_attention(case.lengths, degree=degree, bands=case.bands)
        before = results(plan, whole, torch.float32)
        for mine in (first, second):
            after = results(plan, changed(whole, mine), torch.float32)
            theirs = second if mine == first else first
            for a, b in zip(before, after, strict=True):
                assert torch.equal(a[theirs], b[theirs])
            assert torch.equal(before[0][:30], after[0][:30])
            assert torch.equal(before[1][:30], after[1][:30])
            assert not torch.equal(before[2][:30], after[2][:30])


def test_a_band_too_wide_is_noticed() -> None:
    """The check can fail: one sequence of two, whose second half sees one key of the first."""
    leaky = (Band(0, 67, 0, 41, 0, 80), Band(41, 67, 41, 67, 0, 80))
    case = Case((67,), (leaky,))
    whole, _ = inputs(case, torch.float32)
    plan = plan_attention(case.lengths, degree=2, bands=case.bands)
    before = results(plan, whole, torch.float32)
    after = results(plan, changed(whole, slice(0, 1)), torch.float32)
    assert not same_outside(before, after, slice(0, 41))
