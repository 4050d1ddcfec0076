"""The best layout with one degree for all samples: what a dynamic plan must not be worse than."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynapar.packing.construct import construct_groups
from dynapar.packing.moldable import fits, work_at_degree
from dynapar.packing.ticks import IntArray
from dynapar.planner.differencing import by_differencing
from dynapar.planner.problem import Candidate, Problem, better, candidate, polish

ROUNDS = 100
"""Rounds of local search, and one more a rank."""
MORE_WAVES = 4
"""Waves tried beyond the fewest that hold all tokens."""
NEAR = 0.01
"""Where the best degree may still win."""
FEW = 128
SHARPENED = 2048
"""Samples up to which dealing by largest differencing is quick, at all degrees and at one."""


def homogeneous_degrees(problem: Problem) -> tuple[int, ...]:
    """Degrees that divide a node, or across nodes cluster and pods, at which all samples fit."""
    limits = problem.limits
    inside = [d for d in range(1, limits.node + 1) if limits.node % d == 0]
    wide = range(limits.node + limits.grain, limits.ranks + 1, limits.grain)
    degrees = inside + [d for d in wide if limits.ranks % d == limits.pod % d == 0]
    allowed = set(limits.degrees.tolist())
    return tuple(d for d in degrees if d in allowed and fits_all(problem, d))


def fits_all(problem: Problem, degree: int) -> bool:
    """Whether every sample keeps within both capacities at this degree."""
    jobs, limits = problem.jobs, problem.limits
    if -(-int(jobs.tokens.max(initial=0)) // degree) > limits.capacity:
        return False
    return all(fits(jobs, i, degree, limits) for i in _suspects(problem, degree))


def _suspects(problem: Problem, degree: int) -> Sequence[int]:
    jobs, limits = problem.jobs, problem.limits
    share = (limits.capacity - 1) * degree
    heavy = (jobs.tokens > share) | (jobs.encoder_tokens > limits.encoder_capacity)
    if degree > 1:
        heavy |= jobs.tokens < 2 * degree
    return [int(i) for i in np.flatnonzero(heavy)]


def best_homogeneous(
    problem: Problem, order: IntArray, *, rival: int | None = None
) -> tuple[int, Candidate | None]:
    """The best degree and its layout; (0, None) where no single degree fits all samples.

    Args:
        problem: The step.
        order: Its samples, longest first.
        rival: A makespan that is known, in ticks: where one degree ends `NEAR` it, and the samples
            are at most `SHARPENED`, they are also dealt by largest differencing. None: always.
            Up to `FEW` samples are dealt so at every degree.
    """
    limits, constants = problem.limits, problem.constants
    degrees = homogeneous_degrees(problem)
    work = {d: int(work_at_degree(problem.jobs, d, limits, constants)) for d in degrees}
    best_degree, best = 0, None
    for degree in sorted(degrees, key=lambda d: (work[d], d)):
        if best is not None and work[degree] >= best.makespan * limits.ranks:
            continue
        found = at_degree(problem, order, degree)
        if len(problem.samples) <= FEW:
            found = better(found, by_differencing(problem, order, degree))
        if found is not None and (best is None or found.makespan < best.makespan):
            best_degree, best = degree, found
    near = rival is None or (best is not None and best.makespan <= rival * (1 + NEAR))
    if best is not None and near and FEW < len(problem.samples) <= SHARPENED:
        best = better(best, by_differencing(problem, order, best_degree))
    return best_degree, best


def at_degree(problem: Problem, order: IntArray, degree: int) -> Candidate | None:
    """The best layout found at one degree; None where it does not fit."""
    if not problem.lockstep:
        return _packed(problem, order, degree, waves=0)
    limits = problem.limits
    least = -(-int(problem.jobs.tokens.sum()) // (limits.ranks * limits.capacity))
    best: Candidate | None = None
    for waves in range(max(1, least), max(1, least) + MORE_WAVES + least // 3):
        found = _packed(problem, order, degree, waves=waves)
        if best is not None and (found is None or found.makespan >= best.makespan):
            break
        best = found or best
    return best


def _packed(problem: Problem, order: IntArray, degree: int, *, waves: int) -> Candidate | None:
    """Longest first to the machine that ends earliest, or fullest up to a target; then improved."""
    limits = problem.limits
    work = int(work_at_degree(problem.jobs, degree, limits, problem.constants))
    usable = limits.ranks // degree * degree
    if degree <= limits.node:
        usable = limits.ranks // limits.node * (limits.node // degree) * degree
    target = work // (usable * max(1, waves)) + problem.constants.fixed
    wide = degree > limits.node and limits.ranks % degree == limits.pod % degree == 0
    best: Candidate | None = None
    for best_fit, goal in ((False, target), (True, target + target // 50)):
        done, strip = construct_groups(
            order, goal, degree, best_fit, waves, problem.jobs, limits, problem.constants
        )
        if not done:
            continue
        polish(problem, strip, rounds=ROUNDS + limits.ranks)
        found = candidate(problem, strip, waves=waves, block=degree if wide else None, mixed=False)
        if found is not None and (best is None or found.makespan < best.makespan):
            best = found
    return best
