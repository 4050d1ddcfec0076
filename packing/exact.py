"""The best plan of a handful of samples, by trying all of them within a count.

**The space.** All plans that the planning problem allows: which samples share a microbatch, each
sample on any window of its microbatch (whole on one of its ranks, too), each encoder unit on any of
its ranks, any order of microbatches, any waves. Where rules narrow the degrees or the first ranks
of rings there may be several narrowest windows around given ranks: there nothing is searched
(`complete`).

**Layers.** Take any valid plan. Give each microbatch the layer after the last one below it on any
of its ranks (its wave, where there are waves): then microbatches of a layer share no rank, and
running layer after layer keeps the order on every rank, hence all times. So a plan is a layer and a
window for each sample, and a rank for each unit; the microbatches follow from the footprints (see
`board`), widened to whole half nodes where they span nodes. Each microbatch of the plan contains
those that follow so, which hold the same on each rank and pay at most its latency. Nothing is lost,
but in one case: two half nodes of two nodes are no window, and a third one may stand on either
side. The search goes on with two; a finished plan is tried with the third on the right everywhere,
and on the left; where neither is as short as with two, the search owns that it is not complete.

**Search.** Depth first, samples by work: first which samples are shared and where, then where the
whole ones go, then the units. A branch ends when what is placed, or the rank-ticks that are placed
and still to come, cannot end before the best plan known. All of these only grow as more is placed.

**Symmetry.** The mirror image of a plan is a plan: the first shared sample stands in the first half
of the cluster. So is its reverse in time, where ranks meet once: the second layer that is opened
runs after the first one. Once all shared samples are placed, two ranks of one microbatch with like
loads are one choice, since what would follow on one may follow on the other; and so are two ranks
that nothing touches, where there are no units, or one node, whose untouched ranks may change places
with all that is between them. In waves a layer's microbatches may change places in a node that no
window across nodes touches, and each may be mirrored: there shared samples are only tried packed
from the node's first rank on, in the order of their first samples; the same where ranks meet once,
with one layer and no units.

The count bounds the work, never a clock, so every rank finds the same plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .board import (
    DEGREE,
    FIRST,
    GROUP,
    GROUP_END,
    HIGH,
    LAYER,
    LEAST,
    LOW,
    OPEN,
    ORDER,
    OWNER,
    TIME,
    TURN,
    WHOLE,
    Board,
    Case,
    empty_board,
    group,
    make_case,
    put,
    put_unit,
    value,
)
from .branch import (
    COUNT,
    CURSOR,
    TAKEN,
    Trail,
    empty_trail,
    list_choices,
    mirrored,
    packed,
    rank_choice,
    take,
    take_back,
)
from .moldable import Jobs, Limits
from .ticks import Coefficients, IntArray, Layout

FEWER_THAN = 12
"""Samples from which on nothing is searched."""
RANKS, UNITS = 16, 64
"""Most ranks and encoder units of a search."""
VISITS = 1 << 17
"""Ranks of layers, and samples, looked at, over all branches, before the search gives up."""


class Answer(NamedTuple):
    """The best plan found."""

    makespan: int
    """Of the plan, or the one to beat where nothing shorter was found."""
    found: bool
    """Whether a shorter plan than that was found."""
    optimal: bool
    """Whether no plan is shorter."""
    layout: Layout
    """The plan; without microbatches where none was found."""


class _Best(NamedTuple):
    """The shortest plan so far."""

    numbers: IntArray
    """(3,) makespan, side of the third half node, 1 where a plan is kept."""
    samples: IntArray
    """(5, n) as on the board."""
    unit_rank: IntArray
    layers: IntArray


def complete(limits: Limits) -> bool:
    """Whether rings may have every degree up to the largest and start wherever they fit."""
    inside = min(limits.node, limits.largest)
    wide = range(limits.node + limits.grain, limits.largest + 1, limits.grain)
    free = not limits.aligned and limits.pod == limits.ranks
    return free and limits.degrees.tolist() == [*range(1, inside + 1), *wide]


@kernel
def _floor(depth: int, board: Board, case: Case, limits: Limits, costs: Coefficients) -> int:
    """What no plan that completes the board can beat; `group` must know of all of it."""
    total, longest, n = 0, 0, board.samples.shape[1]
    for i in range(n):
        if board.samples[LAYER, i] == WHOLE:
            total += case.price[i, 0]
            longest = max(longest, case.price[i, 0])
        elif board.samples[LAYER, i] == OPEN:
            total += case.samples[LEAST, i]
    if not case.lockstep:
        for q in range(max(0, depth + 1 - 2 * n), case.units.shape[1]):
            total += case.units[TIME, case.units[TURN, q]]
    base = costs.fixed + costs.linear_rank
    others = max(base, costs.llm_floor) * (case.fewest - 1) if case.lockstep else 0
    alone = case.apart + longest + base + others
    return max(alone, value(board, True, total, case, limits, costs))


@kernel
def _shared_choices(
    trail: Trail, depth: int, most: int, board: Board, case: Case, limits: Limits,
    costs: Coefficients,
) -> int:  # fmt: skip
    """List what can be done with a shared sample, most promising first; the choices looked at."""
    n, used = board.samples.shape[1], board.layers[0]
    layers = used if used == n else used + 1 if case.lockstep else 2 * used + 1
    choices = 1 + layers * case.windows.shape[1]
    for choice in range(choices):
        if mirrored(depth, choice, board, case, limits):
            continue
        held = take(trail, depth, choice, board, case, limits)
        if held and group(board, 0, limits, costs) >= 0:
            weight = _floor(depth, board, case, limits, costs)
            if weight < most and (depth < n - 1 or packed(board, case, limits)):
                rank_choice(trail, depth, choice, weight)
        take_back(trail, depth, board, case, limits)
    return int(choices)


@kernel
def _keep(best: _Best, board: Board, makespan: int, side: int) -> None:
    best.numbers[0], best.numbers[1], best.numbers[2] = makespan, side, 1
    best.samples[:] = board.samples
    best.unit_rank[:] = board.unit_rank
    best.layers[:] = board.layers


@kernel
def _finish(
    board: Board, best: _Best, halves: bool, case: Case, limits: Limits, costs: Coefficients
) -> bool:
    """Keep a finished plan that is shorter; False where its value is not certain."""
    plain = value(board, False, 0, case, limits, costs)
    if plain >= best.numbers[0]:
        return True
    if not halves:
        _keep(best, board, plain, 0)
        return True
    for side in (1, 2):
        if group(board, side, limits, costs) >= 0:
            makespan = value(board, False, 0, case, limits, costs)
            if makespan < best.numbers[0]:
                _keep(best, board, makespan, side)
    return bool(plain >= best.numbers[0])


@kernel
def _search(
    board: Board, best: _Best, goal: int, first: bool, most: int, case: Case, limits: Limits,
    costs: Coefficients,
) -> bool:  # fmt: skip
    """Look for plans shorter than `best`; whether there is none that it did not find.

    With `first`, only the first choice of whole samples and units is looked at. Not more than
    `most` ranks of layers and samples are.
    """
    n = board.samples.shape[1]
    depths = 2 * n + case.units.shape[1]
    trail = empty_trail(case, limits)
    numbers, makespan = trail.depths, best.numbers
    visits, depth, certain, fresh = 0, 0, True, True
    while depth >= 0 and makespan[0] > goal:
        if fresh:
            fresh = False
            numbers[COUNT, depth], numbers[CURSOR, depth] = 0, 0
            if depth < n:
                looked = _shared_choices(trail, depth, makespan[0], board, case, limits, costs)
                visits += looked * (limits.ranks + n) * (board.layers[0] + 1)
            else:
                list_choices(trail, depth, board, case, limits)
                if first:
                    numbers[COUNT, depth] = min(1, numbers[COUNT, depth])
        elif numbers[TAKEN, depth] >= 0:
            take_back(trail, depth, board, case, limits)
        at = numbers[CURSOR, depth]
        if at == numbers[COUNT, depth] or (depth < n and trail.weight[depth, at] >= makespan[0]):
            depth -= 1
            continue
        visits += (limits.ranks + n) * (board.layers[0] + 1)
        if visits > most:
            return False
        numbers[CURSOR, depth] += 1
        if not take(trail, depth, trail.choice[depth, at], board, case, limits):
            continue
        halves = group(board, 0, limits, costs)
        if halves < 0:
            continue
        if depth >= n and _floor(depth, board, case, limits, costs) >= makespan[0]:
            continue
        if depth + 1 == depths:
            certain = _finish(board, best, halves == 1, case, limits, costs) and certain
        else:
            depth += 1
            fresh = True
    return certain and not first


@kernel
def _lay_out(best: _Best, case: Case, limits: Limits, costs: Coefficients) -> Layout:
    """The plan that was kept, as a layout."""
    n, samples = case.samples.shape[1], best.samples
    board = empty_board(n, limits.ranks, case.units.shape[1])
    board.layers[:] = best.layers
    for i in range(n):
        place = np.searchsorted(limits.degrees, samples[DEGREE, i])
        put(board, i, samples[LAYER, i], samples[FIRST, i], place, 1, case, limits)
    for u in range(case.units.shape[1]):
        i, r = case.units[OWNER, u], best.unit_rank[u]
        low, high = min(board.samples[LOW, i], r), max(board.samples[HIGH, i], r)
        put_unit(board, u, r, low, high, 1, case)
    group(board, best.numbers[1], limits, costs)
    columns = np.zeros((3, n), np.int64)
    offsets, order = np.zeros(n + 1, np.int64), np.empty(n, np.int64)
    count, placed = 0, 0
    for q in range(best.layers[0]):
        v = best.layers[q + 1]
        cells = board.cells[:, v]
        for r in range(limits.ranks):
            if cells[GROUP, r] != r:
                continue
            columns[0, count], columns[1, count] = r, cells[GROUP_END, r] + 1 - r
            columns[2, count] = q if case.lockstep else 0
            for i in case.samples[ORDER]:
                if samples[LAYER, i] == v and cells[GROUP, samples[FIRST, i]] == r:
                    order[placed] = i
                    placed += 1
            count += 1
            offsets[count] = placed
    return Layout(
        columns[0, :count].copy(), columns[1, :count].copy(), columns[2, :count].copy(),
        offsets[: count + 1].copy(), order, samples[FIRST].copy(), samples[DEGREE].copy(),
        best.unit_rank.copy(),
    )  # fmt: skip


@kernel
def exact(
    lockstep: bool, rival: int, goal: int, order: IntArray, unit_offsets: IntArray,
    unit_tokens: IntArray, jobs: Jobs, limits: Limits, costs: Coefficients,
) -> Answer:  # fmt: skip
    """Look for a plan that ends before `rival`, in the space of the module's text.

    Args:
        lockstep: Whether ranks meet in waves.
        rival: Makespan of the best plan known, in ticks.
        goal: A lower bound: where it is reached, the search ends.
        order: (n,) samples, most work first; fewer than `FEWER_THAN`.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens, of at most `UNITS` units.
        jobs: All samples.
        limits: Cluster, of at most `RANKS` ranks, and capacities; must be `complete`.
        costs: The coefficients.
    """
    n, units = order.shape[0], unit_tokens.shape[0]
    case = make_case(lockstep, order, unit_offsets, unit_tokens, jobs, limits, costs)
    best = _Best(
        np.array([rival, 0, 0]), np.zeros((5, n), np.int64), np.zeros(units, np.int64),
        np.zeros(n + 1, np.int64),
    )  # fmt: skip
    certain = rival <= goal
    if not certain:
        for most in (VISITS // 4, VISITS):
            board = empty_board(n, limits.ranks, units)
            certain = _search(board, best, goal, most < VISITS, most, case, limits, costs)
    found = best.numbers[2] == 1
    none = np.zeros(0, np.int64)
    layout = Layout(none, none, none, np.zeros(1, np.int64), none, none, none, none)
    if found:
        layout = _lay_out(best, case, limits, costs)
    makespan = best.numbers[0]
    return Answer(makespan, found, certain or makespan <= goal, layout)
