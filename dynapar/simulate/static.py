"""The static layout: one degree for a whole run, balanced as well as it can be.

At each degree every step is balanced several ways (LPT and best fit, both with the planner's local
search; multifit; largest differencing), and the shortest is kept. Under sync "microbatch" the
microbatches of each of them are also dealt to the waves anew, the longest together. The degree is
the one at which every sample of every step fits and the steps together are shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dynapar.errors import PlanError
from dynapar.planner.differencing import by_differencing, in_waves
from dynapar.planner.homogeneous import at_degree, floor, homogeneous_degrees, sharpened
from dynapar.planner.problem import Candidate, Problem


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
    floors = {degree: sum(floor(problem, degree) for problem in problems) for degree in degrees}
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


def static_layout(problem: Problem, degree: int) -> Candidate | None:
    """The shortest layout of one step at one degree; None where it does not fit.

    Args:
        problem: The step.
        degree: One of `homogeneous_degrees`.
    """
    if not len(problem.samples):
        none = np.zeros(0, np.int64)
        return in_waves(problem, degree, np.zeros(1, np.int64), none)
    start = at_degree(problem, degree)
    return by_differencing(problem, degree) if start is None else sharpened(problem, degree, start)
