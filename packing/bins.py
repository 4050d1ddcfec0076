"""Fill the ranks of one microbatch: which rank holds a short sample whole, which encodes a unit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .ticks import (
    Coefficients,
    FloatArray,
    IntArray,
    Layout,
    add_cuts,
    latency_ticks,
    reach_ticks,
    unit_columns,
)

NEVER = 1 << 60
"""Later than any time."""
SORTED_BY_HAND = 48
"""Up to so many samples are sorted by insertion, which allocates nothing."""
FEW = 5
"""How many samples are shared: 0, 1, ... up to one less than this, ..."""
TRIES = FEW + 4
"""... then quarters, and all of them first."""


@kernel
def place_units(
    units: IntArray,
    unit_tokens: IntArray,
    ticks: IntArray,
    load: IntArray,
    encoder_capacity: int,
    position: IntArray,
) -> bool:
    """Give encoder units, in their order, to the rank of least load that has room.

    Args:
        units: (k,) units of the microbatch, dearest first (`_units_of`).
        unit_tokens: (units,) encoder tokens of all units.
        ticks: (units,) their times.
        load: (w,) ticks that each rank has already; grows by what it is given.
        encoder_capacity: Encoder tokens that a rank may take.
        position: (k,) receives the position of each unit.

    Returns:
        Whether every unit found room.
    """
    width = load.shape[0]
    used = np.zeros(width, np.int64)
    for k in range(units.shape[0]):
        u = units[k]
        size, best = unit_tokens[u], -1
        for r in range(width):
            if used[r] + size <= encoder_capacity and (best < 0 or load[r] < load[best]):
                best = r
        if best < 0:
            return False
        position[k] = best
        load[best] += ticks[u]
        used[best] += size
    return True


class Shares(NamedTuple):
    """What the samples of one microbatch bring, longest first: k of them shared, the others whole.

    A rank's load and tokens start from what the first k samples bring when all ranks share them.
    """

    whole: IntArray
    """(c,) ticks of each sample on one rank."""
    load: IntArray
    """(c + 1,) ticks of the first k samples, on every rank of the microbatch."""
    held: IntArray
    """(c + 1, width) their tokens on each rank."""


@kernel
def _shares(
    samples: IntArray, tokens: IntArray, reach: FloatArray, width: int, costs: Coefficients
) -> Shares:
    count = samples.shape[0]
    shares = Shares(
        np.zeros(count, np.int64),
        np.zeros(count + 1, np.int64),
        np.zeros((count + 1, width), np.int64),
    )
    whole, load, held = shares.whole, shares.load, shares.held
    for k in range(count):
        size, far = tokens[samples[k]], reach[samples[k]]
        linear, attention, exchange = reach_ticks(size, far, width, costs)
        load[k + 1] = load[k] + linear + attention + exchange
        if width > 1:
            linear, attention, exchange = reach_ticks(size, far, 1, costs)
        whole[k] = linear + attention + exchange
        held[k + 1] = held[k]
        add_cuts(held[k + 1], 0, size, width)
    return shares


@kernel
def _all_shared(
    samples: IntArray, tokens: IntArray, reach: FloatArray, capacity: int, costs: Coefficients,
    load: IntArray,
) -> int:  # fmt: skip
    """As `_spread` where all ranks share every sample, without its tables."""
    width, ticks = load.shape[0], 0
    held = np.zeros(width, np.int64)
    for i in samples:
        linear, attention, exchange = reach_ticks(tokens[i], reach[i], width, costs)
        ticks += linear + attention + exchange
        add_cuts(held, 0, tokens[i], width)
    if held.max() > capacity:
        return -1
    if samples.shape[0] == 0:
        return 0
    load[:] = ticks + costs.linear_rank
    return int(ticks + costs.linear_rank + latency_ticks(width, costs))


@kernel
def _longest_first(chosen: IntArray, tokens: IntArray) -> IntArray:
    """These samples, longest first; ties keep their order."""
    count = chosen.shape[0]
    if count > SORTED_BY_HAND:
        return chosen[np.argsort(-tokens[chosen], kind="mergesort")]
    out = chosen.copy()
    for k in range(1, count):
        i, place = out[k], k
        size = tokens[i]
        while place > 0 and tokens[out[place - 1]] < size:
            out[place] = out[place - 1]
            place -= 1
        out[place] = i
    return out


@kernel
def _spread(
    samples: IntArray, tokens: IntArray, shared: int, shares: Shares, capacity: int, limit: int,
    costs: Coefficients, first: IntArray, load: IntArray,
) -> int:  # fmt: skip
    """Share the first `shared` samples, keep each other one whole on the rank of least load.

    Args:
        samples: (c,) of the microbatch, longest first.
        tokens: (n,) of all samples.
        shared: How many all ranks share.
        shares: Of `samples`.
        capacity: Tokens that a rank may hold.
        limit: What ends no earlier than this is of no use.
        costs: The coefficients.
        first: (c,) receives the position of each whole sample.
        load: (width,) receives the ticks of each rank.

    Returns:
        The largest load, with latency; -1 where a sample finds no room or `limit` is reached.
    """
    width = load.shape[0]
    latency = latency_ticks(width if shared > 0 else 1, costs)
    held = shares.held[shared].copy()
    if held.max() > capacity:
        return -1
    load[:] = shares.load[shared]
    if shared > 0:
        load[:] += costs.linear_rank
    most = load[0]
    for q in range(shared, samples.shape[0]):
        size, best = tokens[samples[q]], -1
        for r in range(width):
            if held[r] + size <= capacity and (best < 0 or load[r] < load[best]):
                best = r
        if best < 0:
            return -1
        if held[best] == 0 and shared == 0:
            load[best] += costs.linear_rank
        first[q] = best
        held[best] += size
        load[best] += shares.whole[q]
        most = max(most, load[best])
        if most + latency >= limit:
            return -1
    return int(most + latency)


@kernel
def _units_of(samples: IntArray, unit_offsets: IntArray, ticks: IntArray) -> IntArray:
    """The units of these samples, dearest first; ties keep the order of the samples."""
    amount = 0
    for i in samples:
        amount += unit_offsets[i + 1] - unit_offsets[i]
    units = np.empty(amount, np.int64)
    k = 0
    for i in samples:
        for u in range(unit_offsets[i], unit_offsets[i + 1]):
            units[k] = u
            k += 1
    for k in range(1, amount):
        if ticks[units[k]] > ticks[units[k - 1]]:
            return units[np.argsort(-ticks[units], kind="mergesort")]
    return units


@kernel
def settle_one(
    layout: Layout, b: int, chosen: IntArray, tokens: IntArray, reach: FloatArray,
    unit_offsets: IntArray, unit_tokens: IntArray, ticks: IntArray, capacity: int,
    encoder_capacity: int, apart: bool, mixed: bool, costs: Coefficients,
) -> tuple[IntArray, int, int]:  # fmt: skip
    """Decide, inside microbatch b, who shares what, as `settle` does.

    Args:
        layout: `first` and `width` are read; `sample_first`, `sample_degree` and `unit_rank` of
            the microbatch are written, if a way is found.
        b: The microbatch.
        chosen: (c,) its samples.
        tokens: (n,) LLM tokens of all samples.
        reach: (n,) their reach.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens.
        ticks: (units,) their times.
        capacity: LLM tokens that a rank may hold.
        encoder_capacity: Encoder tokens that a rank may encode.
        apart: Whether encoder and LLM are waited for one after the other.
        mixed: Whether samples may stay whole on one rank of a ring.
        costs: The coefficients.

    Returns:
        The samples, longest first; the slowest rank's LLM ticks (with its encoder ticks, unless
        `apart`), without `fixed`, and -1 where no way keeps within the capacities; and its encoder
        ticks (0 unless `apart`).
    """
    width, count = layout.width[b], chosen.shape[0]
    samples = _longest_first(chosen, tokens)
    units = _units_of(samples, unit_offsets, ticks)
    position = np.zeros(units.shape[0], np.int64)
    first, load = np.zeros(count, np.int64), np.zeros(width, np.int64)
    best, encoder = NEVER, 0
    if apart:  # who holds which sample plays no part
        if not place_units(units, unit_tokens, ticks, load, encoder_capacity, position):
            return samples, -1, 0
        encoder = int(load.max()) if width > 0 else 0
    several = mixed and width > 1
    shares = _shares(samples[: count if several else 0], tokens, reach, width, costs)
    last = -1
    for attempt in range(TRIES if several else 1):
        shared = count
        if attempt > 0:
            shared = min(count, attempt - 1 if attempt <= FEW else count * (attempt - FEW) // 4)
            if shared in (last, count):
                continue
        last = shared
        if not several:
            value = _all_shared(samples, tokens, reach, capacity, costs, load)
        elif shares.load[shared] >= best:
            continue
        else:
            value = _spread(samples, tokens, shared, shares, capacity, best, costs, first, load)
        if value < 0:
            continue
        if not apart and units.shape[0] > 0:
            value -= int(load.max())
            if not place_units(units, unit_tokens, ticks, load, encoder_capacity, position):
                continue
            value += int(load.max())
        if value >= best:
            continue
        best = value
        for q in range(count):
            whole = q >= shared
            layout.sample_first[samples[q]] = layout.first[b] + (first[q] if whole else 0)
            layout.sample_degree[samples[q]] = 1 if whole else width
        for k in range(units.shape[0]):
            layout.unit_rank[units[k]] = layout.first[b] + position[k]
    return samples, -1 if best == NEVER else best, encoder


@kernel
def settle(
    layout: Layout,
    tokens: IntArray,
    reach: FloatArray,
    unit_offsets: IntArray,
    unit_tokens: IntArray,
    capacity: int,
    encoder_capacity: int,
    apart: bool,
    mixed: bool,
    costs: Coefficients,
) -> bool:
    """Decide, inside each microbatch, who shares what: fills `layout`'s samples and units.

    In a ring, all ranks share the longest samples, and each other one stays whole on one rank, to
    which it goes by least load. How many are shared is tried (all, a few, and quarters of them),
    encoder units are placed on top, and the quickest of these is kept: the first of equals.

    Args:
        layout: `first`, `width`, `offsets`, `order` are read; `order` is sorted within each
            microbatch, longest first; `sample_first`, `sample_degree`, `unit_rank` are written.
        tokens: (n,) LLM tokens.
        reach: (n,) their reach.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens.
        capacity: LLM tokens that a rank may hold.
        encoder_capacity: Encoder tokens that a rank may encode.
        apart: Whether encoder and LLM are waited for one after the other.
        mixed: Whether samples may stay whole on one rank of a ring.
        costs: The coefficients.

    Returns:
        Whether every microbatch found a way within both capacities.
    """
    ticks = unit_columns(unit_tokens, costs)
    for b in range(layout.first.shape[0]):
        lo, hi = layout.offsets[b], layout.offsets[b + 1]
        samples, value, _ = settle_one(
            layout, b, layout.order[lo:hi], tokens, reach, unit_offsets, unit_tokens, ticks,
            capacity, encoder_capacity, apart, mixed, costs,
        )  # fmt: skip
        if value < 0:
            return False
        layout.order[lo:hi] = samples
    return True


@kernel
def place_in_microbatches(
    layout: Layout,
    tokens: IntArray,
    reach: FloatArray,
    unit_offsets: IntArray,
    unit_tokens: IntArray,
    encoder_capacity: int,
    apart: bool,
    costs: Coefficients,
) -> int:
    """Place the encoder units of a layout whose samples are placed: fills `unit_rank`.

    Args:
        layout: Everything but `unit_rank` is read.
        tokens: (n,) LLM tokens.
        reach: (n,) their reach.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens.
        encoder_capacity: Encoder tokens that a rank may encode.
        apart: Whether encoder and LLM are waited for one after the other.
        costs: The coefficients.

    Returns:
        The first microbatch whose units find no room; -1 when all do.
    """
    ticks = unit_columns(unit_tokens, costs)
    for b in range(layout.first.shape[0]):
        samples = layout.order[layout.offsets[b] : layout.offsets[b + 1]]
        load = np.zeros(layout.width[b], np.int64)
        for i in samples:
            degree = layout.sample_degree[i]
            linear, attention, exchange = reach_ticks(tokens[i], reach[i], degree, costs)
            first = layout.sample_first[i] - layout.first[b]
            if not apart:
                load[first : first + degree] += linear + attention + exchange
        units = _units_of(samples, unit_offsets, ticks)
        position = np.zeros(units.shape[0], np.int64)
        if not place_units(units, unit_tokens, ticks, load, encoder_capacity, position):
            return b
        for k in range(units.shape[0]):
            layout.unit_rank[units[k]] = layout.first[b] + position[k]
    return -1
