"""Turn a finished strip into a layout: microbatches in global order, on ranks and in waves."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bins import settle
from .moldable import Jobs, Limits, job_ticks, overhead, remainder
from .strip import Strip
from .ticks import Coefficients, IntArray, Layout


@kernel
def rough_ticks(strip: Strip, jobs: Jobs, costs: Coefficients) -> IntArray:
    """(m,) time of each microbatch with every sample at its width; 0 for an empty one."""
    count = strip.counts[0]
    ticks = np.zeros(count, np.int64)
    unit = np.zeros(count, np.int64)
    microbatch, widths, table, dearest = strip.microbatch, strip.width, jobs.ticks, jobs.unit_ticks
    inside = table.shape[1]
    for i in range(microbatch.shape[0]):
        b = microbatch[i]
        if b >= 0:
            width = widths[b]
            ticks[b] += table[i, width] if width < inside else job_ticks(jobs, i, width, costs)
            unit[b] = max(unit[b], dearest[i])
    for b in range(count):
        if ticks[b] > 0:
            ticks[b] += overhead(strip.width[b], costs) + remainder(unit[b], strip.width[b])
    return ticks


@kernel
def fold(
    strip: Strip, ticks: IntArray, waves: int, block: int, limits: Limits
) -> tuple[IntArray, IntArray]:
    """Sort the blocks of `block` ranks of a strip into waves of like length.

    Blocks that a ring across blocks touches keep their place; the others are dealt, longest first,
    to the longest wave that has room.

    Returns:
        (m,) wave of each microbatch, and (m,) its first rank in the cluster.
    """
    per_wave = limits.ranks // block
    blocks = per_wave * waves
    count = strip.counts[0]
    length = np.zeros(blocks, np.int64)
    pinned = np.zeros(blocks, np.bool_)
    for b in range(count):
        begin = strip.first[b] // block
        end = (strip.first[b] + strip.width[b] - 1) // block
        for a in range(begin, end + 1):
            length[a] = max(length[a], ticks[b])
            if end > begin:
                pinned[a] = True
    wave_length = np.zeros(waves, np.int64)
    taken = np.zeros((waves, per_wave), np.bool_)
    place = np.arange(blocks)
    for a in range(blocks):
        if pinned[a]:
            wave_length[a // per_wave] = max(wave_length[a // per_wave], length[a])
            taken[a // per_wave, a % per_wave] = True
    ranking = np.argsort(-wave_length, kind="mergesort")
    slot = 0
    for a in np.argsort(-length, kind="mergesort"):
        if pinned[a]:
            continue
        while taken[ranking[slot // per_wave], slot % per_wave]:
            slot += 1
        place[a] = ranking[slot // per_wave] * per_wave + slot % per_wave
        slot += 1
    wave, first = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for b in range(count):
        a = strip.first[b] // block
        wave[b] = place[a] // per_wave
        first[b] = place[a] % per_wave * block + strip.first[b] % block
    return wave, first


@kernel
def _sequence(
    strip: Strip, ticks: IntArray, wave: IntArray, first: IntArray, waves: int
) -> IntArray:
    """Non-empty microbatches in global order: by wave, else by start; ties by rank."""
    begin = np.zeros(strip.counts[0], np.int64)
    if waves > 0:
        begin[:] = wave
    else:
        free = np.zeros(strip.load.shape[0], np.int64)
        for b in range(strip.counts[0]):
            lo, hi = first[b], first[b] + strip.width[b]
            for rank in range(lo, hi):
                begin[b] = max(begin[b], free[rank])
            for rank in range(lo, hi):
                free[rank] = begin[b] + ticks[b]
    by_rank = np.argsort(first, kind="mergesort")
    order = by_rank[np.argsort(begin[by_rank], kind="mergesort")]
    return order[ticks[order] > 0]


@kernel
def lay_out(
    strip: Strip,
    waves: int,
    block: int,
    mixed: bool,
    jobs: Jobs,
    unit_offsets: IntArray,
    unit_tokens: IntArray,
    limits: Limits,
    costs: Coefficients,
) -> tuple[bool, Layout]:
    """Number the microbatches of a strip and its waves, and settle every sample and unit.

    Args:
        strip: A finished strip.
        waves: Its waves; 0 where microbatches stack.
        block: Ranks of the blocks that `fold` sorts into waves; divides the ranks.
        mixed: Whether samples may stay whole on one rank of a ring.
        jobs: All samples.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Whether all keeps within the capacities, and the layout.
    """
    n = jobs.tokens.shape[0]
    ticks = rough_ticks(strip, jobs, costs)
    if waves > 0:
        wave, first = fold(strip, ticks, waves, block, limits)
    else:
        wave, first = np.zeros(strip.counts[0], np.int64), strip.first[: strip.counts[0]].copy()
    sequence = _sequence(strip, ticks, wave, first, waves)
    number = np.full(strip.counts[0], -1, np.int64)
    for k in range(sequence.shape[0]):
        number[sequence[k]] = k
    offsets = np.zeros(sequence.shape[0] + 1, np.int64)
    for i in range(n):
        if strip.microbatch[i] >= 0:
            offsets[number[strip.microbatch[i]] + 1] += 1
    offsets = np.cumsum(offsets)
    cursor = offsets.copy()
    order = np.zeros(n, np.int64)
    for i in range(n):
        if strip.microbatch[i] >= 0:
            k = number[strip.microbatch[i]]
            order[cursor[k]] = i
            cursor[k] += 1
    dense = wave[sequence]
    last, used = -1, -1
    for k in range(dense.shape[0]):
        if dense[k] != last:
            last = dense[k]
            used += 1
        dense[k] = used
    layout = Layout(
        first[sequence],
        strip.width[: strip.counts[0]][sequence],
        dense,
        offsets,
        order,
        np.zeros(n, np.int64),
        np.ones(n, np.int64),
        np.zeros(unit_tokens.shape[0], np.int64),
    )
    done = settle(
        layout, jobs.tokens, jobs.reach, unit_offsets, unit_tokens, limits.capacity,
        limits.encoder_capacity, waves > 0, mixed, costs,
    )  # fmt: skip
    return done, layout
