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
    strip: Strip, degree: int, ticks: int, target: int, single: bool, limits: Limits
) -> tuple[int, int]:
    """First rank and start of the best run of half nodes for a ring across nodes; -1: none."""
    best, best_key, best_start = -1, NEVER, 0
    ranks = strip.load.shape[0]
    for first in range(0, ranks - degree + 1, limits.grain):
        if not may_start(first % limits.ranks, degree, limits):
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
    step = degree if limits.aligned else 1
    for node in range(0, strip.load.shape[0], limits.node):
        total = strip.load[node : node + limits.node].sum()
        if single and total == 0 and best >= 0 and best_key < 0:
            continue
        for first in range(node, node + limits.node - degree + 1, step):
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
        add(strip, b, i, jobs)
        strip.load[first : first + degree] = start + ticks
        strip.top[first : first + degree] = b
    return rest[:left]
