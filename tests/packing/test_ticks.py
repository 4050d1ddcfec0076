from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.costs import coefficients, load_costs
from dynapar.packing.ticks import (
    Coefficients,
    Layout,
    cut_tokens,
    latency_ticks,
    microbatch_ticks,
    queue_starts,
    sample_columns,
    unit_columns,
    wave_parts,
)

COSTS = coefficients(load_costs(None), ranks_per_node=8)
ROUND = Coefficients(
    linear_token=10.0,
    linear_rank=7,
    attention_pair=0.0,
    attention_half=0.0,
    exchange_layers=1,
    wire_in_node=0.5,
    wire_across=2.0,
    hop=3.0,
    encoder_token=1.0,
    encoder_square=0.0,
    fixed=100,
    llm_floor=0,
    encoder_floor=0,
    node=2,
)
"""Whole numbers, to add up by hand."""


@given(st.integers(1, 200_000), st.sampled_from([1, 2, 3, 5, 8, 12, 64]))
def test_a_sample_costs_what_the_formulas_say(tokens: int, degree: int) -> None:
    """The workloads' README, in exact arithmetic; half a tick, and float's last digits."""
    s, d = Fraction(tokens), degree
    linear = 6 * Fraction(6_500_000_000) * s / d / Fraction(400 * 10**12)
    rate = 300 * 10**12 * (s / d) / (s / d + 256)
    attention = Fraction(7, 2) * 2 * 28 * 3584 * s * s / d / rate
    bandwidth = 200 * 10**9 if d <= 8 else 40 * 10**9
    moved = 3 * Fraction(3, 4) * 2048 * (s / d) / bandwidth
    exchange = 28 * (d - 1) * max(Fraction(0), moved - attention / (28 * d))
    found = sample_columns(np.array([tokens]), degree, COSTS)[0].tolist()
    for ticks, seconds in zip(found, (linear, attention, exchange), strict=True):
        assert abs(ticks - seconds * 10**6) <= Fraction(501, 1000)


def test_halves_round_up() -> None:
    costs = ROUND._replace(linear_token=0.5, encoder_token=0.5)
    assert sample_columns(np.array([1, 2, 3, 4]), 1, costs)[:, 0].tolist() == [1, 1, 2, 2]
    assert unit_columns(np.array([1, 2, 3]), costs).tolist() == [1, 1, 2]


def test_encoder_units_and_latency_follow_the_formulas() -> None:
    seconds = (6 * 0.3e9 * 1025 + 3.5 * 4 * 24 * 1024 * 1025**2) / 2.2e14
    assert unit_columns(np.array([1025]), COSTS).tolist() == [round(seconds * 1e6)]
    assert [int(latency_ticks(d, COSTS)) for d in (1, 2, 9)] == [0, 280, 2240]
    assert (COSTS.fixed, COSTS.linear_rank, COSTS.llm_floor) == (30_000, 6_240, 780_000)


@given(st.integers(1, 5000), st.integers(1, 40))
def test_cuts_are_those_of_the_zigzag(tokens: int, degree: int) -> None:
    edges = [i * tokens // (2 * degree) for i in range(2 * degree + 1)]
    sizes = [b - a for a, b in pairwise(edges)]
    expected = [sizes[j] + sizes[-1 - j] for j in range(degree)]
    assert [cut_tokens(tokens, degree, j) for j in range(degree)] == expected
    assert sum(expected) == tokens


def _layout() -> Layout:
    """Ranks 0 and 1: sample 0 on both, sample 1 whole on rank 1; rank 0 again: sample 2."""
    return Layout(
        first=np.array([0, 0]),
        width=np.array([2, 1]),
        wave=np.array([0, 1]),
        offsets=np.array([0, 2, 3]),
        order=np.array([0, 1, 2]),
        sample_first=np.array([0, 1, 0]),
        sample_degree=np.array([2, 1, 1]),
        unit_rank=np.array([0, 0, 1]),
    )


def test_microbatch_ticks_add_up() -> None:
    tokens, offsets = np.array([100, 30, 8]), np.array([0, 2, 3, 3])
    layout = _layout()
    loads = microbatch_ticks(layout, tokens, 1.0 * tokens, offsets, np.array([5, 6, 70]), ROUND)
    # Rank 0: 50 tokens, wire 25, hop 3, units 5 + 6. Rank 1: 80 tokens, wire 25, hop 3, unit 70.
    assert loads.parts.tolist() == [[507, 0, 28, 11], [807, 0, 28, 70], [87, 0, 0, 0]]
    assert loads.ticks.tolist() == [807 + 28 + 70 + 100, 187]
    assert loads.slowest.tolist() == [1, 0]
    assert loads.tokens.tolist() == [50, 80, 8]
    assert loads.encoder_tokens.tolist() == [11, 70, 0]
    starts, makespan = queue_starts(layout, loads.ticks, 2)
    assert starts.tolist() == [0, 1005]
    assert makespan == 1192


@pytest.mark.parametrize(
    ("encoder_floor", "llm_floor", "expected"),
    [(0, 0, [[70, 935], [0, 187]]), (90, 200, [[90, 935], [0, 200]])],
)
def test_waves_wait_for_the_slowest_rank_of_each_part(
    encoder_floor: int, llm_floor: int, expected: list[list[int]]
) -> None:
    costs = ROUND._replace(encoder_floor=encoder_floor, llm_floor=llm_floor)
    tokens, offsets = np.array([100, 30, 8]), np.array([0, 2, 3, 3])
    layout = _layout()
    loads = microbatch_ticks(layout, tokens, 1.0 * tokens, offsets, np.array([5, 6, 70]), costs)
    assert wave_parts(layout, loads, 2, costs).tolist() == expected


def test_degree_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"degree is 0; expected 1 or more"):
        sample_columns(np.array([5]), 0, COSTS)
