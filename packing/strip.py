"""A schedule under construction, and the rings on it.

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
    job_ticks,
    may_start,
    share_tokens,
)
from .ticks import Coefficients, IntArray


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
def add(strip: Strip, b: int, i: int, jobs: Jobs) -> None:
    """Put sample i into microbatch b."""
    strip.tokens[b] += share_tokens(jobs, i, strip.width[b])
    strip.encoder_tokens[b] += jobs.encoder_tokens[i]
    strip.unit_size[b] = max(strip.unit_size[b], jobs.unit_size[i])
    strip.unit_ticks[b] = max(strip.unit_ticks[b], jobs.unit_ticks[i])
    strip.units[b] += jobs.units[i]
    strip.shadow[b] += jobs.shadow[i]
    strip.microbatch[i] = b


@kernel
def _window_across(
    strip: Strip, peak: IntArray, total: IntArray, degree: int, ticks: int, target: int,
    single: bool, limits: Limits,
) -> tuple[int, int]:  # fmt: skip
    """First rank and start of the best run of half nodes for a ring across nodes; -1: none."""
    best, best_key, best_start = -1, NEVER, 0
    grain = limits.grain
    long = degree // grain
    for g in range(strip.load.shape[0] // grain - long + 1):
        if not may_start(g * grain % limits.ranks, degree, limits):
            continue
        start = peak[g : g + long].max()
        if single and start > 0:
            continue
        key = start * degree - total[g : g + long].sum()
        if start + ticks > target:
            key = (NEVER >> 1) + start
        if key < best_key:
            best, best_key, best_start = g * grain, key, start
    return best, best_start


@kernel
def _window_inside(
    strip: Strip, total: IntArray, degree: int, ticks: int, target: int, single: bool,
    limits: Limits,
) -> tuple[int, int]:  # fmt: skip
    """First rank and start of the best window of one node; fuller nodes first; -1: none."""
    best, best_key, best_start = -1, NEVER, 0
    load, node = strip.load, limits.node
    step = degree if limits.aligned else 1
    per_node = node // limits.grain
    for place in range(load.shape[0] // node):
        begin = place * node
        bonus = total[place * per_node : (place + 1) * per_node].sum() // node
        if -bonus >= best_key:  # no window of this node is better
            continue
        for first in range(begin, begin + node - degree + 1, step):
            start, used = 0, 0
            for r in range(first, first + degree):
                start = max(start, load[r])
                used += load[r]
            if single and start > 0:
                continue
            key = 4 * (start * degree - used) - bonus
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
    count, grain = rings.shape[0], limits.grain
    key = np.empty(count, np.int64)
    for q in range(count):
        key[q] = -(degrees[q] * (1 << 40) + job_ticks(jobs, rings[q], degrees[q], costs))
    grains = strip.load.shape[0] // grain
    peak, total = np.zeros(grains, np.int64), np.zeros(grains, np.int64)
    rest = np.empty(count, np.int64)
    left = 0
    for q in np.argsort(key, kind="mergesort"):
        i, degree = rings[q], degrees[q]
        ticks = alone(jobs, i, degree, costs)
        if degree > limits.node:
            first, start = _window_across(strip, peak, total, degree, ticks, target, single, limits)
        else:
            first, start = _window_inside(strip, total, degree, ticks, target, single, limits)
        if first < 0:
            rest[left] = i
            left += 1
            continue
        b = strip.counts[0]
        strip.counts[0] += 1
        strip.first[b], strip.width[b], strip.start[b] = first, degree, start
        add(strip, b, i, jobs)
        strip.load[first : first + degree] = start + ticks
        strip.top[first : first + degree] = b
        for g in range(first // grain, (first + degree - 1) // grain + 1):
            peak[g] = strip.load[g * grain : (g + 1) * grain].max()
            total[g] = strip.load[g * grain : (g + 1) * grain].sum()
    return rest[:left]
