"""Fill the ranks of one microbatch: which rank holds a short sample whole, which encodes a unit."""

from __future__ import annotations

import numpy as np

from ._jit import kernel
from .ticks import (
    Coefficients,
    FloatArray,
    IntArray,
    Layout,
    cut_tokens,
    latency_ticks,
    reach_ticks,
    unit_columns,
)


@kernel
def _lightest(load: IntArray, used: IntArray, size: int, capacity: int) -> int:
    """The position of least load that has room for `size`; -1 if none has."""
    best = -1
    for r in range(load.shape[0]):
        if used[r] + size <= capacity and (best < 0 or load[r] < load[best]):
            best = r
    return best


@kernel
def place_units(
    units: IntArray,
    unit_tokens: IntArray,
    ticks: IntArray,
    load: IntArray,
    encoder_capacity: int,
    position: IntArray,
) -> bool:
    """Give encoder units, dearest first, to the rank of least load that has room.

    Args:
        units: (k,) units of the microbatch; ties keep this order.
        unit_tokens: (units,) encoder tokens of all units.
        ticks: (units,) their times.
        load: (w,) ticks that each rank has already; grows by what it is given.
        encoder_capacity: Encoder tokens that a rank may take.
        position: (units,) receives the position of each unit.

    Returns:
        Whether every unit found room.
    """
    used = np.zeros(load.shape[0], np.int64)
    ranking = np.argsort(-ticks[units], kind="mergesort")
    for q in range(units.shape[0]):
        u = units[ranking[q]]
        r = _lightest(load, used, unit_tokens[u], encoder_capacity)
        if r < 0:
            return False
        position[u] = r
        load[r] += ticks[u]
        used[r] += unit_tokens[u]
    return True


@kernel
def _spread(
    samples: IntArray,
    whole: int,
    width: int,
    tokens: IntArray,
    reach: FloatArray,
    capacity: int,
    costs: Coefficients,
    first: IntArray,
    degree: IntArray,
    load: IntArray,
) -> int:
    """Share the first `len(samples) - whole` samples over all ranks, keep the others whole.

    Those go, longest first, to the rank of least load. Returns the latency, or -1 where a sample
    finds no room.
    """
    held = np.zeros(width, np.int64)
    busy = np.zeros(width, np.bool_)
    load[:] = 0
    largest = 1
    for q in range(samples.shape[0]):
        i = samples[q]
        d = width if q < samples.shape[0] - whole else 1
        linear, attention, exchange = reach_ticks(tokens[i], reach[i], d, costs)
        first[q], degree[q] = 0, d
        if d == 1:
            first[q] = _lightest(load, held, tokens[i], capacity)
            if first[q] < 0:
                return -1
        largest = max(largest, d)
        for position in range(d):
            r = first[q] + position
            held[r] += cut_tokens(tokens[i], d, position)
            load[r] += linear + attention + exchange
            if not busy[r]:
                busy[r] = True
                load[r] += costs.linear_rank
            if held[r] > capacity:
                return -1
    return latency_ticks(largest, costs)


@kernel
def _units_of(samples: IntArray, unit_offsets: IntArray) -> IntArray:
    amount = 0
    for i in samples:
        amount += unit_offsets[i + 1] - unit_offsets[i]
    units = np.empty(amount, np.int64)
    k = 0
    for i in samples:
        for u in range(unit_offsets[i], unit_offsets[i + 1]):
            units[k] = u
            k += 1
    return units


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

    A sample starts at the width of its microbatch. In a ring, the shortest samples are tried whole
    on one rank each (none of them, a quarter, half, ..., all), encoder units are placed on top, and
    the quickest of these is kept: the first of equals.

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
    position = np.zeros(unit_tokens.shape[0], np.int64)
    for b in range(layout.first.shape[0]):
        width = layout.width[b]
        lo, hi = layout.offsets[b], layout.offsets[b + 1]
        count = hi - lo
        chosen = layout.order[lo:hi]
        samples = chosen[np.argsort(-tokens[chosen], kind="mergesort")]
        layout.order[lo:hi] = samples
        units = _units_of(samples, unit_offsets)
        first, degree = np.zeros(count, np.int64), np.zeros(count, np.int64)
        load, before = np.zeros(width, np.int64), np.zeros(width, np.int64)
        best = -1
        tries = 5 if mixed and width > 1 else 1
        tried = -1
        for attempt in range(tries):
            whole = count * attempt // 4 if width > 1 else 0
            if whole == tried:
                continue
            tried = whole
            latency = _spread(
                samples, whole, width, tokens, reach, capacity, costs, first, degree, load
            )
            if latency < 0:
                continue
            before[:] = load
            if apart:
                load[:] = 0
            if not place_units(units, unit_tokens, ticks, load, encoder_capacity, position):
                continue
            if apart:
                value = int(before.max()) + latency + int(load.max())
            else:
                value = int(load.max()) + latency
            if best < 0 or value < best:
                best = value
                for q in range(count):
                    layout.sample_first[samples[q]] = layout.first[b] + first[q]
                    layout.sample_degree[samples[q]] = degree[q]
                for u in units:
                    layout.unit_rank[u] = layout.first[b] + position[u]
        if best < 0:
            return False
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
    position = np.zeros(unit_tokens.shape[0], np.int64)
    for b in range(layout.first.shape[0]):
        samples = layout.order[layout.offsets[b] : layout.offsets[b + 1]]
        load = np.zeros(layout.width[b], np.int64)
        for i in samples:
            degree = layout.sample_degree[i]
            linear, attention, exchange = reach_ticks(tokens[i], reach[i], degree, costs)
            first = layout.sample_first[i] - layout.first[b]
            if not apart:
                load[first : first + degree] += linear + attention + exchange
        units = _units_of(samples, unit_offsets)
        if not place_units(units, unit_tokens, ticks, load, encoder_capacity, position):
            return b
        for u in units:
            layout.unit_rank[u] = layout.first[b] + position[u]
    return -1
