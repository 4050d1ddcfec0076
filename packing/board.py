"""A plan under trial: samples on layers and windows, units on ranks, and what that is worth.

A *layer* is a set of microbatches that share no rank; layers run one after another. What the
microbatches of a layer are follows from what is placed on it: the *footprint* of a sample runs from
the first to the last of its ranks and its units' ranks, and footprints that overlap belong
together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .bounds import whole_units
from .moldable import NEVER, Jobs, Limits
from .ticks import (
    Coefficients,
    IntArray,
    cut_tokens,
    latency_ticks,
    reach_ticks,
    unit_columns,
)

LOAD, HELD, BUSY, ENCODING, ENCODED, UNITS, JOINT, GROUP, GROUP_END, LATENCY = range(10)
"""Of `Board.cells`: LLM ticks of samples, their tokens, their number; encoder ticks, encoder
tokens, encoder units; footprints that hold this rank and the next one; the first rank of the
microbatch that the rank is in (-1: none), and, at its first rank, the last one and its latency."""
LAYER, FIRST, DEGREE, LOW, HIGH = range(5)
"""Of `Board.samples`: layer (or `WHOLE`, `OPEN`), first rank, ranks, first and last rank of the
footprint."""
OPEN, WHOLE = -1, -2
"""Layers of a sample that nothing is decided about, and of one that will be whole on some rank."""
TOKENS, ORDER, LEAST = range(3)
"""Of `Case.samples`: tokens; samples by work, most first; rank-ticks at the cheapest degree."""
OWNER, SIZE, TIME, TURN = range(4)
"""Of `Case.units`: sample, encoder tokens, ticks; units by ticks, dearest first."""


class Board(NamedTuple):
    """What is placed so far: n samples on at most n layers."""

    cells: IntArray
    """(10, n, ranks) what is on each rank of each layer."""
    samples: IntArray
    """(5, n)"""
    unit_rank: IntArray
    """(units,) rank of each unit, or -1."""
    layers: IntArray
    """(n + 1,) how many there are, and then these in the order in which they run."""
    scratch: IntArray
    """(ranks,)"""


class Case(NamedTuple):
    """What is to be placed."""

    lockstep: bool
    samples: IntArray
    """(3, n)"""
    price: IntArray
    """(n, degrees) ticks on each rank, by the place of the degree in `Limits.degrees`."""
    units: IntArray
    """(4, units)"""
    windows: IntArray
    """(2, windows) of two ranks or more: first rank, place of the degree."""
    fewest: int
    """Waves (pairs of rank and microbatch, where ranks meet once) that hold all tokens."""
    apart: int
    """Least encoder part of all waves together; 0 where ranks meet once."""


@kernel
def empty_board(n: int, ranks: int, units: int) -> Board:
    """Nothing is placed."""
    samples = np.zeros((5, n), np.int64)
    samples[LAYER] = OPEN
    return Board(
        np.zeros((10, n, ranks), np.int64),
        samples,
        np.full(units, -1, np.int64),
        np.zeros(n + 1, np.int64),
        np.zeros(ranks, np.int64),
    )


@kernel
def _windows(limits: Limits) -> IntArray:
    most = limits.ranks * limits.degrees.shape[0]
    windows = np.empty((2, most), np.int64)
    count = 0
    for k in range(1, limits.degrees.shape[0]):
        degree = limits.degrees[k]
        step = 1 if degree <= limits.node else limits.grain
        for start in range(0, limits.ranks - degree + 1, step):
            if degree > limits.node or start % limits.node + degree <= limits.node:
                windows[0, count], windows[1, count] = start, k
                count += 1
    return windows[:, :count].copy()


@kernel
def make_case(
    lockstep: bool, order: IntArray, unit_offsets: IntArray, unit_tokens: IntArray, jobs: Jobs,
    limits: Limits, costs: Coefficients,
) -> Case:  # fmt: skip
    """Price all samples at all degrees, and list all windows; arguments as in `exact.exact`."""
    n, degrees = order.shape[0], limits.degrees.shape[0]
    samples = np.full((3, n), NEVER, np.int64)
    samples[TOKENS], samples[ORDER] = jobs.tokens, order
    price = np.empty((n, degrees), np.int64)
    units = np.empty((4, unit_tokens.shape[0]), np.int64)
    for i in range(n):
        for k in range(degrees):
            degree = limits.degrees[k]
            linear, attention, exchange = reach_ticks(jobs.tokens[i], jobs.reach[i], degree, costs)
            price[i, k] = linear + attention + exchange
            if -(-jobs.tokens[i] // degree) <= limits.capacity:
                samples[LEAST, i] = min(samples[LEAST, i], degree * price[i, k])
        units[OWNER, unit_offsets[i] : unit_offsets[i + 1]] = i
    ticks = unit_columns(unit_tokens, costs)
    units[SIZE], units[TIME] = unit_tokens, ticks
    for u in range(ticks.shape[0]):
        turn = u
        while turn > 0 and ticks[units[TURN, turn - 1]] < ticks[u]:
            units[TURN, turn] = units[TURN, turn - 1]
            turn -= 1
        units[TURN, turn] = u
    encoding = -(-unit_tokens.sum() // limits.encoder_capacity)
    fewest, apart = max(-(-jobs.tokens.sum() // limits.capacity), encoding), 0
    if lockstep:
        fewest = max(1, -(-fewest // limits.ranks))
        floor = costs.encoder_floor * -(-encoding // limits.ranks)
        apart = max(floor, whole_units(ticks, limits.ranks))
    return Case(lockstep, samples, price, units, _windows(limits), fewest, apart)


@kernel
def put(
    board: Board, i: int, v: int, first: int, place: int, sign: int, case: Case, limits: Limits
) -> bool:
    """Place sample i on layer v (sign 1) or take it back (-1); whether the ranks hold its tokens.

    `place` is that of its degree in `Limits.degrees`.
    """
    cells, degree = board.cells, limits.degrees[place]
    fits = True
    for position in range(degree):
        r = first + position
        cells[LOAD, v, r] += sign * case.price[i, place]
        cells[HELD, v, r] += sign * cut_tokens(case.samples[TOKENS, i], degree, position)
        cells[BUSY, v, r] += sign
        fits = fits and cells[HELD, v, r] <= limits.capacity
        if position > 0:
            cells[JOINT, v, r - 1] += sign
    sample = board.samples[:, i]
    sample[LAYER], sample[FIRST], sample[DEGREE] = v, first, degree
    sample[LOW], sample[HIGH] = first, first + degree - 1
    return fits


@kernel
def put_unit(board: Board, u: int, r: int, low: int, high: int, sign: int, case: Case) -> None:
    """Put unit u on rank r, or take it back; its sample's footprint is to run from low to high."""
    sample, cells = board.samples[:, case.units[OWNER, u]], board.cells
    v = sample[LAYER]
    cells[ENCODING, v, r] += sign * case.units[TIME, u]
    cells[ENCODED, v, r] += sign * case.units[SIZE, u]
    cells[UNITS, v, r] += sign
    cells[JOINT, v, sample[LOW] : sample[HIGH]] -= 1
    cells[JOINT, v, low:high] += 1
    sample[LOW], sample[HIGH] = low, high
    board.unit_rank[u] = r if sign > 0 else -1


