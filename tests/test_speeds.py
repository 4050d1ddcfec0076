"""Speeds follow slow ranks, stay where only noise or long batches move times, and say whom."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.errors import CostsError
from dynapar.speeds import FULL, MOST_CHANGE, Pace, SpeedFollower, Speeds, follow, news


def observe(state: Speeds, factors: list[float], *, steps: int, noise: float, seed: int) -> Speeds:
    """Steps of uneven length in which rank r takes factors[r] times what was predicted."""
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        work = draw.lognormal(0.0, 1.0, len(factors))
        strays = draw.lognormal(0.0, noise, len(factors))
        paces = [
            Pace(float(p), float(p * f * e)) for p, f, e in zip(work, factors, strays, strict=True)
        ]
        state = follow(state, paces)
    return state


def test_a_rank_that_takes_twice_as_long_has_half_the_speed() -> None:
    for ranks in (2, 4):
        factors = [3.0] * ranks
        factors[1] = 6.0
        state = observe(Speeds.equal(ranks), factors, steps=14, noise=0.02, seed=ranks)
        assert state.published[1] == pytest.approx(FULL / 2, rel=0.12)
        assert state.published[0] == FULL
        assert state.scale == pytest.approx(3.0, rel=0.05)


def test_three_slow_ranks_of_four_are_slow() -> None:
    state = observe(Speeds.equal(4), [1.0, 2.0, 2.0, 2.0], steps=14, noise=0.02, seed=0)
    assert state.published[0] == FULL
    assert all(speed == pytest.approx(FULL / 2, rel=0.12) for speed in state.published[1:])
    assert state.scale == pytest.approx(1.0, rel=0.12)


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_long_batches_make_nobody_slow(seed: int) -> None:
    state = Speeds.equal(4)
    for step in range(40):
        state = observe(state, [1.0] * 4, steps=1, noise=0.03, seed=100 * seed + step)
        assert state.published == (FULL,) * 4
        assert news(state, step=0, since=0)[1] == []


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=6))
def test_a_ratio_changes_by_no_more_than_its_bound(measured: list[float]) -> None:
    before = observe(Speeds.equal(len(measured)), [1.0] * len(measured), steps=3, noise=0, seed=0)
    after = follow(before, [Pace(1.0, each) for each in measured])
    for old, new in zip(before.ratios, after.ratios, strict=True):
        assert 1 / MOST_CHANGE - 1e-9 <= new / old <= MOST_CHANGE + 1e-9
    assert max(after.published) == FULL
    assert min(after.published) >= 1


def test_the_line_names_rank_and_factor_once() -> None:
    lines: list[str] = []
    follower = SpeedFollower(Speeds.equal(3), first=0, lag=3, report=lines.append)
    for step in range(30):
        slow = 2.0 if 5 <= step < 18 else 1.0
        follower.observe(step, [[Pace(1.0, 1.0)], [Pace(4.0, 4.0)], [Pace(2.0, 2.0 * slow)]])
        assert follower.at(step) is follower.after(max(step - 3, -1))
    assert lines[0].startswith("step 6: rank 2 takes 1.25 times as long as the fastest rank")
    assert "planned with that from step 9 on" in lines[0]
    assert all("rank 2" in line for line in lines)
    assert lines[-1].endswith("rank 2 is as fast as the other ranks again")
    assert len(lines) <= 5


def test_a_checkpoint_keeps_them_by_value() -> None:
    state = observe(Speeds.equal(3), [1.0, 1.0, 2.0], steps=9, noise=0.02, seed=1)
    read = json.loads(json.dumps(state.to_state()))
    assert Speeds.from_state(read, ranks=3) == state
    other = Speeds.from_state(read, ranks=4)
    assert other.published == (FULL,) * 4
    assert other.scale == pytest.approx(state.scale)
    assert Speeds.from_state(None, ranks=2) == Speeds.equal(2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_time_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(CostsError, match=rf"rank 1 measured {bad} seconds .* expected finite"):
        follow(Speeds.equal(2), [Pace(1.0, 1.0), Pace(1.0, bad)])


def test_a_speed_does_not_flicker_at_the_edge_of_the_noise() -> None:
    """A rank that strays about the edge is slow until it is well inside."""
    lines: list[str] = []
    follower = SpeedFollower(Speeds.equal(2), first=0, lag=3, report=lines.append)
    draw = np.random.default_rng(0)
    for step in range(60):
        slow = 1.0 if step < 5 else float(draw.choice([1.07, 1.17]))
        follower.observe(step, [[Pace(1.0, 1.0)], [Pace(1.0, slow)]])
    assert any("rank 1 takes" in line for line in lines)
    assert not any("as fast as the other ranks again" in line for line in lines)


def test_plans_that_stay_as_they_are_say_so() -> None:
    lines: list[str] = []
    follower = SpeedFollower(
        Speeds.equal(2), first=0, lag=3, report=lines.append, unused="the layout is given"
    )
    for step in range(8):
        follower.observe(step, [[Pace(1.0, 1.0)], [Pace(1.0, 1.0 if step < 3 else 2.0)]])
    assert lines
    for line in lines:
        assert "plans stay as they are, since the layout is given. Look at" in line
        assert "planned with that" not in line
