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
    for b in range(m - 1, -1, -1):
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
def _room(strip: Strip, b: int, joins: int, leaves: int, jobs: Jobs, limits: Limits) -> bool:
    """Whether microbatch b holds sample `joins` once sample `leaves` (or -1) has gone."""
    width = strip.width[b]
    tokens = strip.tokens[b] + share_tokens(jobs.tokens[joins], width)
    total = strip.encoder_tokens[b] + jobs.encoder_tokens[joins]
    units = strip.units[b] + jobs.units[joins]
    if leaves >= 0:
        tokens -= share_tokens(jobs.tokens[leaves], width)
        total -= jobs.encoder_tokens[leaves]
        units -= jobs.units[leaves]
    largest = max(strip.unit_size[b], jobs.unit_size[joins])
    dealt = dealt_tokens(total, largest, units, width)
    return bool(tokens <= limits.capacity and dealt <= limits.encoder_capacity)


@kernel
def _more_remainder(strip: Strip, b: int, joins: int, jobs: Jobs) -> int:
    extra = jobs.unit_ticks[joins] - strip.unit_ticks[b]
    return remainder(extra, strip.width[b]) if extra > 0 else 0


@kernel
def _best_move(
    best: Change, strip: Strip, lists: Lists, a: int, m: int, left: int, added: int, late: int,
    jobs: Jobs, limits: Limits,
) -> Change:  # fmt: skip
    """Move sample a to the first microbatch of machine m that has room."""
    c = lists.machine_head[m]
    while c >= 0:
        if _room(strip, c, a, -1, jobs, limits):
            end = strip.machine_end[m] + added + _more_remainder(strip, c, a, jobs)
            gain = late - max(end, left)
            if gain > best.gain:
                return Change(gain, a, m, c, -1, left, end)
            return best
        c = lists.machine_following[c]
    return best


@kernel
def _best_swap(
    best: Change, strip: Strip, lists: Lists, a: int, source: int, m: int, ticks: int, added: int,
    late: int, size: IntArray, jobs: Jobs, limits: Limits, costs: Coefficients,
) -> Change:  # fmt: skip
    """Swap sample a with a smaller one of machine m."""
    from_width, to_width = strip.width[source], strip.machine_width[m]
    c = lists.machine_head[m]
    while c >= 0:
        more = _more_remainder(strip, c, a, jobs)
        e = lists.head[c]
        while e >= 0:
            if size[e] < size[a]:
                end = strip.machine_end[m] + added + more - job_ticks(jobs, e, to_width, costs)
                if end < late - best.gain:
                    back = job_ticks(jobs, e, from_width, costs)
                    left = late - ticks + back + _more_remainder(strip, source, e, jobs)
                    gain = late - max(left, end)
                    if (
                        gain > best.gain
                        and _room(strip, c, a, e, jobs, limits)
                        and _room(strip, source, e, a, jobs, limits)
                    ):
                        best = Change(gain, a, m, c, e, left, end)
            e = lists.following[e]
        c = lists.machine_following[c]
    return best


@kernel
def _find(
    strip: Strip, lists: Lists, late: int, partners: IntArray, size: IntArray, jobs: Jobs,
    limits: Limits, costs: Coefficients,
) -> Change:  # fmt: skip
    """The change that lowers the larger end of machine `late` and its partner most."""
    best = Change(0, -1, -1, -1, -1, 0, 0)
    end = strip.machine_end[late]
    width = strip.machine_width[late]
    known = np.full(limits.node + 1, -1, np.int64)
    b = lists.machine_head[late]
    while b >= 0:
        a = lists.head[b]
        while a >= 0:
            ticks = job_ticks(jobs, a, width, costs)
            left = end - ticks - (overhead(width, costs) if lists.size[b] == 1 else 0)
            known[:] = -1
            for m in partners:
                if m == late or strip.machine_end[m] >= end - best.gain:
                    continue
                slot = strip.machine_width[m]
                added = known[slot] if slot <= limits.node else -1
                if added < 0:
                    added = job_ticks(jobs, a, slot, costs)
                    if slot <= limits.node:
                        known[slot] = added
                if max(strip.machine_end[m] + added, left) < end - best.gain:
                    best = _best_move(best, strip, lists, a, m, left, added, end, jobs, limits)
                best = _best_swap(
                    best, strip, lists, a, b, m, ticks, added, end, size, jobs, limits, costs
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
    strip.tokens[source] -= share_tokens(jobs.tokens[i], strip.width[source])
    strip.tokens[to] += share_tokens(jobs.tokens[i], strip.width[to])
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
    size = np.empty(jobs.tokens.shape[0], np.int64)
    for i in range(size.shape[0]):
        size[i] = job_ticks(jobs, i, 1, costs)
    partners = np.empty(min(machines, NEAR), np.int64)
    turn, misses = 0, 0
    for done in range(rounds):
        late = _latest(strip.machine_end, machines)
        if strip.machine_end[late] <= target:
            return done
        turn = _partners(strip.machine_end, machines, turn, partners)
        change = _find(strip, lists, late, partners, size, jobs, limits, costs)
        if change.a < 0:
            misses += 1
            if misses > 6 or machines <= NEAR:
                return done
            continue
        misses = 0
        source = strip.microbatch[change.a]
        _relocate(strip, lists, change.a, change.to, jobs)
        if change.back >= 0:
            _relocate(strip, lists, change.back, source, jobs)
        strip.machine_end[late] = change.end_from
        strip.machine_end[change.machine] = change.end_to
    return rounds
