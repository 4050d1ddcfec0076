"""The static layout: one degree for a whole run, balanced as well as it can be.

At each degree every step is balanced several ways (LPT and best fit, both with the planner's local
search; multifit; largest differencing), and the shortest is kept. Under sync "microbatch" the
microbatches of each of them are also dealt to the waves anew, the longest together. The degree is
the one at which every sample of every step fits and the steps together are shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dynapar.errors import PlanError
from dynapar.packing.construct import construct_groups
from dynapar.packing.moldable import work_at_degree
from dynapar.packing.ticks import IntArray
from dynapar.planner.differencing import by_differencing, in_waves, microbatch_rows
from dynapar.planner.homogeneous import at_degree, homogeneous_degrees
from dynapar.planner.problem import Candidate, Problem, better, candidate

HALVINGS = 8
"""Of multifit's range."""


class StaticLayouts(NamedTuple):
    """What a static search found."""

    degree: int
    """The best degree."""
    layouts: Mapping[int, tuple[Candidate, ...]]
    """For each degree that fits, one layout a step."""


def static_layouts(problems: Sequence[Problem], *, every: bool = False) -> StaticLayouts:
    """Find the best static degree of a run.

    Args:
        problems: The steps, 1 or more, of one cluster.
        every: Lay out every degree that fits; else those that cannot win are left out.

    Raises:
        PlanError: No single degree fits all samples.
    """
    fitting = [set(homogeneous_degrees(problem)) for problem in problems]
    degrees = sorted(set.intersection(*fitting))
    found: dict[int, tuple[Candidate, ...]] = {}
    best, least = 0, 0
    floors = {degree: sum(_floor(problem, degree) for problem in problems) for degree in degrees}
    for degree in sorted(degrees, key=lambda d: (floors[d], d)):
        if best and not every and floors[degree] >= least:
            continue
        layouts = [static_layout(problem, degree) for problem in problems]
        steps = tuple(layout for layout in layouts if layout is not None)
        if len(steps) < len(problems):
            continue
        found[degree] = steps
        total = sum(step.makespan for step in steps)
        if not best or total < least:
            best, least = degree, total
    if not best:
        raise PlanError(
            "there is no static layout: no single degree holds every sample of these steps. "
            "Raise capacity or encoder_capacity, or leave the largest samples out"
        )
    return StaticLayouts(best, dict(sorted(found.items())))


def _floor(problem: Problem, degree: int) -> int:
    """What no layout at this degree falls below."""
    work = int(work_at_degree(problem.jobs, degree, problem.limits, problem.constants))
    return work // problem.limits.ranks


def static_layout(problem: Problem, degree: int) -> Candidate | None:
    """The shortest layout of one step at one degree; None where it does not fit.

    Args:
        problem: The step.
        degree: One of `homogeneous_degrees`.
    """
    if not len(problem.samples):
        return in_waves(problem, degree, [])
    order = problem.order
    best = at_degree(problem, order, degree)
    best = better(best, _multifit(problem, order, degree, best))
    best = better(best, by_differencing(problem, order, degree))
    if problem.lockstep and best is not None:
        best = better(best, in_waves(problem, degree, microbatch_rows(best.layout)))
    return best


def _multifit(
    problem: Problem, order: IntArray, degree: int, start: Candidate | None
) -> Candidate | None:
    """Bisect the end that best fit meets, between no waste at all and what is known."""
    if start is None:
        return None
    waves = len(start.waves)
    low, high = _floor(problem, degree), start.makespan
    if waves:
        low, high = low // waves, int(start.waves.sum(axis=1).max())
    best: Candidate | None = None
    block = degree if degree > problem.limits.node else None
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        done, strip = construct_groups(
            order, middle, degree, True, waves, problem.jobs, problem.limits, problem.constants
        )
        found = candidate(problem, strip, waves=waves, block=block, mixed=False) if done else None
        best = better(best, found)
        reached = found is not None and found.makespan <= middle * max(1, waves)
        low, high = (low, middle) if reached else (middle, high)
    return best
