"""Turn a partition of samples into microbatches of one degree, and these into a layout."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .bins import settle
from .moldable import Jobs, Limits, dealt_tokens, share_tokens
from .ticks import Coefficients, IntArray, Layout, microbatch_ticks


@kernel
def gather(bin_of: IntArray, order: IntArray, bins: int) -> tuple[IntArray, IntArray]:
    """The samples of each bin, in order; bins without samples are left out.

    Args:
        bin_of: (n,) bin of each sample.
        order: (n,) samples.
        bins: How many bins there are.

    Returns:
        (k + 1,) where each bin's samples begin, and (n,) the samples, bin after bin.
    """
    amount = np.zeros(bins, np.int64)
    for i in order:
        amount[bin_of[i]] += 1
    place = np.zeros(bins, np.int64)
    offsets = np.zeros(bins + 1, np.int64)
    used = 0
    for b in range(bins):
        if amount[b] > 0:
            place[b] = offsets[used]
            offsets[used + 1] = offsets[used] + amount[b]
            used += 1
    rows = np.empty(order.shape[0], np.int64)
    for i in order:
        rows[place[bin_of[i]]] = i
        place[bin_of[i]] += 1
    return offsets[: used + 1], rows


@kernel
def first_fit(
    offsets: IntArray, rows: IntArray, degree: int, jobs: Jobs, limits: Limits
) -> tuple[IntArray, IntArray, IntArray]:
    """Cut sets of samples into microbatches: each sample into its set's first with room.

    Args:
        offsets: (k + 1,) where each set's samples begin.
        rows: (n,) the samples; in each set, those of most tokens are dealt first.
        degree: Ranks of every sample; each fits at it.
        jobs: All samples.
        limits: Cluster and capacities.

    Returns:
        (m + 1,) where each microbatch's samples begin, (n,) the samples, (m,) the set of each.
    """
    n = rows.shape[0]
    held = np.zeros((4, n), np.int64)
    own = np.empty(n, np.int64)
    set_of = np.empty(n, np.int64)
    count = 0
    for k in range(offsets.shape[0] - 1):
        first = count
        members = rows[offsets[k] : offsets[k + 1]]
        for i in members[np.argsort(-jobs.tokens[members], kind="mergesort")]:
            share, encoded = share_tokens(jobs, i, degree), jobs.encoder_tokens[i]
            size, units = jobs.unit_size[i], jobs.units[i]
            b = first
            while b < count:
                dealt = dealt_tokens(
                    held[1, b] + encoded, max(held[2, b], size), held[3, b] + units, degree
                )
                if held[0, b] + share <= limits.capacity and dealt <= limits.encoder_capacity:
                    break
                b += 1
            if b == count:
                set_of[b] = k
                count += 1
            held[0, b] += share
            held[1, b] += encoded
            held[2, b] = max(held[2, b], size)
            held[3, b] += units
            own[i] = b
    bounds, members = gather(own, rows, count)
    return bounds, members, set_of[:count]


@kernel
def lay_out_rings(
    offsets: IntArray,
    rows: IntArray,
    ring: IntArray,
    first: IntArray,
    degree: int,
    single: bool,
    jobs: Jobs,
    unit_offsets: IntArray,
    unit_tokens: IntArray,
    limits: Limits,
    costs: Coefficients,
) -> tuple[bool, Layout]:
    """A layout of microbatches of one degree on its rings; in waves, the longest together.

    Args:
        offsets: (m + 1,) where each microbatch's samples begin.
        rows: (n,) the samples.
        ring: (m,) the ring of each microbatch; not read where there are waves.
        first: First rank of each ring.
        degree: Of every sample.
        single: Whether there are waves.
        jobs: All samples.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Whether all keeps within the capacities, and the layout.
    """
    count, n = offsets.shape[0] - 1, jobs.tokens.shape[0]
    layout = Layout(
        np.zeros(count, np.int64),
        np.full(count, degree, np.int64),
        np.zeros(count, np.int64),
        offsets,
        rows.copy(),
        np.zeros(n, np.int64),
        np.full(n, degree, np.int64),
        np.zeros(unit_tokens.shape[0], np.int64),
    )
    done = settle(
        layout, jobs.tokens, jobs.reach, unit_offsets, unit_tokens, limits.capacity,
        limits.encoder_capacity, single, False, costs,
    )  # fmt: skip
    if not done:
        return False, layout
    ranking = np.arange(count)
    if single:
        tokens, reach = jobs.tokens, jobs.reach
        loads = microbatch_ticks(layout, tokens, reach, unit_offsets, unit_tokens, costs)
        ranking = np.argsort(-loads.ticks, kind="mergesort")
    bounds, members = np.zeros(count + 1, np.int64), np.empty(rows.shape[0], np.int64)
    for place in range(count):
        b = ranking[place]
        lo, hi = offsets[b], offsets[b + 1]
        bounds[place + 1] = bounds[place] + hi - lo
        members[bounds[place] : bounds[place + 1]] = layout.order[lo:hi]
        start = first[place % first.shape[0]] if single else first[ring[b]]
        layout.first[place] = start
        layout.wave[place] = place // first.shape[0] if single else 0
        for i in layout.order[lo:hi]:
            layout.sample_first[i] += start
            for u in range(unit_offsets[i], unit_offsets[i + 1]):
                layout.unit_rank[u] += start
    return True, Layout(
        layout.first,
        layout.width,
        layout.wave,
        bounds,
        members,
        layout.sample_first,
        layout.sample_degree,
        layout.unit_rank,
    )