@kernel
def open_layer(board: Board, at: int) -> int:
    """A new layer that runs as number `at`."""
    layers = board.layers
    v = layers[0]
    for q in range(v, at, -1):
        layers[q + 1] = layers[q]
    layers[at + 1] = v
    layers[0] += 1
    return int(v)


@kernel
def close_layer(board: Board) -> None:
    """Undo the last `open_layer`."""
    layers = board.layers
    layers[0] -= 1
    at = 1
    while layers[at] != layers[0]:
        at += 1
    for q in range(at, layers[0] + 1):
        layers[q] = layers[q + 1]


@kernel
def _group(board: Board, v: int, side: int, limits: Limits, costs: Coefficients) -> int:
    cells, joint = board.cells, board.scratch
    ranks, node, grain = limits.ranks, limits.node, limits.grain
    joint[:] = cells[JOINT, v]
    found, again = 0, True
    while again:
        again = False
        r = 0
        while r < ranks:
            first = r
            while r + 1 < ranks and joint[r] > 0:
                r += 1
            end = r
            r += 1
            cells[GROUP, v, first] = -1
            if cells[BUSY, v, first] == 0 and cells[UNITS, v, first] == 0 and end == first:
                continue
            if first // node != end // node:
                low, high = first - first % grain, end + grain - 1 - end % grain
                if high - low < node:
                    found = 1
                    high += grain if side == 1 else 0
                    low -= grain if side == 2 else 0
                if low < first or high > end:
                    again = True
                    joint[low:high] = 1
            if end - first + 1 > limits.largest:
                return -1
            cells[GROUP, v, first : end + 1] = first
            cells[GROUP_END, v, first], cells[LATENCY, v, first] = end, 0
    for i in range(board.samples.shape[1]):
        if board.samples[LAYER, i] == v and board.samples[DEGREE, i] > 1:
            first = cells[GROUP, v, board.samples[FIRST, i]]
            latency = latency_ticks(board.samples[DEGREE, i], costs)
            cells[LATENCY, v, first] = max(cells[LATENCY, v, first], latency)
    return found


