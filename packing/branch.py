"""The choices of the exact search: which there are at each depth, and how they are taken back.

Depths are n for shared samples, n for whole ones, then one a unit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .board import (
    BUSY,
    ENCODED,
    ENCODING,
    FIRST,
    GROUP,
    GROUP_END,
    HELD,
    HIGH,
    LAYER,
    LOAD,
    LOW,
    OPEN,
    ORDER,
    OWNER,
    SIZE,
    TOKENS,
    TURN,
    WHOLE,
    Board,
    Case,
    close_layer,
    open_layer,
    put,
    put_unit,
)
from .moldable import NEVER, Limits
from .ticks import IntArray

COUNT, CURSOR, TAKEN, OPENED, LOWEST, HIGHEST = range(6)
"""Of `Trail.depths`: choices; the next one; the one in force, or -1; whether it opened a layer; the
footprint of a unit's sample before it."""
NEW = 1 << 40
"""Makes a layer of its own the last choice."""


class Trail(NamedTuple):
    """What was chosen at each depth, and what is left to choose."""

    depths: IntArray
    """(6, depths)"""
    choice: IntArray
    """(depths, choices) of a shared sample: 0 for none, or 1 + layer * windows + window; of a whole
    sample or unit: layer * ranks + rank. Layers from the number in use on are new ones."""
    weight: IntArray
    """(depths, choices) ascending: what is tried first."""


@kernel
def empty_trail(case: Case, limits: Limits) -> Trail:
    """Nothing is chosen."""
    n = case.samples.shape[1]
    depths = 2 * n + case.units.shape[1]
    most = (2 * n + 1) * max(limits.ranks, case.windows.shape[1]) + 1
    numbers = np.zeros((6, depths), np.int64)
    numbers[TAKEN] = -1
    return Trail(numbers, np.empty((depths, most), np.int64), np.empty((depths, most), np.int64))


@kernel
def backward(layer: int, board: Board, case: Case) -> bool:
    """Whether this choice opens the second layer before the first one: its reverse is tried."""
    return bool(not case.lockstep and board.layers[0] == 1 and layer == 1)


@kernel
def rank_choice(trail: Trail, depth: int, choice: int, weight: int) -> None:
    """Insert a choice by its weight; the first of equals stays first."""
    choices, weights = trail.choice[depth], trail.weight[depth]
    p = trail.depths[COUNT, depth]
    while p > 0 and weights[p - 1] > weight:
        weights[p], choices[p] = weights[p - 1], choices[p - 1]
        p -= 1
    weights[p], choices[p] = weight, choice
    trail.depths[COUNT, depth] += 1


@kernel
def _alike(cells: IntArray, v: int, used: int, r: int, q: int, case: Case, limits: Limits) -> bool:
    """Whether it does not matter which of two ranks a whole sample goes to in layer v."""
    media = case.units.shape[1] > 0
    touched, free = False, v == used
    for w in range(used):
        if case.lockstep and w != v:
            continue
        if (
            cells[LOAD, w, r] != cells[LOAD, w, q]
            or cells[HELD, w, r] != cells[HELD, w, q]
            or cells[BUSY, w, r] != cells[BUSY, w, q]
            or cells[GROUP, w, r] != cells[GROUP, w, q]
        ):
            return False
        touched = touched or cells[GROUP, w, r] >= 0
        free = free or cells[GROUP, w, r] < 0
    if not media:
        return True
    return not free if touched else limits.node == limits.ranks


@kernel
def _whole_choices(
    trail: Trail, depth: int, i: int, board: Board, case: Case, limits: Limits
) -> None:
    ranks, used, cells = limits.ranks, board.layers[0], board.cells
    tokens = case.samples[TOKENS, i]
    # A layer of its own is at `used`; in waves, where nodes are alike, it has one first choice.
    most = ranks
    if case.lockstep and (case.units.shape[1] == 0 or limits.node == ranks):
        most = 1
    layers = used if used == board.samples.shape[1] or tokens > limits.capacity else used + 1
    for v in range(layers):
        for r in range(ranks if v < used else most):
            if v < used and cells[HELD, v, r] + tokens > limits.capacity:
                continue
            fresh = True
            for q in range(r):
                fresh = fresh and not _alike(cells, v, used, r, q, case, limits)
            if not fresh:
                continue
            if v < used and case.lockstep:
                rank_choice(trail, depth, v * ranks + r, cells[LOAD, v, r])
                continue
            weight = cells[LOAD, :used, r].sum() + (NEW if v == used else 0)
            for at in range(v, v + 1 if v < used or case.lockstep else 2 * used + 1):
                if not backward(at, board, case):
                    rank_choice(trail, depth, at * ranks + r, weight)


@kernel
def _unit_choices(
    trail: Trail, depth: int, u: int, board: Board, case: Case, limits: Limits
) -> None:
    v, size = board.samples[LAYER, case.units[OWNER, u]], case.units[SIZE, u]
    load, encoding = board.cells[LOAD, v], board.cells[ENCODING, v]
    encoded, busy, group = board.cells[ENCODED, v], board.cells[BUSY, v], board.cells[GROUP, v]
    for r in range(limits.ranks):
        if encoded[r] + size > limits.encoder_capacity:
            continue
        weight = encoding[r] + (0 if case.lockstep else load[r])
        fresh = True
        for q in range(r):
            fresh = fresh and not (
                group[r] >= 0
                and group[r] == group[q]
                and weight == encoding[q] + (0 if case.lockstep else load[q])
                and encoded[r] == encoded[q]
                and (busy[r] > 0) == (busy[q] > 0)
            )
        if fresh:
            rank_choice(trail, depth, v * limits.ranks + r, weight)


