"""Build a schedule of moldable samples on a strip of ranks, towards a target L.

1. Each sample takes the least degree at which it alone would end by L. Those above 1 become
   *rings*, widest first, on the window of ranks that idles least.
2. What is left of each node is cut into *machines* of a given width; a ring that ends last on its
   ranks is a machine too, so that short samples ride on it.
3. The other samples go, longest first, to the machine that ends earliest with them (or, with
   `best_fit`, latest but by L).

The strip is that of `strip.py`.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .forest import fill_machines
from .moldable import (
    Jobs,
    Limits,
    ends_alone,
    least_degree,
    may_start,
    overhead,
    widest,
)
from .strip import Strip, empty_strip, open_rings
from .ticks import BoolArray, Coefficients, IntArray


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
        end = r + widest(r, end - r, limits)
        _add_machine(strip, r, end - r, strip.load[r], -1)
        r = end


@kernel
def open_groups(strip: Strip, degree: int, limits: Limits) -> None:
    """Cut the strip into machines of exactly `degree` ranks: a homogeneous layout."""
    first = 0
    while first + degree <= strip.load.shape[0]:
        if may_start(first % limits.ranks, degree, limits):
            _add_machine(strip, first, degree, 0, -1)
            first += degree
        else:
            first += 1


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
    ticks, tokens, encoded = jobs.ticks[:, 1], jobs.tokens, jobs.encoder_tokens
    shadow, base = jobs.shadow, overhead(1, costs)
    for i in order:
        # What ends in time on one rank is most of a step: no call for each of these.
        degree = 1
        latest = max(ticks[i] + base, shadow[i])
        if not ends_alone(
            latest, target, tokens[i], encoded[i], limits.capacity, limits.encoder_capacity
        ):
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
