"""Improve a finished strip: move and swap samples between machines, always at the latest one.

The end of a machine is a sum (what lies under it is fixed), so a change is priced in constant
time. Of a pair of machines that end D apart, the best swap brings both near their mean: with both
lists sorted by work, the partners of all samples are found in one pass over the two.
Remainders of whole units only grow here; who prices the plan afterwards sees their truth.
The number of rounds is bounded by a count, never by a clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .moldable import Jobs, Limits, dealt_tokens, overhead, remainder, width_columns
from .strip import Strip
from .ticks import Coefficients, IntArray

EARLY = 8
"""Partners looked at in one round: the machines that end first, ..."""
NEAR = 12
"""... and others in turn, so many in all."""
AROUND, AROUND_BOTH = 2, 12
"""Samples of a partner tried beside the best match, on either side: where one load counts, and
where two do."""
SMALL = 4096
"""A change that saves less than one part in this of the latest end counts as a miss."""
MISSES = 6
"""So many misses in a row end the search."""


class Lists(NamedTuple):
    """Samples and microbatches of machines, as linked lists; -1 ends each."""

    head: IntArray
    """(machines,) the sample of most work on each machine."""
    following: IntArray
    """(n,) the next one of the same machine, with less work."""
    before: IntArray
    """(n,) the one before."""
    rank: IntArray
    """(n,) place of each sample in the order of work."""
    size: IntArray
    """(m,) samples of each microbatch."""
    opened: IntArray
    """(machines,) the last microbatch of each machine."""
    older: IntArray
    """(m,) the microbatch before it on the same machine."""


class Change(NamedTuple):
    """A move of sample `a` to microbatch `to` of a machine, against sample `back` (-1: nothing)."""

    gain: int
    a: int
    machine: int
    to: int
    back: int
    end_from: int
    end_to: int


@kernel
def _lists(strip: Strip, order: IntArray) -> Lists:
    n = strip.microbatch.shape[0]
    m = strip.counts[0]
    lists = Lists(
        np.full(strip.counts[1], -1, np.int64),
        np.full(n, -1, np.int64),
        np.full(n, -1, np.int64),
        np.zeros(n, np.int64),
        np.zeros(m, np.int64),
        np.full(strip.counts[1], -1, np.int64),
        np.full(m, -1, np.int64),
    )
    for b in range(m):
        machine = strip.machine[b]
        if machine >= 0:
            lists.older[b] = lists.opened[machine]
            lists.opened[machine] = b
    for place in range(order.shape[0] - 1, -1, -1):
        i = order[place]
        lists.rank[i] = place
        b = strip.microbatch[i]
        if b < 0:
            continue
        lists.size[b] += 1
        machine = strip.machine[b]
        if machine >= 0:
            first = lists.head[machine]
            lists.following[i] = first
            if first >= 0:
                lists.before[first] = i
            lists.head[machine] = i
    return lists


@kernel
def _latest(ends: IntArray, shadows: IntArray, count: int) -> int:
    latest, end = 0, -1
    for m in range(count):
        value = max(ends[m], shadows[m])
        if value > end:
            latest, end = m, value
    return latest


@kernel
def _partners(ends: IntArray, shadows: IntArray, count: int, turn: int, out: IntArray) -> int:
    """Fill `out` with the machines to look at, the earliest first; where the next turn begins."""
    early = min(EARLY, out.shape[0])
    kept, worst = 0, 0
    for m in range(count):
        value = max(ends[m], shadows[m])
        if kept < early or value < worst:
            p = kept if kept < early else early - 1
            while p > 0 and max(ends[out[p - 1]], shadows[out[p - 1]]) > value:
                out[p] = out[p - 1]
                p -= 1
            out[p] = m
            kept = min(early, kept + 1)
            worst = max(ends[out[kept - 1]], shadows[out[kept - 1]])
    for q in range(early, out.shape[0]):
        turn = (turn + 1) % count
        out[q] = turn
    return turn


@kernel
def _find(
    strip: Strip, lists: Lists, late: int, partners: IntArray, ticks: IntArray, share: IntArray,
    column: IntArray, jobs: Jobs, limits: Limits, costs: Coefficients,
) -> Change:  # fmt: skip
    """The change that lowers the larger end of machine `late` and a partner, the first good one."""
    # Local names and one body: calls that take structures would cost more than what they do.
    ends, shadows, shadow = strip.machine_end, strip.machine_shadow, jobs.shadow
    microbatch, widths, used = strip.microbatch, strip.machine_width, strip.tokens
    encoded, largest, counts = strip.encoder_tokens, strip.unit_size, strip.units
    dearest, size, dear = strip.unit_ticks, jobs.unit_size, jobs.unit_ticks
    encoder, units, following = jobs.encoder_tokens, jobs.units, lists.following
    capacity, encoder_capacity = limits.capacity, limits.encoder_capacity
    own, width = column[late], widths[late]
    end, both = ends[late], shadows[late] > 0
    value = max(end, shadows[late])
    around = AROUND_BOTH if both else AROUND
    best = Change(0, -1, -1, -1, -1, 0, 0)
    gain = 0
    for m in partners:
        distance = value - max(ends[m], shadows[m])
        if m == late or distance <= gain:
            continue
        other, to_width = column[m], widths[m]
        apart = end - ends[m]
        a, c = lists.head[late], lists.head[m]
        last = c
        while a >= 0:
            wanted = ticks[a, own] + ticks[a, other] - apart
            while c >= 0 and ticks[c, own] + ticks[c, other] > wanted:
                last, c = c, following[c]
            b = microbatch[a]
            # From a little below the match upwards; -1, which stands below all, is a move.
            e, tail = c, last
            for _ in range(around - 1):
                if e >= 0:
                    e, tail = following[e], e
            tried = 0
            while tried < 2 * around:
                tried += 1
                back = ticks[e, own] if e >= 0 else 0
                left = end - ticks[a, own] + back
                to_end = ends[m] + ticks[a, other] - (ticks[e, other] if e >= 0 else 0)
                if e < 0 and lists.size[b] == 1:
                    left -= overhead(width, costs)
                saved = value - max(left, to_end)
                if saved > gain and both:
                    less = shadow[e] if e >= 0 else 0
                    saved = min(saved, value - (shadows[late] - (shadow[a] - less) // width))
                    saved = min(saved, value - (shadows[m] + (shadow[a] - less) // to_width))
                if saved > gain:
                    to = microbatch[e] if e >= 0 else lists.opened[m]
                    while to >= 0:
                        tokens = used[to] + share[a, other] - (share[e, other] if e >= 0 else 0)
                        more = encoded[to] + encoder[a] - (encoder[e] if e >= 0 else 0)
                        count = counts[to] + units[a] - (units[e] if e >= 0 else 0)
                        if tokens <= capacity and (
                            more == 0
                            or dealt_tokens(more, max(largest[to], size[a]), count, to_width)
                            <= encoder_capacity
                        ):
                            break
                        to = lists.older[to] if e < 0 else -1
                    fits = to >= 0
                    if fits and e >= 0:
                        tokens = used[b] + share[e, own] - share[a, own]
                        more = encoded[b] + encoder[e] - encoder[a]
                        count = counts[b] + units[e] - units[a]
                        fits = tokens <= capacity and (
                            more == 0
                            or dealt_tokens(more, max(largest[b], size[e]), count, width)
                            <= encoder_capacity
                        )
                    if fits:
                        if dear[a] > dearest[to]:
                            to_end += remainder(dear[a] - dearest[to], to_width)
                        if e >= 0 and dear[e] > dearest[b]:
                            left += remainder(dear[e] - dearest[b], width)
                        saved = min(saved, value - max(left, to_end))
                        if saved > gain:
                            gain = saved
                            best = Change(saved, a, m, to, e, left, to_end)
                e = lists.before[e] if e >= 0 else tail
                if e < 0:
                    break
            a = following[a]
        if 8 * gain >= 3 * distance:
            break
    return best


@kernel
def _unlink(lists: Lists, i: int, machine: int) -> None:
    before, following = lists.before[i], lists.following[i]
    if before >= 0:
        lists.following[before] = following
    else:
        lists.head[machine] = following
    if following >= 0:
        lists.before[following] = before


@kernel
def _link(lists: Lists, i: int, machine: int) -> None:
    before, following = -1, lists.head[machine]
    while following >= 0 and lists.rank[following] < lists.rank[i]:
        before, following = following, lists.following[following]
    lists.before[i], lists.following[i] = before, following
    if before >= 0:
        lists.following[before] = i
    else:
        lists.head[machine] = i
    if following >= 0:
        lists.before[following] = i


@kernel
def _relocate(
    strip: Strip, lists: Lists, i: int, to: int, share: IntArray, column: IntArray, jobs: Jobs
) -> None:
    source = strip.microbatch[i]
    old, new = strip.machine[source], strip.machine[to]
    _unlink(lists, i, old)
    _link(lists, i, new)
    lists.size[source] -= 1
    lists.size[to] += 1
    strip.tokens[source] -= share[i, column[old]]
    strip.tokens[to] += share[i, column[new]]
    strip.encoder_tokens[source] -= jobs.encoder_tokens[i]
    strip.encoder_tokens[to] += jobs.encoder_tokens[i]
    strip.units[source] -= jobs.units[i]
    strip.units[to] += jobs.units[i]
    strip.unit_size[to] = max(strip.unit_size[to], jobs.unit_size[i])
    strip.unit_ticks[to] = max(strip.unit_ticks[to], jobs.unit_ticks[i])
    strip.machine_shadow[old] -= jobs.shadow[i] // strip.machine_width[old]
    strip.machine_shadow[new] += jobs.shadow[i] // strip.machine_width[new]
    strip.microbatch[i] = to


@kernel
def improve(
    strip: Strip, order: IntArray, rounds: int, target: int, jobs: Jobs, limits: Limits,
    costs: Coefficients,
) -> int:  # fmt: skip
    """Lower the machine that ends last, by a move or a swap, while that lowers it.

    Args:
        strip: A finished strip; changed in place.
        order: All samples, most work first.
        rounds: At most this many changes.
        target: Stop once every machine ends by this.
        jobs: All samples.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Rounds used.
    """
    machines = strip.counts[1]
    if machines < 2:
        return 0
    lists = _lists(strip, order)
    ticks, share, column = width_columns(strip.machine_width[:machines], jobs, costs)
    ends, shadows = strip.machine_end, strip.machine_shadow
    partners = np.empty(min(machines, NEAR), np.int64)
    turn, misses = 0, 0
    for done in range(rounds):
        late = _latest(ends, shadows, machines)
        value = max(ends[late], shadows[late])
        if value <= target:
            return done
        turn = _partners(ends, shadows, machines, turn, partners)
        change = _find(strip, lists, late, partners, ticks, share, column, jobs, limits, costs)
        misses = 0 if change.gain * SMALL >= value else misses + 1
        if misses > MISSES or (change.a < 0 and machines <= NEAR):
            return done
        if change.a < 0:
            continue
        source = strip.microbatch[change.a]
        _relocate(strip, lists, change.a, change.to, share, column, jobs)
        if change.back >= 0:
            _relocate(strip, lists, change.back, source, share, column, jobs)
        ends[late] = change.end_from
        ends[change.machine] = change.end_to
    return rounds
