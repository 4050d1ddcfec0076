"""DHP (arXiv 2602.21788, later "FCP"), written anew from the paper's equations.

Per microbatch: samples are packed into groups by best fit, the longest first; a sample that needs
several ranks opens a group of that many, and shorter ones fill its slack. Then the groups' degrees
are chosen so that the slowest group is as fast as can be, of any degree, all together at most as
many ranks as there are. All groups of a microbatch run side by side.

The paper solves the second stage by a dynamic program; here the same optimum is found by bisecting
the time of the slowest group, since the least degree that meets a given time can be read off for
each group alone. What the paper leaves open is decided in its favour:

- Its time estimate is our reference costs, the encoder's work divided by the degree included: a
  perfect profile of all that its own has terms for, and of what it has none for. The traffic of
  sharded parameters is known to it where there is any.
- Memory is checked per rank, encoder tokens too (the printed test counts a group's model state
  once for all of its ranks).
- How a global batch becomes microbatches is not said. Groups of like time stand together, longest
  first, in as many microbatches as their least degrees need, or in up to `MORE` more: whichever
  its own estimate finds shortest.
- Groups lie on consecutive ranks, in an order in which none that fits a node reaches into the next
  as long as there are other groups or idle ranks to fill up with; one that does pays the bandwidth
  between nodes (`judge`). Above a node any degree is allowed, where our own has half nodes alone.
- Ranks that the optimum leaves over stay idle. Under sync "step" nothing waits between its
  microbatches, though they were planned in lockstep.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynapar.packing._jit import kernel
from dynapar.packing.ticks import (
    Coefficients,
    FloatArray,
    IntArray,
    latency_ticks,
    reach_ticks,
    unit_columns,
)
from dynapar.simulate.peers.request import PeerError, Piece, Plan, Planner, Request

NEVER = 1 << 60
"""Later than any time, more than any room."""
MORE = 3
"""Microbatches tried beyond the fewest."""


class _Groups(NamedTuple):
    """Packed samples: what the second stage chooses degrees for."""

    rows: list[list[int]]
    least: IntArray
    """(groups,) the least ranks that hold them."""


def load() -> Planner:
    """Nothing has to be installed."""
    return plan


def plan(request: Request) -> Plan:
    """Plan one step.

    Raises:
        PeerError: A sample fits on no number of ranks.
    """
    encoder = encoder_ticks(request)
    groups = _pack(request)
    times = _times(groups, encoder, request)
    alone = times[np.arange(len(times)), groups.least - 1]
    order = np.argsort(-alone, kind="stable")
    best: tuple[int, Plan] | None = None
    floor = request.constants.llm_floor if request.lockstep else 0
    fewest = -(-int(groups.least.sum()) // request.ranks)
    for count in range(fewest, fewest + MORE + 1):
        total, made = 0, []
        for wave, members in enumerate(_cut(groups.least[order], count, request.ranks)):
            chosen = order[members]
            degrees, slowest = fewest_ranks(times[chosen], groups.least[chosen], request.ranks)
            total += max(slowest, floor)
            for place, first in zip(*stand(degrees, request.ranks, request.node), strict=True):
                ranks = tuple(range(first, first + int(degrees[place])))
                made.append(Piece(wave, ranks, tuple(groups.rows[chosen[place]])))
        if best is None or total < best[0]:
            best = total, made
    return best[1] if best else []


def encoder_ticks(request: Request) -> IntArray:
    """(n,) ticks of encoding all of a sample's units, on one rank."""
    units = unit_columns(np.array(request.unit_tokens, np.int64), request.constants)
    return unit_sums(request, units)


def unit_sums(request: Request, units: IntArray) -> IntArray:
    """(n,) sums over each sample's encoder units, of (units,) numbers."""
    ends: IntArray = np.concatenate((np.zeros(1, np.int64), np.cumsum(units)))
    return ends[request.unit_offsets[1:]] - ends[request.unit_offsets[:-1]]


def _pack(request: Request) -> _Groups:
    """Best fit, the longest first: into the group that is left with the least room."""
    tokens, offsets = request.tokens, request.unit_offsets
    encoded = unit_sums(request, request.unit_tokens)
    units = np.diff(offsets)
    rows: list[list[int]] = []
    size = len(tokens)
    least, held = np.ones(size, np.int64), np.zeros(size, np.int64)
    total, largest, amount = (np.zeros(size, np.int64) for _ in range(3))
    for i in np.argsort(-tokens, kind="stable").tolist():
        own = request.unit_tokens[offsets[i] : offsets[i + 1]].max(initial=0)
        count = len(rows)
        degree = least[:count]
        share = held[:count] + _shares(tokens[i], degree)
        dealt = _dealt(
            total[:count] + encoded[i],
            np.maximum(largest[:count], own),
            amount[:count] + units[i],
            degree,
        )
        full = (share > request.capacity) | (dealt > request.encoder_capacity)
        room = np.where(full, NEVER, (request.capacity - share) * degree)
        place = int(room.argmin()) if count else -1
        if place < 0 or full[place]:
            place = count
            rows.append([])
            least[place] = _least(int(tokens[i]), int(encoded[i]), int(own), int(units[i]), request)
        rows[place].append(i)
        held[place] += _shares(tokens[i], least[place : place + 1])[0]
        total[place] += encoded[i]
        largest[place] = max(largest[place], own)
        amount[place] += units[i]
    return _Groups(rows, least[: len(rows)].copy())