@kernel
def group(board: Board, side: int, limits: Limits, costs: Coefficients) -> int:
    """Find the microbatches of all layers.

    What spans nodes is widened to whole half nodes. Two half nodes of two nodes are no window: a
    third one is added on the right (side 1) or on the left (2), or not yet (0).

    Returns:
        0; 1 where there were two such half nodes; -1 where ranks are more than a ring may have.
    """
    found = 0
    for v in range(board.layers[0]):
        state = _group(board, v, side, limits, costs)
        if state < 0:
            return -1
        found = max(found, state)
    return found


@kernel
def _in_waves(
    board: Board, floor: bool, to_come: int, case: Case, limits: Limits, costs: Coefficients
) -> int:
    cells, waves = board.cells, board.layers[0]
    least = max(costs.fixed, costs.llm_floor)
    encoders, rest, work = 0, 0, to_come
    for v in range(waves):
        encoder, llm = 0, 0
        for r in range(limits.ranks):
            first = cells[GROUP, v, r]
            if first < 0:
                continue
            load = cells[LOAD, v, r] + cells[LATENCY, v, first]
            work += load
            if cells[BUSY, v, r] > 0:
                load += costs.linear_rank
            llm = max(llm, load)
            if cells[UNITS, v, r] > 0:
                encoder = max(encoder, cells[ENCODING, v, r], costs.encoder_floor)
        encoders += encoder
        rest += max(llm + costs.fixed, least)
    if not floor:
        return encoders + rest
    base = costs.fixed + costs.linear_rank
    more = max(0, case.fewest - waves)
    rest += more * max(base, costs.llm_floor)
    even = (waves + more) * base - (-work // limits.ranks)
    return int(max(encoders, case.apart) + max(rest, even))


@kernel
def _in_step(
    board: Board, floor: bool, to_come: int, case: Case, limits: Limits, costs: Coefficients
) -> int:
    cells, free = board.cells, board.scratch
    free[:] = 0
    work, pairs, makespan = to_come, 0, 0
    for q in range(board.layers[0]):
        v = board.layers[q + 1]
        r = 0
        while r < limits.ranks:
            if cells[GROUP, v, r] < 0:
                r += 1
                continue
            end, longest, start = cells[GROUP_END, v, r], 0, 0
            for k in range(r, end + 1):
                load = cells[LOAD, v, k] + cells[ENCODING, v, k]
                if cells[BUSY, v, k] > 0:
                    load += costs.linear_rank
                longest, start = max(longest, load), max(start, free[k])
                work += load
            latency = cells[LATENCY, v, r]
            done = start + longest + latency + costs.fixed
            free[r : end + 1] = done
            makespan = max(makespan, done)
            work += (end + 1 - r) * latency
            pairs += end + 1 - r
            r = end + 1
    if not floor:
        return makespan
    idle = 0
    for r in range(limits.ranks):
        idle += free[r] == 0
    work += max(pairs + idle, case.fewest) * costs.fixed
    if case.units.shape[1] == 0:
        work += idle * costs.linear_rank
    return int(max(makespan, -(-work // limits.ranks)))


@kernel
def value(
    board: Board, floor: bool, to_come: int, case: Case, limits: Limits, costs: Coefficients
) -> int:
    """The makespan of what is placed; `group` must know of all of it.

    With `floor`, no plan that completes it ends sooner: its rank-ticks, those of what is `to_come`
    (where ranks meet once, with its encoder work) and what each rank pays or has to spare anyway
    (see `bounds`) are at most the ranks times its makespan.
    """
    if case.lockstep:
        return _in_waves(board, floor, to_come, case, limits, costs)
    return _in_step(board, floor, to_come, case, limits, costs)
