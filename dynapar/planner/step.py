"""The dynamic candidates where ranks meet once a step."""

from __future__ import annotations

from typing import NamedTuple

from dynapar.packing.construct import construct
from dynapar.packing.ticks import IntArray
from dynapar.planner.problem import Candidate, Problem, candidate, polish

GOOD = 0.01
"""Stop at a gap of this."""
FEW = 64
"""Up to this many samples, all combinations are tried."""
ROUNDS = 200
"""Rounds of local search, and two more a rank."""


class Setting(NamedTuple):
    """One way to build a schedule (see `packing.moldable`)."""

    percent: int
    """The target, in percent of its base."""
    width: int
    ride: int
    best_fit: bool
    apart: bool = False
    """Balance encoder and LLM each for itself (in waves only)."""


_LOCKSTEP = ((102, 2, 2, False), (100, 1, 1, False))
_NODES = ((100, 8, 8, False, True), (104, 4, 4, False, True))
"""Wide microbatches, where encoder units can be dealt freely."""
_STACKED = (
    (100, 2, 1, False),
    (100, 1, 1, False),
    (103, 4, 4, False),
    (100, 2, 2, True),
    (100, 4, 1, False),
    (103, 2, 2, False),
)


def settings(problem: Problem) -> tuple[Setting, ...]:
    """What to try, in this order."""
    samples, limits = len(problem.samples), problem.limits
    if samples <= FEW:
        rows = [
            (percent, width, ride, best_fit, False)
            for percent in (100, 102, 104, 108, 114, 120, 130)
            for width in (4, 2, 8, 1)
            for ride in ((1, width) if width > 1 else (1,))
            for best_fit in (False, True)
        ]
    elif problem.lockstep:
        rows = [(*row, False) for row in _LOCKSTEP]
    else:
        rows = [(*row, False) for row in _STACKED]
    if problem.lockstep and len(problem.unit_tokens):
        rows = [*_NODES, *rows]
    most = min(limits.node, limits.largest)
    cut = [Setting(p, min(w, most), min(r, most), fit, apart) for p, w, r, fit, apart in rows]
    return tuple(dict.fromkeys(cut))


def attempt(
    problem: Problem,
    order: IntArray,
    *,
    target: int,
    setting: Setting,
    goal: int,
    rounds: int,
    waves: int = 0,
) -> Candidate | None:
    """Construct, improve, lay out and price; None where a sample finds no room.

    Args:
        problem: The step.
        order: Samples, longest first.
        target: What the construction aims at, in ticks.
        setting: How it is done; its percentage is already in `target`.
        goal: Where the local search may stop.
        rounds: Of local search.
        waves: Waves of the strip; 0 where microbatches stack.
    """
    done, strip = construct(
        order, target, setting.width, setting.ride, setting.best_fit, False, waves,
        problem.jobs, problem.limits, problem.constants,
    )  # fmt: skip
    if not done:
        return None
    polish(problem, strip, rounds=rounds, goal=goal)
    return candidate(problem, strip, waves=waves)


def best_step(problem: Problem, order: IntArray, bound: int) -> list[Candidate]:
    """The dynamic layouts found, the shortest first; one within `GOOD` of the bound is enough."""
    rounds = ROUNDS + 2 * problem.limits.ranks
    found: list[Candidate] = []
    for setting in settings(problem):
        tried = attempt(
            problem,
            order,
            target=bound * setting.percent // 100 + 1,
            setting=setting,
            goal=bound + bound // 500,
            rounds=rounds,
        )
        if tried is None:
            continue
        found.append(tried)
        if tried.makespan <= bound * (1 + GOOD):
            break
    found.sort(key=lambda each: each.makespan)
    return found or [one_by_one(problem, order)]


def one_by_one(problem: Problem, order: IntArray) -> Candidate:
    """Every sample in a microbatch of its own, at its least degree: always within all limits."""
    waves = len(order) if problem.lockstep else 0
    done, strip = construct(
        order, 1 << 50, 1, 0, False, False, waves,
        problem.jobs, problem.limits, problem.constants,
    )  # fmt: skip
    found = candidate(problem, strip, waves=waves) if done else None
    if found is None:
        raise AssertionError("a sample that fits alone found no room alone")
    return found
