"""Improve a finished strip: move and swap samples between machines, always at the latest one.

The end of a machine is a sum (what lies under it is fixed), so a change is priced in constant
time. Remainders of whole units only grow here; who prices the plan afterwards sees their truth.
The number of rounds is bounded by a count, never by a clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .moldable import (
    Jobs,
    Limits,
    dealt_tokens,
    job_ticks,
    overhead,
    remainder,
    share_tokens,
)
from .strip import Strip
from .ticks import Coefficients, IntArray

NEAR = 24
"""Partners looked at in one round: the 16 machines that end first, and others in turn."""
EARLY = 16
LOOK, LOOK_BACK = 48, 32
"""Samples of the latest machine, and of a partner, looked at in one round: of its last
microbatches first, which hold the shortest."""
SMALL = 4096
"""A change that saves less than one part in this of the latest end counts as a miss."""


class Lists(NamedTuple):
    """Samples of microbatches and microbatches of machines, as linked lists."""

    head: IntArray
    """(m,) first sample of each microbatch, or -1."""
    following: IntArray
    """(n,) the next sample in the same microbatch, or -1."""
    size: IntArray
    """(m,) samples of each microbatch."""
    machine_head: IntArray
    """(machines,) first microbatch, or -1."""
    machine_following: IntArray
    """(m,) the next microbatch of the same machine, or -1."""


class Change(NamedTuple):
    """A move of sample `a` to microbatch `to`, back against sample `back` (-1: nothing)."""

    gain: int
    a: int
    machine: int
    to: int
    back: int
    end_from: int
    end_to: int


@kernel
def _lists(strip: Strip) -> Lists:
    n = strip.microbatch.shape[0]
    m = strip.counts[0]
    lists = Lists(
        np.full(m, -1, np.int64),
        np.full(n, -1, np.int64),
        np.zeros(m, np.int64),
        np.full(strip.counts[1], -1, np.int64),
        np.full(m, -1, np.int64),
    )
    for i in range(n - 1, -1, -1):
        b = strip.microbatch[i]
        if b >= 0:
            lists.following[i] = lists.head[b]
            lists.head[b] = i
            lists.size[b] += 1
    for b in range(m):
        machine = strip.machine[b]
        if machine >= 0:
            lists.machine_following[b] = lists.machine_head[machine]
            lists.machine_head[machine] = b
    return lists


@kernel
def _latest(ends: IntArray, count: int) -> int:
    latest = 0
    for m in range(1, count):
        if ends[m] > ends[latest]:
            latest = m
    return latest


@kernel
def _partners(ends: IntArray, count: int, turn: int, out: IntArray) -> int:
    """Fill `out` with the machines to look at; returns where the next turn begins."""
    if count <= NEAR:
        for q in range(count):
            out[q] = q
        return turn
    kept = 0
    for m in range(count):
        if kept < EARLY or ends[m] < ends[out[kept - 1]]:
            p = kept if kept < EARLY else EARLY - 1
            while p > 0 and ends[out[p - 1]] > ends[m]:
                out[p] = out[p - 1]
                p -= 1
            out[p] = m
            kept = min(EARLY, kept + 1)
    for q in range(EARLY, NEAR):
        turn = (turn + 1) % count
        out[q] = turn
    return turn


@kernel
def _holds(tokens: int, total: int, largest: int, units: int, width: int, limits: Limits) -> bool:
    """Whether a microbatch with these sums keeps within both capacities."""
    if tokens > limits.capacity:
        return False
    return total == 0 or bool(dealt_tokens(total, largest, units, width) <= limits.encoder_capacity)


@kernel
def _room(strip: Strip, b: int, joins: int, leaves: int, jobs: Jobs, limits: Limits) -> bool:
    """Whether microbatch b holds sample `joins` once sample `leaves` (or -1) has gone."""
    width = strip.width[b]
    tokens = strip.tokens[b] + share_tokens(jobs, joins, width)
    total = strip.encoder_tokens[b] + jobs.encoder_tokens[joins]
    units = strip.units[b] + jobs.units[joins]
    if leaves >= 0:
        tokens -= share_tokens(jobs, leaves, width)
        total -= jobs.encoder_tokens[leaves]
        units -= jobs.units[leaves]
    largest = max(strip.unit_size[b], jobs.unit_size[joins])
    return _holds(tokens, total, largest, units, width, limits)


@kernel
def _more(dear: int, dearest: int, width: int) -> int:
    """What a sample whose dearest unit takes `dear` adds to the remainder of a microbatch."""
    return remainder(dear - dearest, width) if dear > dearest else 0


@kernel
def _best_move(
    best: Change, strip: Strip, lists: Lists, a: int, m: int, left: int, added: int, late: int,
    jobs: Jobs, limits: Limits,
) -> Change:  # fmt: skip
    """Move sample a to the first microbatch of machine m that has room."""
    c = lists.machine_head[m]
    while c >= 0:
        if _room(strip, c, a, -1, jobs, limits):
            more = _more(jobs.unit_ticks[a], strip.unit_ticks[c], strip.width[c])
            end = strip.machine_end[m] + added + more
            gain = late - max(end, left)
            if gain > best.gain:
                return Change(gain, a, m, c, -1, left, end)
            return best
        c = lists.machine_following[c]
    return best


@kernel
def _best_swap(
    best: Change, strip: Strip, lists: Lists, a: int, source: int, m: int, ticks: int, added: int,
    late: int, times: IntArray, jobs: Jobs, limits: Limits, costs: Coefficients,
) -> Change:  # fmt: skip
    """Swap sample a with a smaller one of machine m; `times` are those of width 1."""
    head, following = lists.head, lists.following
    from_width, to_width = strip.width[source], strip.machine_width[m]
    begin, gain, seen = strip.machine_end[m] + added, best.gain, 0
    c = lists.machine_head[m]
    while c >= 0 and seen < LOOK_BACK:
        more = _more(jobs.unit_ticks[a], strip.unit_ticks[c], to_width)
        limit = begin + more - late
        e = head[c]
        while e >= 0 and seen < LOOK_BACK:
            seen += 1
            # No sample takes longer on a wider machine: few need a price.
            if times[e] < times[a] and times[e] > limit + gain:
                back_to = times[e] if to_width == 1 else job_ticks(jobs, e, to_width, costs)
                end = begin + more - back_to
                if late - end > gain:
                    back = times[e] if from_width == 1 else job_ticks(jobs, e, from_width, costs)
                    dearest = strip.unit_ticks[source]
                    left = late - ticks + back + _more(jobs.unit_ticks[e], dearest, from_width)
                    saved = late - max(left, end)
                    if (
                        saved > gain
                        and _room(strip, c, a, e, jobs, limits)
                        and _room(strip, source, e, a, jobs, limits)
                    ):
                        best = Change(saved, a, m, c, e, left, end)
                        gain = saved
            e = following[e]
        c = lists.machine_following[c]
    return best


@kernel
def _find(
    strip: Strip, lists: Lists, late: int, partners: IntArray, times: IntArray, known: IntArray,
    jobs: Jobs, limits: Limits, costs: Coefficients,
) -> Change:  # fmt: skip
    """The change that lowers the larger end of machine `late` and its partner most."""
    best = Change(0, -1, -1, -1, -1, 0, 0)
    ends, widths = strip.machine_end, strip.machine_width
    end, width = ends[late], widths[late]
    seen = 0
    b = lists.machine_head[late]
    while b >= 0 and seen < LOOK:
        a = lists.head[b]
        while a >= 0 and seen < LOOK:
            seen += 1
            ticks = job_ticks(jobs, a, width, costs)
            left = end - ticks - (overhead(width, costs) if lists.size[b] == 1 else 0)
            known[:] = -1
            for m in partners:
                if m == late or ends[m] >= end - best.gain:
                    continue
                slot = min(widths[m], known.shape[0] - 1)
                if known[slot] < 0 or slot < widths[m]:
                    known[slot] = job_ticks(jobs, a, widths[m], costs)
                added = known[slot]
                if max(ends[m] + added, left) < end - best.gain:
                    best = _best_move(best, strip, lists, a, m, left, added, end, jobs, limits)
                best = _best_swap(
                    best, strip, lists, a, b, m, ticks, added, end, times, jobs, limits, costs
                )
            a = lists.following[a]
        b = lists.machine_following[b]
    return best


@kernel
def _relocate(strip: Strip, lists: Lists, i: int, to: int, jobs: Jobs) -> None:
    source = strip.microbatch[i]
    if lists.head[source] == i:
        lists.head[source] = lists.following[i]
    else:
        p = lists.head[source]
        while lists.following[p] != i:
            p = lists.following[p]
        lists.following[p] = lists.following[i]
    lists.following[i] = lists.head[to]
    lists.head[to] = i
    lists.size[source] -= 1
    lists.size[to] += 1
    strip.tokens[source] -= share_tokens(jobs, i, strip.width[source])
    strip.tokens[to] += share_tokens(jobs, i, strip.width[to])
    strip.encoder_tokens[source] -= jobs.encoder_tokens[i]
    strip.encoder_tokens[to] += jobs.encoder_tokens[i]
    strip.units[source] -= jobs.units[i]
    strip.units[to] += jobs.units[i]
    strip.unit_size[to] = max(strip.unit_size[to], jobs.unit_size[i])
    strip.unit_ticks[to] = max(strip.unit_ticks[to], jobs.unit_ticks[i])
    strip.microbatch[i] = to


@kernel
def improve(
    strip: Strip, rounds: int, target: int, jobs: Jobs, limits: Limits, costs: Coefficients
) -> int:
    """Lower the machine that ends last, by a move or a swap, while that lowers it.

    Args:
        strip: A finished strip; changed in place.
        rounds: At most this many changes.
        target: Stop once every machine ends by this.
        jobs: All samples.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Rounds used.
    """
    machines = strip.counts[1]
    if machines == 0:
        return 0
    lists = _lists(strip)
    times = np.empty(jobs.tokens.shape[0], np.int64)
    for i in range(times.shape[0]):
        times[i] = job_ticks(jobs, i, 1, costs)
    known = np.empty(limits.node + 2, np.int64)
    partners = np.empty(min(machines, NEAR), np.int64)
    turn, misses = 0, 0
    for done in range(rounds):
        late = _latest(strip.machine_end, machines)
        if strip.machine_end[late] <= target:
            return done
        turn = _partners(strip.machine_end, machines, turn, partners)
        change = _find(strip, lists, late, partners, times, known, jobs, limits, costs)
        if change.a < 0:
            misses += 1
            if misses > 6 or machines <= NEAR:
                return done
            continue
        misses = misses + 1 if change.gain * SMALL < strip.machine_end[late] else 0
        if misses > 6:
            return done
        source = strip.microbatch[change.a]
        _relocate(strip, lists, change.a, change.to, jobs)
        if change.back >= 0:
            _relocate(strip, lists, change.back, source, jobs)
        strip.machine_end[late] = change.end_from
        strip.machine_end[change.machine] = change.end_to
    return rounds
