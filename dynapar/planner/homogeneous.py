"""The best layout with one degree for all samples: what a dynamic plan must not be worse than."""

from __future__ import annotations

from dynapar.packing.construct import construct_groups
from dynapar.packing.moldable import all_fit, overhead, work_at_degree
from dynapar.planner.differencing import by_differencing, in_waves
from dynapar.planner.problem import Candidate, Problem, better, candidate, polish

ROUNDS = 100
"""Rounds of local search, and one more a rank."""
MORE_WAVES = 4
"""Waves tried beyond the fewest that hold all tokens."""
NEAR = 0.003
"""A degree that ends within this of a rival may still win when it is dealt in more ways."""
FEW = 128
"""Up to this many samples, every degree that may win is dealt in all ways."""
CLOSE = 0.001
"""Multifit is left out where what is known is this close to the floor."""
FAR = 0.02
"""Multifit ends where its first try is so much longer than what is known."""
HALVINGS = 6
"""Of multifit's range."""


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
    return bool(all_fit(problem.jobs, degree, problem.limits))


def best_homogeneous(
    problem: Problem, bound: int, *, rival: int | None = None
) -> tuple[int, list[Candidate]]:
    """The best degree and its layout, then those of other degrees.

    (0, []) where no single degree fits all samples.

    Args:
        problem: The step.
        bound: Its lower bound, in ticks.
        rival: A makespan that is known, in ticks. A degree whose floor is not below it cannot win
            and is dealt in one way, to price it, unless the samples are `FEW`. None: every degree
            that may be the best is dealt in all ways.
    """
    floors = {d: max(bound, floor(problem, d)) for d in homogeneous_degrees(problem)}
    best_degree, best = 0, None
    others: list[Candidate] = []
    few = len(problem.samples) <= FEW
    for degree in sorted(floors, key=lambda d: (floors[d], d)):
        if best is not None and floors[degree] >= best.makespan:
            break
        found = at_degree(problem, degree)
        hopeless = rival is not None and floors[degree] >= rival and not few
        if found is not None and not hopeless and found.makespan > floors[degree]:
            known = [each for each in (rival, best and best.makespan) if each is not None]
            found = sharpened(problem, degree, found, against=min(known, default=None))
        if found is None:
            continue
        if best is not None and found.makespan >= best.makespan:
            others.append(found)
            continue
        others += [best] if best is not None else []
        best_degree, best = degree, found
    return best_degree, [best, *others] if best is not None else []


def floor(problem: Problem, degree: int, waves: int = 0) -> int:
    """What no layout at this degree falls below, in ticks.

    The slowest rank has at least the mean of the ranks that run anything: their share of all work,
    and a microbatch's overhead as often as memory forces one on them, once at least. And the
    longest sample is in one of the microbatches.

    Args:
        problem: The step.
        degree: Of every sample.
        waves: How many there are; 0 for as few as memory allows, or where ranks meet once.
    """
    jobs, limits, costs = problem.jobs, problem.limits, problem.constants
    ranks = usable_ranks(problem, degree)
    total, longest = work_at_degree(jobs, degree, costs)
    work, shared = int(total) // ranks, int(overhead(degree, costs))
    if not waves:
        microbatches = int(jobs.tokens.sum()) // limits.capacity
        work += max(shared, shared * microbatches // ranks)
    else:
        work = max(work + waves * shared, waves * costs.llm_floor)
    return max(work, shared + int(longest))


def usable_ranks(problem: Problem, degree: int) -> int:
    """Ranks that groups of this degree take up."""
    limits = problem.limits
    if degree > limits.node:
        return limits.ranks // degree * degree
    return limits.ranks // limits.node * (limits.node // degree) * degree


def at_degree(problem: Problem, degree: int) -> Candidate | None:
    """A good layout of one degree, quickly; None where it does not fit.

    Args:
        problem: The step.
        degree: One at which every sample fits.
    """
    if not problem.lockstep:
        return _packed(problem, degree, waves=0)
    limits = problem.limits
    least = max(1, -(-int(problem.jobs.tokens.sum()) // (limits.ranks * limits.capacity)))
    best: Candidate | None = None
    for waves in range(least, least + MORE_WAVES + least // 3):
        if best is not None and floor(problem, degree, waves) >= best.makespan:
            break
        found = _packed(problem, degree, waves=waves)
        if best is not None and (found is None or found.makespan >= best.makespan):
            break
        best = found or best
    return best


def _packed(problem: Problem, degree: int, *, waves: int) -> Candidate | None:
    """Longest first to the machine that ends earliest; where memory forbids it, best fit."""
    goal = floor(problem, degree) // max(1, waves) + problem.constants.fixed
    found = _grouped(problem, degree, goal, best_fit=False, waves=waves)
    if found is None:
        found = _grouped(problem, degree, goal + goal // 50, best_fit=True, waves=waves)
    return found


def _grouped(
    problem: Problem, degree: int, goal: int, *, best_fit: bool, waves: int, improved: bool = True
) -> Candidate | None:
    limits = problem.limits
    done, strip = construct_groups(
        problem.order, goal, degree, best_fit, waves, problem.jobs, limits, problem.constants
    )
    if not done:
        return None
    if improved:
        polish(problem, strip, rounds=ROUNDS + limits.ranks)
    wide = degree > limits.node and limits.ranks % degree == limits.pod % degree == 0
    return candidate(problem, strip, waves=waves, block=degree if wide else None, mixed=False)


def sharpened(
    problem: Problem, degree: int, start: Candidate, *, against: int | None = None
) -> Candidate:
    """The best of `start` and what largest differencing and best fit find, in the best waves.

    Args:
        problem: The step.
        degree: One at which every sample fits.
        start: What `at_degree` found.
        against: A makespan that is known, in ticks: where largest differencing does not come `NEAR`
            it, and the samples are more than `FEW`, that is all. None: everything is tried.
    """
    if len(problem.samples) <= FEW:
        against = None
    rival = start.makespan if against is None else min(start.makespan, against)
    best = better(start, by_differencing(problem, degree, rival=rival)) or start
    if against is not None and best.makespan > against * (1 + NEAR):
        return best
    least = floor(problem, degree)
    if best.makespan > least * (1 + CLOSE):
        best = better(best, _multifit(problem, degree, best)) or best
    if problem.lockstep:
        layout = best.layout
        best = better(best, in_waves(problem, degree, layout.offsets, layout.order)) or best
    return best


def _multifit(problem: Problem, degree: int, start: Candidate) -> Candidate | None:
    """Bisect the end that best fit meets, between no waste at all and what is known."""
    waves = len(start.waves)
    low, high = floor(problem, degree), start.makespan
    if waves:
        low, high = low // waves, int(start.waves.sum(axis=1).max())
    best: Candidate | None = None
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        found = _grouped(problem, degree, middle, best_fit=True, waves=waves, improved=False)
        best = better(best, found)
        if best is not None and best.makespan > start.makespan * (1 + FAR):
            break
        reached = found is not None and found.makespan <= middle * max(1, waves)
        low, high = (low, middle) if reached else (middle, high)
    return best
