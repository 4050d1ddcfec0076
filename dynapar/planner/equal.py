"""Plans in which every rank runs equally many microbatches, whatever `sync` is.

Runtimes that switch context parallelism themselves call all ranks for each microbatch: so the step
is cut into waves that leave no rank idle, and all samples of a microbatch have its width as their
degree. Waves come from the candidates of sync "microbatch"; those with idle ranks are shared out
anew among their samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dynapar.errors import PlanError
from dynapar.packing.bins import settle
from dynapar.packing.moldable import NEVER, least_degree
from dynapar.packing.ticks import IntArray, Layout
from dynapar.packing.tiling import block_ticks, tile
from dynapar.planner.differencing import microbatch_rows, rings_of
from dynapar.planner.homogeneous import at_degree, best_homogeneous, homogeneous_degrees
from dynapar.planner.problem import Candidate, Problem, better, price
from dynapar.planner.waves import best_waves

MORE_WAVES = 3
"""Waves tried beyond the fewest that hold all tokens, where samples are dealt anew."""
FEW = 4
"""Up to this many samples a rank, dealing anew is always tried."""

NOWHERE = -1
"""The first rank of a block that has not been placed yet."""


class Block(NamedTuple):
    """A microbatch to be: its first rank, its ranks, and the samples that all of them share."""

    first: int
    """Or `NOWHERE`."""
    width: int
    rows: list[int]


Wave = list[Block]


def in_waves(problem: Problem) -> Problem:
    """The same step with ranks that meet in every wave."""
    return replace(problem, config=replace(problem.config, sync="microbatch"))


def waves_of(layout: Layout) -> list[Wave]:
    """The microbatches of a layout, wave by wave."""
    waves: list[Wave] = [[] for _ in range(int(layout.wave.max(initial=-1)) + 1)]
    columns = zip(
        layout.wave.tolist(),
        layout.first.tolist(),
        layout.width.tolist(),
        microbatch_rows(layout),
        strict=True,
    )
    for wave, first, width, rows in columns:
        waves[wave].append(Block(first, width, rows))
    return waves


def equal_candidates(problem: Problem, bound: int) -> tuple[Candidate, int, Candidate | None]:
    """The best layouts found: of any degrees, and (with its degree) of a single one.

    Args:
        problem: The step, with at least one sample.
        bound: Its lower bound, in ticks.

    Raises:
        PlanError: None was found.
    """
    degree, homogeneous = best_equal_homogeneous(problem)
    best = better(best_equal(problem, bound), homogeneous)
    if best is None:
        raise no_way(problem)
    return best, degree, homogeneous


def no_way(problem: Problem) -> PlanError:
    """What to say where samples cannot fill all ranks."""
    return PlanError(
        f"equal_counts: no way was found in which {len(problem.samples)} samples keep all "
        f"{problem.limits.ranks} ranks busy in every microbatch, with degrees "
        f"{', '.join(map(str, problem.limits.degrees.tolist()))}. Raise the global batch, allow "
        f"more degrees, or leave equal_counts out"
    )


def best_equal(problem: Problem, bound: int) -> Candidate | None:
    """The best layout found of any degrees; None where none was found."""
    waved = in_waves(problem)
    best = filled(problem, waves_of(best_waves(waved, problem.order, bound)[0].layout))
    if best is None or len(problem.samples) <= FEW * problem.limits.ranks:
        for waves in _dealt(problem):
            best = better(best, filled(problem, waves))
    return best


def best_equal_homogeneous(problem: Problem) -> tuple[int, Candidate | None]:
    """The best layout found with one degree, and the degree; (0, None) where there is none."""
    waved = in_waves(problem)
    degree, all_found = best_homogeneous(waved, waved.bound())
    best = _spread(problem, waves_of(all_found[0].layout), degree) if all_found else None
    if best is not None:
        return degree, best
    for other in homogeneous_degrees(problem):
        found = equal_at_degree(problem, other)
        if found is not None and (best is None or found.makespan < best.makespan):
            degree, best = other, found
    return (degree, best) if best is not None else (0, None)


def equal_at_degree(problem: Problem, degree: int) -> Candidate | None:
    """The layout found with this degree, which all samples fit; None where there is none."""
    found = at_degree(in_waves(problem), degree)
    return None if found is None else _spread(problem, waves_of(found.layout), degree)


def _spread(problem: Problem, waves: Sequence[Wave], degree: int) -> Candidate | None:
    """Move samples to rings that have none, each from the microbatch that has most to do."""
    rings = rings_of(problem, degree)
    if len(rings) * degree < problem.limits.ranks:
        return None
    work = problem.jobs.ticks[:, 1]
    full: list[Wave] = []
    for wave in waves:
        taken = {block.first for block in wave}
        idle = [first for first in rings if first not in taken]
        full.append([*wave, *(Block(first, degree, []) for first in idle)])
    blocks = [block for wave in full for block in wave]
    for block in blocks:
        if block.rows:
            continue
        donors = [other for other in blocks if len(other.rows) > 1]
        if not donors:
            return None
        donor = max(donors, key=lambda other: int(work[other.rows].sum()))
        half = int(work[donor.rows].sum()) // 2
        small = [row for row in donor.rows if work[row] <= half]
        row = max(small, key=lambda row: int(work[row])) if small else donor.rows[-1]
        donor.rows.remove(row)
        block.rows.append(row)
    return _priced(problem, full)


def filled(problem: Problem, waves: Sequence[Wave]) -> Candidate | None:
    """Share each wave's ranks out so that none is idle; None where no way was found."""
    full = []
    for wave in waves:
        done = _fill(problem, wave)
        if done is None:
            return None
        full.append(done)
    return _priced(problem, full)


