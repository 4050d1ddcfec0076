"""Size a wave that one long sample leads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._jit import kernel
from .moldable import NEVER, Jobs, Limits, alone, least_degree, least_place, next_degree
from .ticks import Coefficients, IntArray

SIZES = 64
"""Lengths that are tried at most."""


@kernel
def leader_targets(
    order: IntArray, work: IntArray, jobs: Jobs, limits: Limits, costs: Coefficients
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Lengths of a wave led by the first sample of `order`, one for each of its degrees.

    Ranks are counted, not placed: samples in order take their least degree until the ranks are
    used up; what is left is filled with short samples, as many as memory holds.

    Args:
        order: Samples, longest first.
        work: (n,) rank-ticks of every sample at degree 1.
        jobs: All samples.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        (k,) lengths in ticks, and (k,) the share of the wave's rank-ticks that would be busy.
    """
    targets, fills = np.empty(SIZES, np.int64), np.empty(SIZES, np.float64)
    count, last = 0, NEVER
    known = np.zeros(order.shape[0], np.int64)  # places of degrees, at the last length
    base = costs.fixed + costs.linear_rank
    degree = least_degree(jobs, order[0], NEVER, limits, costs)
    while 0 < degree <= limits.largest and count < SIZES:
        target = alone(jobs, order[0], degree, costs)
        if target > last:
            known[:] = 0
        last = target
        left, busy, q = limits.ranks, 0, 0
        while q < order.shape[0] and left > 0:
            i = order[q]
            known[q] = max(0, least_place(jobs, i, target, known[q], limits, costs))
            taken = limits.degrees[known[q]]
            if taken == 1 and 2 * work[i] < target:
                break
            if taken <= left:
                left -= taken
                busy += work[i]
            q += 1
        if q < order.shape[0]:
            i = order[q]
            full = limits.capacity * work[i] // jobs.tokens[i]
            busy += left * min(target - base, full)
        targets[count] = target
        fills[count] = busy / (limits.ranks * max(1, target - base))
        count += 1
        step = limits.node if degree >= 2 * limits.node else 1
        leap = max(step, degree * 15 // 100 // step * step) if step > 1 else 1
        degree = next_degree(degree + leap - 1, limits)
    return targets[:count], fills[:count]
