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
from dynapar.packing.bins import settle
from dynapar.packing.construct import construct_groups
from dynapar.packing.differencing import largest_differencing
from dynapar.packing.moldable import work_at_degree
from dynapar.packing.ticks import IntArray, Layout, microbatch_ticks, sample_columns
from dynapar.planner.homogeneous import MORE_WAVES, at_degree, homogeneous_degrees
from dynapar.planner.problem import Candidate, Problem, candidate, longest_first, price
from dynapar.planner.step import better

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
        return price(problem, _lay_out(problem, degree, [], []))
    order = longest_first(problem)
    best = at_degree(problem, order, degree)
    best = better(best, _multifit(problem, order, degree, best))
    best = better(best, _differencing(problem, order, degree))
    if problem.lockstep and best is not None:
        sets = _microbatches(best.layout)
        best = better(best, price(problem, _lay_out(problem, degree, sets, [0] * len(sets))))
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


def _differencing(problem: Problem, order: IntArray, degree: int) -> Candidate | None:
    """Largest differencing over the rings; in waves, over the rings of all waves."""
    jobs, limits = problem.jobs, problem.limits
    columns = sample_columns(jobs.tokens, degree, problem.constants).sum(axis=1)
    weights = columns + jobs.encoder_ticks // degree
    rings = len(_rings(problem, degree))
    if not problem.lockstep:
        ring_of = largest_differencing(weights, rings)
        sets, queues = [], []
        for ring in range(rings):
            for rows in _first_fit(problem, degree, [i for i in order if ring_of[i] == ring]):
                sets.append(rows)
                queues.append(ring)
        return price(problem, _lay_out(problem, degree, sets, queues))
    least = max(1, -(-int(jobs.tokens.sum()) // (limits.ranks * limits.capacity)))
    best: Candidate | None = None
    for waves in range(least, least + MORE_WAVES):
        bin_of = largest_differencing(weights, waves * rings)
        members: list[list[int]] = [[] for _ in range(waves * rings)]
        for i in order:
            members[bin_of[i]].append(int(i))
        sets = [rows for rows in members if rows]
        if all(len(_first_fit(problem, degree, rows)) == 1 for rows in sets):
            found = price(problem, _lay_out(problem, degree, sets, [0] * len(sets)))
            best = better(best, found)
    return best


def _first_fit(problem: Problem, degree: int, rows: Sequence[int]) -> list[list[int]]:
    """Rows into microbatches of one ring, each into the first with room; `rows` longest first."""
    limits, jobs = problem.limits, problem.jobs
    sets: list[list[int]] = []
    held: list[tuple[int, int, int, int]] = []
    for i in sorted(rows, key=lambda i: -int(jobs.tokens[i])):
        share = _share(int(jobs.tokens[i]), degree)
        size, units = int(jobs.unit_size[i]), int(jobs.units[i])
        for place, (tokens, encoder, largest, count) in enumerate([*held, (0, 0, 0, 0)]):
            new = (
                tokens + share,
                encoder + int(jobs.encoder_tokens[i]),
                max(largest, size),
                count + units,
            )
            alone = place == len(held)
            if not alone and (
                new[0] > limits.capacity or _dealt(*new[1:], degree) > limits.encoder_capacity
            ):
                continue
            if alone:
                sets.append([])
                held.append(new)
            held[place] = new
            sets[place].append(int(i))
            break
    return sets


def _share(tokens: int, degree: int) -> int:
    """As `moldable.share_tokens`."""
    return tokens // degree if tokens % degree == 0 else 2 * -(-tokens // (2 * degree))


def _dealt(total: int, largest: int, units: int, degree: int) -> int:
    """As `moldable.dealt_tokens`."""
    return min(-(-(total + largest * (degree - 1)) // degree), -(-units // degree) * largest)


def _rings(problem: Problem, degree: int) -> list[int]:
    """First ranks of the rings of a degree."""
    limits = problem.limits
    if degree > limits.node:
        return list(range(0, limits.ranks - degree + 1, degree))
    nodes = range(0, limits.ranks, limits.node)
    return [f for node in nodes for f in range(node, node + limits.node - degree + 1, degree)]


def _microbatches(layout: Layout) -> list[list[int]]:
    """The samples of each microbatch."""
    offsets = layout.offsets.tolist()
    order = layout.order.tolist()
    return [order[offsets[b] : offsets[b + 1]] for b in range(len(offsets) - 1)]


def _lay_out(
    problem: Problem, degree: int, sets: Sequence[Sequence[int]], rings: Sequence[int]
) -> Layout:
    """Microbatches of one degree, on the given rings; in waves, on rings and waves by length.

    Args:
        problem: The step.
        degree: Of every sample.
        sets: Rows of each microbatch.
        rings: The ring of each microbatch, one after another; not read where there are waves.
    """
    count, n = len(sets), len(problem.samples)
    layout = Layout(
        first=np.zeros(count, np.int64),
        width=np.full(count, degree, np.int64),
        wave=np.zeros(count, np.int64),
        offsets=np.cumsum([0, *map(len, sets)], dtype=np.int64),
        order=np.array([row for rows in sets for row in rows], np.int64),
        sample_first=np.zeros(n, np.int64),
        sample_degree=np.full(n, degree, np.int64),
        unit_rank=np.zeros(len(problem.unit_tokens), np.int64),
    )
    limits, work = problem.limits, (problem.jobs.tokens, problem.unit_offsets, problem.unit_tokens)
    done = settle(
        layout, *work, limits.capacity, limits.encoder_capacity,
        problem.lockstep, False, problem.constants,
    )  # fmt: skip
    if not done:
        raise AssertionError("microbatches that were filled within the capacities exceed them")
    first = np.array(_rings(problem, degree), np.int64)
    if problem.lockstep:
        ticks = microbatch_ticks(layout, *work, problem.constants).ticks
        ranking = np.argsort(-ticks, kind="stable")
        layout = _reorder(layout, ranking)
        place = np.arange(count)
        layout.first[:] = first[place % len(first)]
        layout.wave[:] = place // len(first)
    else:
        layout.first[:] = first[np.array(rings, np.int64)]
    shift = np.zeros(n, np.int64)
    shift[layout.order] = np.repeat(layout.first, np.diff(layout.offsets))
    layout.sample_first[:] += shift
    layout.unit_rank[:] += np.repeat(shift, np.diff(problem.unit_offsets))
    return layout


def _reorder(layout: Layout, ranking: IntArray) -> Layout:
    """The same microbatches in another order; where they stand on the ranks is left as it is."""
    sets = _microbatches(layout)
    moved = [sets[b] for b in ranking]
    return layout._replace(
        offsets=np.cumsum([0, *map(len, moved)], dtype=np.int64),
        order=np.array([row for rows in moved for row in rows], np.int64),
    )
