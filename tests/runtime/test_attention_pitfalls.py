"""Faults that users met in context-parallel attention, each as the small input that provoked it.

The numbers are those of the study of reported faults. CA11 and CA17 (a mask of ones, a model that
is called without a plan) are refused in `test_adapter`, as are layers of another kind than
attention, of which CA16 tells. CA12 and CA15 are held for every mask, scheme and token in
`tests/attention/test_leak` and `test_ulysses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dynapar.attention.bands import causal, window
from dynapar.attention.heads import share_heads
from dynapar.attention.plan import plan_attention
from dynapar.attention.select import select
from dynapar.attention.tokens import shard
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.runtime.layout import ShardLayout, lay_out
from dynapar.runtime.masks import MaskClass
from tests.attention.oracle import dense_mask
from tests.attention.test_fuzz import computed, problem, wanted
from tests.plans import hand_plan


def worst(lengths: Sequence[int], degree: int) -> float:
    """The largest error of the output or a gradient, in float64."""
    bands = [causal(length) for length in lengths]
    given = problem(dense_mask(lengths, bands), (4, 2), 16)
    got = computed(given, plan_attention(lengths, degree=degree, bands=bands), "cpu_flash")
    pairs = zip(got, wanted(given), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def text(number: int, ids: Tensor) -> LoadedSample:
    return LoadedSample(
        id=f"s{number}",
        input_ids=ids,
        targets=torch.cat([ids[1:], torch.tensor([IGNORE])]),
        kinds=torch.zeros_like(ids),
        positions=torch.arange(len(ids))[None],
        media=(),
        units={},
    )


def layouts(samples: Sequence[LoadedSample], degree: int) -> list[ShardLayout]:
    ranks = list(range(degree))
    plan = hand_plan(samples, degree, [(ranks, {row: ranks for row in range(len(samples))})])
    return [
        lay_out(
            plan.microbatches[0],
            dict(enumerate(samples)),
            rank=rank,
            masks=[MaskClass()],
            bands=lambda sample, mask: causal(len(sample.input_ids)),
        )
        for rank in ranks
    ]


def test_ca1_no_padding_at_a_length_that_nothing_divides() -> None:
    plan = plan_attention([698], degree=4, bands=[causal(698)])
    assert sum(plan.tokens) == 698
    assert worst([698], 4) < 1e-12


@pytest.mark.parametrize("tokens", [10, 2])
def test_ca2_remainders_live_on_one_rank(tokens: int) -> None:
    plan = plan_attention([tokens], degree=3, bands=[causal(tokens)])
    held = [row for position in range(3) for row in plan.index(position).tolist()]
    assert sorted(held) == list(range(tokens))
    assert worst([tokens], 3) < 1e-12


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_ca3_a_sequence_shorter_than_its_chunks(degree: int) -> None:
    assert worst([2], degree) < 1e-12


def test_ca4_zigzag_is_cut_for_each_sequence() -> None:
    plan = plan_attention([8, 8], degree=2, bands=[causal(8)] * 2)
    assert plan.index(0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]


def test_ca5_rows_of_a_rotary_table_follow_the_tokens() -> None:
    plan = plan_attention([4, 4], degree=2, bands=[causal(4)] * 2)
    assert shard(torch.arange(8), plan, 0).tolist() == [0, 3, 4, 7]
    first, _ = layouts([text(n, torch.arange(4)) for n in range(2)], 2)
    assert first.positions.tolist() == [[0, 3, 0, 3]]


def test_ca6_and_ca7_degrees_alternate_without_leaving_a_trace() -> None:
    assert max(worst([30, 7], degree) for degree in (1, 4, 1, 2, 4, 1)) < 1e-12


def test_ca8_targets_are_shifted_before_the_cut() -> None:
    first, second = layouts([text(0, torch.arange(8))], 2)
    assert first.input_ids.tolist() == [0, 1, 6, 7]
    assert first.targets.tolist() == [1, 2, 7, IGNORE]
    assert second.targets.tolist() == [3, 4, 5, 6]


def test_ca10_five_documents_on_two_ranks() -> None:
    assert worst([300, 41, 500, 100, 83], 2) < 1e-12


def test_ca9_targets_further_ahead_are_made_before_the_cut() -> None:
    """Of odd lengths, two tokens ahead: none comes from another sample, none is out of reach."""
    lengths = (5, 7)
    ids = torch.arange(12)
    ahead = torch.cat([torch.cat([x[2:], torch.tensor([IGNORE] * 2)]) for x in ids.split(lengths)])
    plan = plan_attention(lengths, degree=2, bands=[causal(n) for n in lengths])
    for position in range(2):
        held = shard(ids, plan, position).tolist()
        end = [4 if token < 5 else 11 for token in held]
        wanted_ids = [t + 2 if t + 2 <= e else IGNORE for t, e in zip(held, end, strict=True)]
        assert shard(ahead, plan, position).tolist() == wanted_ids


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("width", [None, 3])
def test_ca12_and_ca15_a_token_of_one_document_moves_nothing_of_another(
    width: int | None, degree: int
) -> None:
    lengths = (9, 12)
    bands = [causal(n) if width is None else window(n, width=width) for n in lengths]
    plan = plan_attention(lengths, degree=degree, bands=bands)
    given = problem(dense_mask(lengths, bands), (4, 2), 16)
    other = replace(given, k=given.k.clone(), v=given.v.clone())
    other.k[4], other.v[4] = 9.0, -9.0
    for a, b in zip(
        computed(given, plan, "cpu_flash"), computed(other, plan, "cpu_flash"), strict=True
    ):
        assert torch.equal(a[9:], b[9:])


def test_ca13_boundaries_are_lengths_and_not_read_from_positions() -> None:
    plain = [text(0, torch.arange(6)), text(1, torch.arange(9))]
    odd = [replace(s, positions=torch.zeros_like(s.positions)) for s in plain]
    for a, b in zip(layouts(plain, 2), layouts(odd, 2), strict=True):
        assert a.plans[MaskClass()].lengths == b.plans[MaskClass()].lengths == (6, 9)
        assert a.input_ids.tolist() == b.input_ids.tolist()


def test_ca14_positions_start_again_with_every_sample() -> None:
    (alone,) = layouts([text(0, torch.arange(3)), text(1, torch.arange(4))], 1)
    assert alone.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]


def test_ca16_packed_parity_where_lengths_are_odd() -> None:
    assert worst([5, 7], 2) < 1e-12


def test_ca18_work_is_even_and_not_tokens_alone() -> None:
    plan = plan_attention([4, 12], degree=2, bands=[causal(4), causal(12)])
    assert plan.work == (44, 44)
    contiguous = plan_attention(
        [4, 12], degree=2, bands=[causal(4), causal(12)], layout="contiguous"
    )
    assert contiguous.work == (24, 64)


@pytest.mark.parametrize(("heads", "degree"), [((12, 12), 3), ((12, 4), 4), ((16, 8), 16)])
def test_ca19_heads_that_do_not_divide_by_the_ranks(heads: tuple[int, int], degree: int) -> None:
    """12 heads on 4 ranks are 3 each, not 4, 4, 4, 0; more ranks than key/value heads are fine."""
    shares = share_heads(*heads, degree)
    assert max(s.q_heads for s in shares) - min(s.q_heads for s in shares) <= 1
    lengths = (40, 9)
    bands = [causal(n) for n in lengths]
    scheme = select(degree, name="ulysses")
    plan = plan_attention(lengths, degree=degree, bands=bands, scheme=scheme)
    given = problem(dense_mask(lengths, bands), heads, 8)
    for a, b in zip(computed(given, plan, "cpu_flash"), wanted(given), strict=True):
        assert float((a - b).abs().max()) < 1e-12