def _shares(tokens: int, degree: IntArray) -> IntArray:
    """As `moldable.shared`, for many degrees."""
    return np.where(tokens % degree == 0, tokens // degree, 2 * -(-tokens // (2 * degree)))


def _dealt(total: IntArray, largest: IntArray, units: IntArray, degree: IntArray) -> IntArray:
    """As `moldable.dealt_tokens`, for many groups."""
    by_tokens = -(-(total + largest * (degree - 1)) // degree)
    by_count = -(-units // degree) * largest
    return np.asarray(np.minimum(by_tokens, by_count))


def _least(tokens: int, encoded: int, largest: int, units: int, request: Request) -> int:
    degrees = np.arange(1, request.ranks + 1)
    dealt = _dealt(np.array(encoded), np.array(largest), np.array(units), degrees)
    fits = (_shares(tokens, degrees) <= request.capacity) & (dealt <= request.encoder_capacity)
    if not fits.any():
        raise PeerError(f"a sample of {tokens:,} tokens fits on no number of ranks")
    return int(degrees[fits.argmax()])


def _times(groups: _Groups, encoder: IntArray, request: Request) -> IntArray:
    """(groups, ranks) ticks of each group at degrees 1, 2, ..."""
    offsets = np.cumsum([0, *map(len, groups.rows)], dtype=np.int64)
    order = np.array([row for rows in groups.rows for row in rows], np.int64)
    return _time_table(
        offsets,
        order,
        np.array(request.tokens, np.int64),
        np.array(request.reach, np.float64),
        encoder,
        request.ranks,
        request.constants,
    )


@kernel
def _time_table(
    offsets: IntArray,
    order: IntArray,
    tokens: IntArray,
    reach: FloatArray,
    encoder: IntArray,
    ranks: int,
    costs: Coefficients,
) -> IntArray:
    out = np.zeros((offsets.shape[0] - 1, ranks), np.int64)
    for degree in range(1, ranks + 1):
        once = costs.fixed + costs.linear_rank + latency_ticks(degree, costs)
        for g in range(out.shape[0]):
            out[g, degree - 1] = once
            for q in range(offsets[g], offsets[g + 1]):
                i = order[q]
                linear, attention, exchange = reach_ticks(tokens[i], reach[i], degree, costs)
                shared = (encoder[i] + degree - 1) // degree
                out[g, degree - 1] += linear + attention + exchange + shared
    return out


def _cut(least: IntArray, count: int, ranks: int) -> list[slice]:
    """Groups, longest first, into about `count` microbatches that hold them at their least."""
    even = -(-int(least.sum()) // count)
    parts, start, used = [], 0, 0
    for place, degree in enumerate(least.tolist()):
        if place > start and (used + degree > ranks or used >= even):
            parts.append(slice(start, place))
            start, used = place, 0
        used += degree
    parts.append(slice(start, len(least)))
    return parts


def fewest_ranks(times: IntArray, least: IntArray, ranks: int) -> tuple[IntArray, int]:
    """Degrees at which the slowest group is as fast as can be.

    Args:
        times: (groups, ranks) ticks at degrees 1, 2, ..., in any order of size.
        least: (groups,) least degrees, together at most `ranks`.
        ranks: Of the cluster.

    Returns:
        (groups,) degrees, each the least that meets the optimum, and the optimum.
    """
    allowed = np.arange(1, ranks + 1) >= least[:, None]
    masked = np.where(allowed, times, NEVER)
    low = int(masked.min(axis=1).max())
    high = int(times[np.arange(len(times)), least - 1].max())
    while low < high:
        middle = (low + high) // 2
        met = masked <= middle
        if met.any(axis=1).all() and int(met.argmax(axis=1).sum()) + len(times) <= ranks:
            high = middle
        else:
            low = middle + 1
    degrees = (masked <= high).argmax(axis=1) + 1
    return degrees, int(times[np.arange(len(times)), degrees - 1].max())


def stand(degrees: IntArray, ranks: int, node: int) -> tuple[list[int], list[int]]:
    """Put groups on consecutive ranks, the largest first, within nodes where there is a way.

    Returns:
        The groups in the order in which they stand, and the first rank of each.
    """
    left = sorted(range(len(degrees)), key=lambda g: (-int(degrees[g]), g))
    idle = ranks - int(degrees.sum())
    order, firsts, at = [], [], 0
    while left:
        room = node - at % node
        place = next((k for k, g in enumerate(left) if degrees[g] <= room), None)
        if at % node == 0 or (place is None and idle < room):
            place = 0
        if place is None:
            at, idle = at + room, idle - room
            continue
        group = left.pop(place)
        order.append(group)
        firsts.append(at)
        at += int(degrees[group])
    return order, firsts
