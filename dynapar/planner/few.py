"""Plans of a handful of samples: the best there is, or at least a better one."""

from __future__ import annotations

from dynapar.packing.exact import FEWER_THAN, RANKS, UNITS, complete, exact
from dynapar.planner.problem import Candidate, Problem, price


def search_few(
    problem: Problem, dynamic: Candidate, homogeneous: int, bound: int
) -> tuple[Candidate, int]:
    """Look for a layout that is shorter than both, where samples, ranks and units are few.

    Args:
        problem: The step, with at least one sample.
        dynamic: The best dynamic layout known.
        homogeneous: Makespan of the best one of one degree, in ticks; 0 where there is none.
        bound: The lower bound, in ticks.

    Returns:
        The best dynamic layout, and a makespan that none is below: the shorter one's, where the
        search could prove that, else the bound.
    """
    rival = min(dynamic.makespan, homogeneous or dynamic.makespan)
    limits, units = problem.limits, problem.unit_tokens
    if (
        rival <= bound
        or problem.config.equal_counts
        or len(problem.samples) >= FEWER_THAN
        or limits.ranks > RANKS
        or len(units) > UNITS
        or not complete(limits)
    ):
        return dynamic, bound
    answer = exact(
        problem.lockstep, rival, bound, problem.order, problem.unit_offsets, units,
        problem.jobs, limits, problem.constants,
    )  # fmt: skip
    if answer.found:
        dynamic = price(problem, answer.layout)
    return dynamic, int(answer.makespan) if answer.optimal else bound
