"""Build a schedule of moldable samples on a strip of ranks, towards a target L.

1. Each sample takes the least degree at which it alone would end by L. Those above 1 become
   *rings*, widest first, on the window of ranks that idles least.
2. What is left of each node is cut into *machines* of a given width; a ring that ends last on its
   ranks is a machine too, so that short samples ride on it.
3. The other samples go, longest first, to the machine that ends earliest with them (or, with
   `best_fit`, latest but by L).

Ranks form a strip of nodes. Where ranks meet once a step it is the cluster, and microbatches
stack. Where they meet in waves (`single`) it is one cluster after another, one for each wave, with
one microbatch for each rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .moldable import (
    NEVER,
    Jobs,
    Limits,
    alone,
    dealt_tokens,
    job_ticks,
    least_degree,
    overhead,
    remainder,
    share_tokens,
)
from .ticks import BoolArray, Coefficients, IntArray


class Strip(NamedTuple):
    """A schedule under construction: rank columns, microbatches, machines."""

    load: IntArray
    """(strip,) when each rank is free."""
    top: IntArray
    """(strip,) the last microbatch of each rank, or -1."""
    microbatch: IntArray
    """(n,) of each sample, or -1."""
    first: IntArray
    """(m,) first rank of each microbatch, in the strip."""
    width: IntArray
    """(m,) its ranks."""
    start: IntArray
    """(m,) its start."""
    tokens: IntArray
    """(m,) at least the LLM tokens on its fullest rank."""
    encoder_tokens: IntArray
    """(m,) encoder tokens of all its units."""
    unit_size: IntArray
    """(m,) at least its largest unit."""
    unit_ticks: IntArray
    """(m,) at least its dearest unit."""
    units: IntArray
    """(m,) its encoder units."""
    shadow: IntArray
    """(m,) second load of all its samples."""
    machine: IntArray
    """(m,) the machine on whose end it counts, or -1."""
    machine_first: IntArray
    """(machines,) first rank."""
    machine_width: IntArray
    """(machines,) ranks."""
    machine_end: IntArray
    """(machines,) when it is free."""
    machine_shadow: IntArray
    """(machines,) second load of each of its ranks."""
    machine_top: IntArray
    """(machines,) its open microbatch, or -1."""
    counts: IntArray
    """(2,) microbatches and machines in use."""


@kernel
def empty_strip(samples: int, jobs: int, ranks: int) -> Strip:
    """A strip of `ranks` rank columns with room for `jobs` of the `samples` samples."""
    m = jobs + ranks + 1
    columns = np.zeros((10, m), np.int64)
    machines = np.zeros((5, ranks + 1), np.int64)
    columns[9] = -1
    machines[4] = -1
    return Strip(
        np.zeros(ranks, np.int64),
        np.full(ranks, -1, np.int64),
        np.full(samples, -1, np.int64),
        columns[0],
        columns[1],
        columns[2],
        columns[3],
        columns[4],
        columns[5],
        columns[6],
        columns[7],
        columns[8],
        columns[9],
        machines[0],
        machines[1],
        machines[2],
        machines[3],
        machines[4],
        np.zeros(2, np.int64),
    )


@kernel
def _add(strip: Strip, b: int, i: int, jobs: Jobs) -> None:
    strip.tokens[b] += share_tokens(jobs.tokens[i], strip.width[b])
    strip.encoder_tokens[b] += jobs.encoder_tokens[i]
    strip.unit_size[b] = max(strip.unit_size[b], jobs.unit_size[i])
    strip.unit_ticks[b] = max(strip.unit_ticks[b], jobs.unit_ticks[i])
    strip.units[b] += jobs.units[i]
    strip.shadow[b] += jobs.shadow[i]
    strip.microbatch[i] = b


@kernel
def _window_across(
    strip: Strip, degree: int, ticks: int, target: int, single: bool, limits: Limits
) -> tuple[int, int]:
    """First rank and start of the best run of half nodes for a ring across nodes; -1: none."""
    best, best_key, best_start = -1, NEVER, 0
    ranks = strip.load.shape[0]
    for first in range(0, ranks - degree + 1, limits.grain):
        if first // limits.ranks != (first + degree - 1) // limits.ranks:
            continue
        start, total = 0, 0
        for r in range(first, first + degree):
            start = max(start, strip.load[r])
            total += strip.load[r]
        if single and start > 0:
            continue
        key = start * degree - total
        if start + ticks > target:
            key = (NEVER >> 1) + start
        if key < best_key:
            best, best_key, best_start = first, key, start
    return best, best_start


@kernel
def _window_inside(
    strip: Strip, degree: int, ticks: int, target: int, single: bool, limits: Limits
) -> tuple[int, int]:
    """First rank and start of the best window of one node; fuller nodes first; -1: none."""
    best, best_key, best_start = -1, NEVER, 0
    for node in range(0, strip.load.shape[0], limits.node):
        total = strip.load[node : node + limits.node].sum()
        if single and total == 0 and best >= 0 and best_key < 0:
            continue
        for first in range(node, node + limits.node - degree + 1):
            start, used = 0, 0
            for r in range(first, first + degree):
                start = max(start, strip.load[r])
                used += strip.load[r]
            if single and start > 0:
                continue
            key = 4 * (start * degree - used) - total // limits.node
            if start + ticks > target:
                key = (NEVER >> 1) + start
            if key < best_key:
                best, best_key, best_start = first, key, start
    return best, best_start


@kernel
def open_rings(
    strip: Strip,
    rings: IntArray,
    degrees: IntArray,
    target: int,
    single: bool,
    jobs: Jobs,
    limits: Limits,
    costs: Coefficients,
) -> IntArray:
    """Place rings, widest first and of these the longest; return those that found no window."""
    count = rings.shape[0]
    key = np.empty(count, np.int64)
    for q in range(count):
        key[q] = -(degrees[q] * (1 << 40) + job_ticks(jobs, rings[q], degrees[q], costs))
    rest = np.empty(count, np.int64)
    left = 0
    for q in np.argsort(key, kind="mergesort"):
        i, degree = rings[q], degrees[q]
        ticks = alone(jobs, i, degree, costs)
        if degree > limits.node:
            first, start = _window_across(strip, degree, ticks, target, single, limits)
        else:
            first, start = _window_inside(strip, degree, ticks, target, single, limits)
        if first < 0:
            rest[left] = i
            left += 1
            continue
        b = strip.counts[0]
        strip.counts[0] += 1
        strip.first[b], strip.width[b], strip.start[b] = first, degree, start
        _add(strip, b, i, jobs)
        strip.load[first : first + degree] = start + ticks
        strip.top[first : first + degree] = b
    return rest[:left]


@kernel
def _add_machine(strip: Strip, first: int, width: int, end: int, top: int) -> None:
    m = strip.counts[1]
    strip.counts[1] += 1
    strip.machine_first[m], strip.machine_width[m] = first, width
    strip.machine_end[m], strip.machine_top[m] = end, top
    strip.machine_shadow[m] = strip.shadow[top] // width if top >= 0 else 0


@kernel
def _ring_machines(
    strip: Strip, target: int, single: bool, limits: Limits, costs: Coefficients
) -> BoolArray:
    """Rings that end last on all their ranks become machines; returns which ranks they take."""
    used = np.zeros(strip.load.shape[0], np.bool_)
    token = int(costs.linear_token * 1.08) + 1
    for b in range(strip.counts[0]):
        first, width = strip.first[b], strip.width[b]
        if (strip.top[first : first + width] != b).any():
            continue
        slack = target - strip.load[first]
        if not single and slack > 3 * costs.fixed:
            # Better cut up for short samples than kept as a wide machine that memory closes early.
            reach = (limits.capacity - strip.tokens[b]) * token
            if width > limits.node or (10 * reach < 7 * slack and slack > 5 * costs.fixed):
                continue
        strip.machine[b] = strip.counts[1]
        _add_machine(strip, first, width, strip.load[first], b)
        used[first : first + width] = True
    return used


@kernel
def open_machines(
    strip: Strip, target: int, width: int, single: bool, limits: Limits, costs: Coefficients
) -> None:
    """Cut the strip into machines: rings on top, and runs of equally loaded ranks up to `width`."""
    used = _ring_machines(strip, target, single, limits, costs)
    ranks = strip.load.shape[0]
    r = 0
    while r < ranks:
        taken = used[r] or (single and strip.top[r] >= 0)
        if taken:
            r += 1
            continue
        end = r + 1
        while (
            end < ranks
            and end - r < width
            and end // limits.node == r // limits.node
            and not used[end]
            and strip.load[end] == strip.load[r]
            and not (single and strip.top[end] >= 0)
        ):
            end += 1
        _add_machine(strip, r, end - r, strip.load[r], -1)
        r = end


@kernel
def open_groups(strip: Strip, degree: int, limits: Limits) -> None:
    """Cut the strip into machines of exactly `degree` ranks: a homogeneous layout."""
    span = limits.node if degree <= limits.node else limits.ranks
    for base in range(0, strip.load.shape[0], span):
        for first in range(base, base + span - degree + 1, degree):
            _add_machine(strip, first, degree, 0, -1)


@kernel
def _pick_machine(
    strip: Strip,
    i: int,
    target: int,
    single: bool,
    best_fit: bool,
    known: IntArray,
    jobs: Jobs,
    limits: Limits,
    costs: Coefficients,
) -> tuple[int, int, bool]:
    """Machine, end and whether a microbatch must be opened for sample i; machine -1: no room.

    `known` is scratch: (node + 2, 2), ticks and tokens of the sample at each width.
    """
    # The loop is the planner's hottest: local names and scalars, no calls that take the strip.
    ends, widths, tops = strip.machine_end, strip.machine_width, strip.machine_top
    used, encoded, largest = strip.tokens, strip.encoder_tokens, strip.unit_size
    counts, dearest = strip.units, strip.unit_ticks
    size, count, encoder = jobs.unit_size[i], jobs.units[i], jobs.encoder_tokens[i]
    dear, capacity, encoder_capacity = jobs.unit_ticks[i], limits.capacity, limits.encoder_capacity
    known[:] = -1
    shadows, shadow = strip.machine_shadow, jobs.shadow[i]
    best, best_key, best_end, best_new = -1, NEVER, NEVER, False
    full, full_key, full_end, full_new = -1, -1, -1, False
    for m in range(strip.counts[1]):
        begin = ends[m]
        if begin >= best_key and not best_fit:
            continue
        width = widths[m]
        slot = min(width, known.shape[0] - 1)
        if known[slot, 0] < 0 or slot < width:
            known[slot, 0] = job_ticks(jobs, i, width, costs)
            known[slot, 1] = share_tokens(jobs.tokens[i], width)
        end = begin + known[slot, 0]
        if end >= best_key and (not best_fit or end > target):
            continue
        share, b = known[slot, 1], tops[m]
        new = b < 0 or used[b] + share > capacity
        if not new and encoder > 0:
            most = max(largest[b], size)
            dealt = dealt_tokens(encoded[b] + encoder, most, counts[b] + count, width)
            new = dealt > encoder_capacity
        if new:
            if single and b >= 0:
                continue
            dealt = dealt_tokens(encoder, size, count, width)
            if share > capacity or dealt > encoder_capacity:
                continue
            end += overhead(width, costs) + remainder(dear, width)
        elif dear > dearest[b]:
            end += remainder(dear - dearest[b], width)
        key = max(end, shadows[m] + shadow // width)
        if key < best_key:
            best, best_key, best_end, best_new = m, key, end, new
        if best_fit and full_key < key <= target:
            full, full_key, full_end, full_new = m, key, end, new
    if full >= 0:
        return full, full_end, full_new
    return best, best_end, best_new


@kernel
def fill_machines(
    strip: Strip,
    samples: IntArray,
    target: int,
    single: bool,
    best_fit: bool,
    partial: bool,
    jobs: Jobs,
    limits: Limits,
    costs: Coefficients,
) -> bool:
    """Give each sample, in the given order, to a machine; False if one finds no room.

    With `partial`, samples that would not end by `target` stay out instead.
    """
    known = np.empty((limits.node + 2, 2), np.int64)
    for i in samples:
        m, end, new = _pick_machine(strip, i, target, single, best_fit, known, jobs, limits, costs)
        if partial and (m < 0 or end > target):
            continue
        if m < 0:
            return False
        if new:
            b = strip.counts[0]
            strip.counts[0] += 1
            strip.first[b], strip.width[b] = strip.machine_first[m], strip.machine_width[m]
            strip.start[b] = strip.machine_end[m]
            strip.machine[b] = m
            strip.machine_top[m] = b
        _add(strip, strip.machine_top[m], i, jobs)
        strip.machine_end[m] = end
        strip.machine_shadow[m] += jobs.shadow[i] // strip.machine_width[m]
    return True


@kernel
def construct(
    order: IntArray,
    target: int,
    width: int,
    ride: int,
    best_fit: bool,
    partial: bool,
    waves: int,
    jobs: Jobs,
    limits: Limits,
    costs: Coefficients,
) -> tuple[bool, Strip]:
    """Build a schedule of the samples of `order` towards `target`, as the module's text says.

    Args:
        order: Samples, longest first.
        target: Ticks at which all should end (in waves: how long each should take).
        width: Ranks of the machines that are not rings.
        ride: Samples whose least degree is at most this open no ring of their own.
        best_fit: Fill machines up to the target before emptier ones.
        partial: Leave out what would end after the target.
        waves: Waves of the strip; 0 where microbatches stack.
        jobs: All samples.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Whether every sample found room, and the strip.
    """
    n = order.shape[0]
    single = waves > 0
    strip = empty_strip(jobs.tokens.shape[0], n, limits.ranks * max(1, waves))
    rings, degrees = np.empty(n, np.int64), np.empty(n, np.int64)
    others = np.empty(n, np.int64)
    opened, kept = 0, 0
    for i in order:
        degree = least_degree(jobs, i, target, limits, costs)
        if degree > ride:
            rings[opened], degrees[opened] = i, degree
            opened += 1
        else:
            others[kept] = i
            kept += 1
    rest = open_rings(strip, rings[:opened], degrees[:opened], target, single, jobs, limits, costs)
    open_machines(strip, target, width, single, limits, costs)
    samples = np.concatenate((rest, others[:kept]))
    done = fill_machines(strip, samples, target, single, best_fit, partial, jobs, limits, costs)
    return done, strip


@kernel
def construct_groups(
    order: IntArray,
    target: int,
    degree: int,
    best_fit: bool,
    waves: int,
    jobs: Jobs,
    limits: Limits,
    costs: Coefficients,
) -> tuple[bool, Strip]:
    """Build a homogeneous schedule: every sample at `degree`, on the groups of `open_groups`."""
    strip = empty_strip(jobs.tokens.shape[0], order.shape[0], limits.ranks * max(1, waves))
    open_groups(strip, degree, limits)
    done = fill_machines(strip, order, target, waves > 0, best_fit, False, jobs, limits, costs)
    return done, strip
