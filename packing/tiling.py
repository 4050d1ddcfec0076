"""Share all ranks of a wave out among blocks of samples, so that none is idle.

Each block is a microbatch to be: its samples all run on all of its ranks.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .moldable import (
    NEVER,
    Jobs,
    Limits,
    dealt_tokens,
    job_ticks,
    may_start,
    overhead,
    remainder,
    share_tokens,
)
from .ticks import Coefficients, IntArray


@kernel
def block_ticks(
    rows: IntArray, offsets: IntArray, jobs: Jobs, limits: Limits, costs: Coefficients
) -> IntArray:
    """Time of every block at every degree allowed.

    Args:
        rows: The samples of all blocks, one block after another.
        offsets: (m + 1,) where each block's begin.
        jobs: All samples.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        (m, degrees) ticks; `NEVER` where a block exceeds a capacity.
    """
    m, count = offsets.shape[0] - 1, limits.degrees.shape[0]
    table = np.full((m, count), NEVER, np.int64)
    for b in range(m):
        own = rows[offsets[b] : offsets[b + 1]]
        encoded, units, largest, dearest = 0, 0, 0, 0
        for i in own:
            encoded += jobs.encoder_tokens[i]
            units += jobs.units[i]
            largest = max(largest, jobs.unit_size[i])
            dearest = max(dearest, jobs.unit_ticks[i])
        for k in range(count):
            degree = limits.degrees[k]
            tokens, ticks = 0, overhead(degree, costs) + remainder(dearest, degree)
            for i in own:
                tokens += share_tokens(jobs, i, degree)
                ticks += job_ticks(jobs, i, degree, costs)
            if tokens <= limits.capacity and (
                encoded == 0
                or dealt_tokens(encoded, largest, units, degree) <= limits.encoder_capacity
            ):
                table[b, k] = ticks
    return table


@kernel
def tile(table: IntArray, limits: Limits) -> tuple[int, IntArray]:
    """Give consecutive blocks consecutive runs of ranks that cover all, the slowest soonest.

    Least over all ways of the largest time, block after block and rank after rank: O(m * ranks *
    degrees). Of equal ways the one whose last block is the narrowest, and so on towards the first.

    Args:
        table: (m, degrees) ticks of each block at each degree, `NEVER` where it may not have it.
        limits: The cluster and its rules.

    Returns:
        The largest time, and (m,) the ranks of each block; `NEVER` where no way covers all ranks.
    """
    m, ranks = table.shape[0], limits.ranks
    best = np.full((m + 1, ranks + 1), NEVER, np.int64)
    width = np.zeros((m + 1, ranks + 1), np.int64)
    best[0, 0] = 0
    for b in range(m):
        for first in range(b, ranks - (m - b) + 1):
            before = best[b, first]
            if before == NEVER:
                continue
            for k in range(limits.degrees.shape[0]):
                degree = limits.degrees[k]
                end = first + degree
                if end > ranks:
                    break
                value = max(before, table[b, k])
                better = value < best[b + 1, end] or (
                    value == best[b + 1, end] and value < NEVER and degree < width[b + 1, end]
                )
                if better and may_start(first, degree, limits):
                    best[b + 1, end], width[b + 1, end] = value, degree
    widths = np.zeros(m, np.int64)
    if best[m, ranks] == NEVER:
        return NEVER, widths
    end = ranks
    for b in range(m, 0, -1):
        widths[b - 1] = width[b, end]
        end -= width[b, end]
    return int(best[m, ranks]), widths
