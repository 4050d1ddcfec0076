"""Layouts of one degree, balanced by largest differencing.

The longest-first rule of `homogeneous` is uneven by what its last samples bring, which shows where
all samples are alike or a rank has few of them. Here samples are dealt to rings by largest
differencing first, and to microbatches after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynapar.packing.bins import settle
from dynapar.packing.differencing import largest_differencing
from dynapar.packing.ticks import IntArray, Layout, microbatch_ticks, sample_columns
from dynapar.planner.problem import Candidate, Problem, better, price
from dynapar.rings import first_ranks

MORE_WAVES = 4
"""Waves tried beyond the fewest that hold all tokens."""


def by_differencing(problem: Problem, order: IntArray, degree: int) -> Candidate | None:
    """Deal samples to the rings of a degree; in waves, to the rings of all waves.

    Args:
        problem: The step, with at least one sample.
        order: Its samples, longest first.
        degree: One at which every sample fits.

    Returns:
        The layout, every sample at `degree`; None where no deal to waves fits.
    """
    jobs, limits = problem.jobs, problem.limits
    columns = sample_columns(jobs.tokens, degree, problem.constants, reach=jobs.reach).sum(axis=1)
    weights = columns + jobs.encoder_ticks // degree
    rings = len(rings_of(problem, degree))
    if not problem.lockstep:
        sets, queues = [], []
        for ring, members in enumerate(_deal(weights, order, rings)):
            parts = _first_fit(problem, degree, members)
            sets += parts
            queues += [ring] * len(parts)
        return _priced(problem, lay_out_rings(problem, degree, sets, queues))
    least = max(1, -(-int(jobs.tokens.sum()) // (limits.ranks * limits.capacity)))
    best: Candidate | None = None
    for waves in range(least, least + MORE_WAVES):
        sets = [members for members in _deal(weights, order, waves * rings) if members]
        if all(len(_first_fit(problem, degree, rows)) == 1 for rows in sets):
            best = better(best, in_waves(problem, degree, sets))
    return best


def _deal(weights: IntArray, order: IntArray, bins: int) -> list[list[int]]:
    """The samples of each bin, in order."""
    bin_of = largest_differencing(weights, bins).tolist()
    members: list[list[int]] = [[] for _ in range(bins)]
    for i in order.tolist():
        members[bin_of[i]].append(i)
    return members


def in_waves(problem: Problem, degree: int, sets: Sequence[Sequence[int]]) -> Candidate | None:
    """Deal microbatches to waves, the longest together; None where one exceeds a capacity.

    Args:
        problem: The step, under sync "microbatch".
        degree: Of every sample.
        sets: Rows of each microbatch.
    """
    return _priced(problem, lay_out_rings(problem, degree, sets, [0] * len(sets)))


def _priced(problem: Problem, layout: Layout | None) -> Candidate | None:
    return None if layout is None else price(problem, layout)


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
    """As `moldable.shared`."""
    return tokens // degree if tokens % degree == 0 else 2 * -(-tokens // (2 * degree))


def _dealt(total: int, largest: int, units: int, degree: int) -> int:
    """As `moldable.dealt_tokens`."""
    return min(-(-(total + largest * (degree - 1)) // degree), -(-units // degree) * largest)


def rings_of(problem: Problem, degree: int) -> list[int]:
    """First ranks of the rings of a degree."""
    firsts: list[int] = []
    for first in first_ranks(problem.cluster, degree, problem.config.rings):
        if not firsts or first >= firsts[-1] + degree:
            firsts.append(first)
    return firsts


def microbatch_rows(layout: Layout) -> list[list[int]]:
    """The samples of each microbatch."""
    offsets = layout.offsets.tolist()
    order = layout.order.tolist()
    return [order[offsets[b] : offsets[b + 1]] for b in range(len(offsets) - 1)]


def lay_out_rings(
    problem: Problem, degree: int, sets: Sequence[Sequence[int]], rings: Sequence[int]
) -> Layout | None:
    """Microbatches of one degree, on the given rings; in waves, on rings and waves by length.

    Args:
        problem: The step.
        degree: Of every sample.
        sets: Rows of each microbatch.
        rings: The ring of each microbatch, one after another; not read where there are waves.

    Returns:
        The layout; None where a microbatch exceeds a capacity.
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
    limits, jobs = problem.limits, problem.jobs
    work = (jobs.tokens, jobs.reach, problem.unit_offsets, problem.unit_tokens)
    done = settle(
        layout, *work, limits.capacity, limits.encoder_capacity,
        problem.lockstep, False, problem.constants,
    )  # fmt: skip
    if not done:
        return None
    first = np.array(rings_of(problem, degree), np.int64)
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
    sets = microbatch_rows(layout)
    moved = [sets[b] for b in ranking]
    return layout._replace(
        offsets=np.cumsum([0, *map(len, moved)], dtype=np.int64),
        order=np.array([row for rows in moved for row in rows], np.int64),
    )
