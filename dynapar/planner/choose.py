"""Which of a step's layouts to run: the shortest, or one that is hardly longer and strays less.

Microbatches and ranks are not as fast as predicted. Ranks that each have a microbatch of their own
wait for the slowest of many; those that share wide ones wait for few. So the layout of the least
predicted time need not be the one of the least expected time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from dynapar.packing.exact import FEWER_THAN
from dynapar.packing.noise import Stray, expected_ticks, stray
from dynapar.planner.homogeneous import sharpened
from dynapar.planner.problem import Candidate, Problem, steadied

RANK_SHARE = 0.4
"""Sigma of a rank's factor, as a share of a microbatch's."""
LONGER = 0.02
"""No layout is taken that is longer than the shortest by more than this share."""
WEIGHT = 0.25
"""A layout has to be shorter in expectation by this share of what it is longer in prediction."""
MOST = 4
"""Layouts that are looked at, the shortest first."""


class Choice(NamedTuple):
    """A layout, and whether it is one of a single degree."""

    candidate: Candidate
    single: bool


def choose(problem: Problem, dynamic: Sequence[Candidate], single: Sequence[Candidate]) -> Choice:
    """The layout that a step is run by; never longer than the best one of a single degree.

    Args:
        problem: The step.
        dynamic: Layouts of any degrees, one or more, the shortest first.
        single: Layouts of one degree each, the shortest first; none where no degree fits all.
    """
    shortest, gate = Choice(dynamic[0], False), problem.config.gate
    limit = shortest.candidate.makespan
    if single:
        limit = single[0].makespan
        if limit <= dynamic[0].makespan or dynamic[0].makespan >= limit * (1.0 - gate) > 0:
            shortest = Choice(single[0], True)
    if problem.config.equal_counts:
        return shortest
    best = shortest
    if problem.config.noise > 0.0 and len(problem.samples) >= FEWER_THAN:
        by_gate = shortest.single and dynamic[0].makespan < single[0].makespan
        best = _steadiest(problem, shortest, [] if by_gate else dynamic, single, limit)
    return best._replace(candidate=steadied(problem, best.candidate))


def _steadiest(
    problem: Problem,
    shortest: Choice,
    dynamic: Sequence[Candidate],
    single: Sequence[Candidate],
    limit: int,
) -> Choice:
    """The layout of the least expected makespan, weighed against the predicted one."""
    limit = min(limit, int(shortest.candidate.makespan * (1 + LONGER)))
    others = [Choice(each, False) for each in dynamic] + [Choice(each, True) for each in single]
    close = [
        each
        for each in others
        if each.candidate is not shortest.candidate and each.candidate.makespan <= limit
    ]
    if not close:
        return shortest
    close = sorted(close, key=lambda each: each.candidate.makespan)[: MOST - 1]
    best = min([shortest, *close], key=lambda each: _worth(problem, each.candidate))
    if best.single and not shortest.single:  # no longer than `homogeneous_plan`'s at this degree
        degree = int(best.candidate.layout.sample_degree[0])
        best = best._replace(candidate=sharpened(problem, degree, best.candidate))
    return best


@cache
def _stray(sigma: float) -> Stray:
    return stray(sigma * RANK_SHARE, sigma)


def _worth(problem: Problem, found: Candidate) -> float:
    expected = expected_ticks(
        found.layout, found.loads, len(found.waves), problem.limits.ranks,
        _stray(problem.config.noise), problem.constants,
    )  # fmt: skip
    return float(expected) + WEIGHT * found.makespan