def _priced(problem: Problem, waves: Sequence[Wave]) -> Candidate | None:
    """Lay waves out, every sample at its block's width; None where one exceeds a capacity."""
    limits, jobs = problem.limits, problem.jobs
    blocks = [block for wave in waves for block in sorted(wave)]
    number = np.repeat(np.arange(len(waves)), [len(wave) for wave in waves]).astype(np.int64)
    n = len(problem.samples)
    layout = Layout(
        first=np.array([block.first for block in blocks], np.int64),
        width=np.array([block.width for block in blocks], np.int64),
        wave=number if problem.lockstep else np.zeros_like(number),
        offsets=np.cumsum([0, *(len(block.rows) for block in blocks)], dtype=np.int64),
        order=np.array([row for block in blocks for row in block.rows], np.int64),
        sample_first=np.zeros(n, np.int64),
        sample_degree=np.ones(n, np.int64),
        unit_rank=np.zeros(len(problem.unit_tokens), np.int64),
    )
    done = settle(
        layout, jobs.tokens, jobs.reach, problem.unit_offsets, problem.unit_tokens, limits.capacity,
        limits.encoder_capacity, problem.lockstep, False, problem.constants,
    )  # fmt: skip
    return price(problem, layout) if done else None


def _fill(problem: Problem, wave: Wave) -> Wave | None:
    """One wave without idle ranks."""
    ranks = problem.limits.ranks
    idle = ranks - sum(block.width for block in wave)
    sets = [list(block.rows) for block in sorted(wave)]
    degrees = problem.limits.degrees.tolist()
    if not idle and wave[0].first != NOWHERE:
        table = _table(problem, sets)
        columns = [degrees.index(block.width) for block in sorted(wave)]
        if all(table[row, column] < NEVER for row, column in enumerate(columns)):
            return wave
    value, best = _tiled(problem, sets)
    work = problem.jobs.ticks[:, 1]
    most = min(ranks, sum(map(len, sets)), len(sets) + max(idle, 1))
    more = 0
    while True:
        sets.sort(key=lambda rows: -int(work[rows].sum()))
        other, found = _tiled(problem, sets)
        if other < value:
            value, best = other, found
        if len(sets) >= most:
            return best
        more = 2 * more + 1
        for _ in range(min(more, most - len(sets))):
            _split(problem, sets)


def _split(problem: Problem, sets: list[list[int]]) -> None:
    """Cut the set that has most to do, of those with several samples, into two like ones."""
    work = problem.jobs.ticks[:, 1]
    rows = max((rows for rows in sets if len(rows) > 1), key=lambda rows: int(work[rows].sum()))
    sets.remove(rows)
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for row in sorted(rows, key=lambda row: -int(work[row])):
        side = int(sums[1] < sums[0])
        halves[side].append(row)
        sums[side] += int(work[row])
    sets.extend(halves)


def _table(problem: Problem, sets: Sequence[Sequence[int]]) -> IntArray:
    rows = np.array([row for each in sets for row in each], np.int64)
    offsets = np.cumsum([0, *map(len, sets)], dtype=np.int64)
    return block_ticks(rows, offsets, problem.jobs, problem.limits, problem.constants)


def _tiled(problem: Problem, sets: Sequence[list[int]]) -> tuple[int, Wave | None]:
    """Consecutive ranks for all sets in this order; None where they do not cover all ranks."""
    value, widths = tile(_table(problem, sets), problem.limits)
    if value >= NEVER:
        return NEVER, None
    firsts = np.cumsum([0, *widths.tolist()]).tolist()
    return int(value), [
        Block(first, width, list(rows))
        for first, width, rows in zip(firsts, widths.tolist(), sets, strict=False)
    ]


def _dealt(problem: Problem) -> Iterator[list[Wave]]:
    """Samples dealt to waves, and in each wave to ranks, longest first; ranks are left idle."""
    jobs, limits = problem.jobs, problem.limits
    room = limits.ranks * limits.capacity
    fewest = max(1, -(-int(jobs.tokens.sum()) // room))
    work = jobs.ticks[:, 1]
    for count in range(fewest, fewest + MORE_WAVES + 1):
        members: list[list[int]] = [[] for _ in range(count)]
        spent, held = [0] * count, [0] * count
        for row in problem.order.tolist():
            tokens = int(jobs.tokens[row])
            open_ = [w for w in range(count) if held[w] + tokens <= room]
            if not open_:
                break
            wave = min(open_, key=lambda w: (spent[w], w))
            members[wave].append(row)
            spent[wave] += int(work[row])
            held[wave] += tokens
        if sum(map(len, members)) == len(problem.samples) and all(members):
            yield [_dealt_wave(problem, rows) for rows in members]


def _dealt_wave(problem: Problem, rows: Sequence[int]) -> Wave:
    """Long samples alone at their least degree, the others on the ranks that are left."""
    limits, work = problem.limits, problem.jobs.ticks[:, 1]
    target = int(work[list(rows)].sum()) // limits.ranks + problem.constants.fixed
    wave, left, others = [], limits.ranks, []
    for row in rows:
        degree = int(least_degree(problem.jobs, row, target, limits, problem.constants))
        if degree > 1 and degree < left:
            wave.append(Block(NOWHERE, degree, [row]))
            left -= degree
        else:
            others.append(row)
    bins: list[list[int]] = [[] for _ in range(min(left, len(others)))]
    heap = [(0, place) for place in range(len(bins))]
    for row in others:
        spent, place = heap[0]
        bins[place].append(row)
        heapq.heapreplace(heap, (spent + int(work[row]), place))
    return wave + [Block(NOWHERE, 1, each) for each in bins]