@kernel
def list_choices(trail: Trail, depth: int, board: Board, case: Case, limits: Limits) -> None:
    """List the choices for a whole sample or a unit."""
    n = board.samples.shape[1]
    if depth >= 2 * n:
        _unit_choices(trail, depth, case.units[TURN, depth - 2 * n], board, case, limits)
        return
    i = case.samples[ORDER, depth - n]
    if board.samples[LAYER, i] == WHOLE:
        _whole_choices(trail, depth, i, board, case, limits)
    else:
        rank_choice(trail, depth, 0, 0)


@kernel
def _layer(trail: Trail, depth: int, layer: int, board: Board, case: Case) -> int:
    """The layer of a choice; opened where it is a new one."""
    used = board.layers[0]
    if layer < used:
        return layer
    trail.depths[OPENED, depth] = 1
    return open_layer(board, used if case.lockstep else layer - used)


@kernel
def take(trail: Trail, depth: int, choice: int, board: Board, case: Case, limits: Limits) -> bool:
    """Put a choice in force; False where a rank does not hold it."""
    n, numbers = board.samples.shape[1], trail.depths[:, depth]
    numbers[TAKEN], numbers[OPENED] = choice, 0
    if depth < n:
        i = case.samples[ORDER, depth]
        if choice == 0:
            board.samples[LAYER, i] = WHOLE
            return bool(case.samples[TOKENS, i] <= limits.capacity)
        windows = case.windows.shape[1]
        v = _layer(trail, depth, (choice - 1) // windows, board, case)
        w = (choice - 1) % windows
        return put(board, i, v, case.windows[0, w], case.windows[1, w], 1, case, limits)
    if depth < 2 * n:
        i = case.samples[ORDER, depth - n]
        numbers[LOWEST] = 0
        if board.samples[LAYER, i] != WHOLE:
            return True
        v = _layer(trail, depth, choice // limits.ranks, board, case)
        numbers[LOWEST] = WHOLE
        return put(board, i, v, choice % limits.ranks, 0, 1, case, limits)
    u, r = case.units[TURN, depth - 2 * n], choice % limits.ranks
    sample = board.samples[:, case.units[OWNER, u]]
    numbers[LOWEST], numbers[HIGHEST] = sample[LOW], sample[HIGH]
    put_unit(board, u, r, min(sample[LOW], r), max(sample[HIGH], r), 1, case)
    return True


@kernel
def take_back(trail: Trail, depth: int, board: Board, case: Case, limits: Limits) -> None:
    """Undo the choice in force."""
    n, numbers = board.samples.shape[1], trail.depths[:, depth]
    choice = numbers[TAKEN]
    numbers[TAKEN] = -1
    if depth >= 2 * n:
        u = case.units[TURN, depth - 2 * n]
        r = choice % limits.ranks
        put_unit(board, u, r, numbers[LOWEST], numbers[HIGHEST], -1, case)
        return
    i = case.samples[ORDER, depth % n]
    v, first = board.samples[LAYER, i], board.samples[FIRST, i]
    if depth < n:
        if choice > 0:
            place = case.windows[1, (choice - 1) % case.windows.shape[1]]
            put(board, i, v, first, place, -1, case, limits)
        board.samples[LAYER, i] = OPEN
    elif numbers[LOWEST] == WHOLE:
        put(board, i, v, first, 0, -1, case, limits)
        board.samples[LAYER, i] = WHOLE
    if numbers[OPENED]:
        close_layer(board)


@kernel
def mirrored(depth: int, choice: int, board: Board, case: Case, limits: Limits) -> bool:
    """Whether the mirror image of this choice for a shared sample, or its reverse, is tried."""
    if choice == 0:
        return False
    if backward((choice - 1) // case.windows.shape[1], board, case):
        return True
    for q in range(depth):
        if board.samples[LAYER, case.samples[ORDER, q]] != WHOLE:
            return False
    w = (choice - 1) % case.windows.shape[1]
    first, degree = case.windows[0, w], limits.degrees[case.windows[1, w]]
    return bool(2 * first + degree > limits.ranks)


@kernel
def packed(board: Board, case: Case, limits: Limits) -> bool:
    """Whether shared samples stand as `exact` says that they may be expected to."""
    node, used, cells = limits.node, board.layers[0], board.cells
    free = case.units.shape[1] == 0 or (case.lockstep and node == limits.ranks)
    if not free or (not case.lockstep and used > 1):
        return True
    number = np.empty(limits.ranks, np.int64)
    for v in range(used):
        for q in range(case.samples.shape[1] - 1, -1, -1):
            i = case.samples[ORDER, q]
            if board.samples[LAYER, i] == v:
                number[cells[GROUP, v, board.samples[FIRST, i]]] = q
        for begin in range(0, limits.ranks, node):
            last, r = -1, begin
            while r < begin + node:
                first = cells[GROUP, v, r]
                if first < 0:
                    last = NEVER
                    r += 1
                    continue
                end = cells[GROUP_END, v, first]
                if first < begin or end >= begin + node:
                    break
                if number[first] < last:
                    return False
                last = number[first]
                r = end + 1
    return True
