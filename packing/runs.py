"""Even out the microbatches that the same ranks run one after the other.

How samples are dealt to the microbatches of such a run does not change when the run ends, but it
changes how far its end may stray: of microbatches whose times stray independently, equal ones stray
least together. And the fullest one decides how much memory is used.
"""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bins import settle_one
from .deal import gather
from .moldable import Jobs, Limits, dealt_tokens, job_ticks, share_tokens
from .ticks import Coefficients, IntArray, Layout, unit_columns

EVEN = 0.99
"""A run is left as it is unless its sum of squared times falls below this share of what it was."""


@kernel
def runs_of(layout: Layout, ranks: int) -> tuple[IntArray, IntArray]:
    """Which microbatches follow each other on exactly the same ranks.

    Args:
        layout: Microbatches in global order.
        ranks: Of the cluster.

    Returns:
        (B,) the microbatch that each one follows, and (B,) the one that follows it; -1: none.
    """
    count = layout.first.shape[0]
    before, after = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    last = np.full(ranks, -1, np.int64)
    for b in range(count):
        first, width = layout.first[b], layout.width[b]
        p = last[first]
        same = p >= 0 and layout.first[p] == first and layout.width[p] == width
        for rank in range(first, first + width):
            same = same and last[rank] == p
            last[rank] = b
        if same:
            before[b], after[p] = p, b
    return before, after


@kernel
def _deal(
    samples: IntArray, width: int, bins: int, jobs: Jobs, limits: Limits, costs: Coefficients
) -> IntArray:
    """(c,) bin of each sample, dearest first to the bin of least ticks that has room; -1: none."""
    count = samples.shape[0]
    ticks = np.empty(count, np.int64)
    for q in range(count):
        ticks[q] = job_ticks(jobs, samples[q], width, costs)
    load, held = np.zeros(bins, np.int64), np.zeros((4, bins), np.int64)
    out = np.full(count, -1, np.int64)
    for q in np.argsort(-ticks, kind="mergesort"):
        i = samples[q]
        share, best = share_tokens(jobs, i, width), -1
        encoded, size, units = jobs.encoder_tokens[i], jobs.unit_size[i], jobs.units[i]
        for b in range(bins):
            if best >= 0 and load[b] >= load[best]:
                continue
            dealt = dealt_tokens(
                held[1, b] + encoded, max(held[2, b], size), held[3, b] + units, width
            )
            if held[0, b] + share <= limits.capacity and dealt <= limits.encoder_capacity:
                best = b
        if best < 0:
            return out
        out[q] = best
        load[best] += ticks[q]
        held[0, best] += share
        held[1, best] += encoded
        held[2, best] = max(held[2, best], size)
        held[3, best] += units
    return out


@kernel
def even_runs(
    layout: Layout, ticks: IntArray, jobs: Jobs, unit_offsets: IntArray, unit_tokens: IntArray,
    limits: Limits, costs: Coefficients,
) -> int:  # fmt: skip
    """Deal the samples of each run anew to its microbatches; no run ends later than before.

    Args:
        layout: Without waves; changed in place, also the order of its samples.
        ticks: (B,) time of each microbatch.
        jobs: All samples.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Runs that were dealt anew.
    """
    count, changed = layout.first.shape[0], 0
    before, after = runs_of(layout, limits.ranks)
    units = unit_columns(unit_tokens, costs)
    owner = np.full(jobs.tokens.shape[0], -1, np.int64)
    for b in range(count):
        for i in layout.order[layout.offsets[b] : layout.offsets[b + 1]]:
            owner[i] = b
    for head in range(count):
        if before[head] >= 0 or after[head] < 0:
            continue
        bins, amount, total, squares = 0, 0, 0, 0.0
        b = head
        while b >= 0:
            bins += 1
            amount += layout.offsets[b + 1] - layout.offsets[b]
            total += ticks[b]
            squares += float(ticks[b]) ** 2
            b = after[b]
        if squares * EVEN <= float(total) ** 2 / bins:
            continue
        members, samples = np.empty(bins, np.int64), np.empty(amount, np.int64)
        place, mixed, b = 0, False, head
        for k in range(bins):
            members[k] = b
            for i in layout.order[layout.offsets[b] : layout.offsets[b + 1]]:
                samples[place] = i
                place += 1
                mixed = mixed or layout.sample_degree[i] < layout.width[b]
            b = after[b]
        dealt = _deal(samples, layout.width[head], bins, jobs, limits, costs)
        if dealt.min() < 0:
            continue
        ends, strays, fits = 0, 0.0, True
        for k in range(bins):
            _, value, _ = settle_one(
                layout, members[k], samples[dealt == k], jobs.tokens, jobs.reach, unit_offsets,
                unit_tokens, units, limits.capacity, limits.encoder_capacity, False, mixed, costs,
            )  # fmt: skip
            fits = fits and value >= 0
            ends += value + costs.fixed
            strays += float(value + costs.fixed) ** 2
        if fits and ends <= total and strays < squares * EVEN:
            for q in range(amount):
                owner[samples[q]] = members[dealt[q]]
            changed += 1
            continue
        for k in range(bins):
            b = members[k]
            settle_one(
                layout, b, layout.order[layout.offsets[b] : layout.offsets[b + 1]], jobs.tokens,
                jobs.reach, unit_offsets, unit_tokens, units, limits.capacity,
                limits.encoder_capacity, False, mixed, costs,
            )  # fmt: skip
    if changed:
        order = layout.order.copy()
        offsets, rows = gather(
            owner, order[np.argsort(-jobs.tokens[order], kind="mergesort")], count
        )
        layout.offsets[:] = offsets
        layout.order[:] = rows
    return changed
