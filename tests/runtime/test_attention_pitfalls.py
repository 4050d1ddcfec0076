"""Faults that users met in context-parallel attention, each as the small input that provoked it.

The numbers are those of the study of reported faults. CA11, CA16 and CA17 (masks of ones, layers of
another kind, no plan) are refused in `test_adapter`; CA12 and CA15 (leaks, also at degree 1) are in
`tests/attention/test_leak`; CA19 (heads that do not divide) is in the tests of the schemes. CA9,
targets more than one token ahead, are cut like those that are one ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dynapar.attention.bands import causal
from dynapar.attention.plan import plan_attention
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
