"""A makespan that no plan can beat, with its proof.

Take any valid plan of makespan at most L. Write f = fixed, h = linear_rank, l(d) = latency of
degree d, c_i(d) = linear + attention + exchange ticks of sample i at degree d on each of its ranks.

**Degrees.** The microbatch of sample i has a largest degree of at least i's own degree d, so it
lasts at least f + h + l(d) + c_i(d). That must be at most `room`: L where ranks meet once a step;
with V waves, L less the encoder parts of all waves and the least LLM part of the other V - 1.
Tokens must fit: ceil(s_i / d) <= capacity. Let d0 be the least degree that does both.

**Work.** d * c_i(d) >= d0 * c_i(d0) - loss for every d >= d0. Before rounding, d * c_i(d) is a
constant (linear), plus attention_pair * s * r + growth * d with r = reach and growth =
attention_pair * s * attention_half, plus an exchange that never falls with d: (d - 1) * max(0,
layers * wire * s - attention_pair * s * (r/d + attention_half)), where wire only rises as ranks
begin to span nodes (wire_in_node <= wire_across is assumed).
Rounding three terms moves d * c_i(d) by at most 1.5 d. So the difference is at least
growth * (d - d0) - 1.5 * (d + d0): for d > d0 at least growth - 1.5 - 3 * d0 where growth >= 1.5,
and at least -1.5 * (largest + d0) otherwise. `loss` makes up for what is below zero.

**Latency.** A microbatch of largest degree D pays l(D) on each of its ranks. On a rank of it the
c_i of its samples sum to at most room - f - h - l(D), and l / (room - f - h - l) rises with l, so
charging sample i the part c_i * l(d) / (room - f - h - l(d)) on each of its d ranks charges no
more than l(D) a rank. The charge times d never falls as d grows past d0, for d * c_i does not (but
for the loss, taken off first).

**Ranks that meet once a step.** A rank that runs m >= 1 microbatches needs m * f plus its work
within L; one that runs none has L >= f to spare. There are at least N = max(ceil(tokens /
capacity), ceil(encoder tokens / encoder_capacity)) pairs of rank and microbatch. So
work + encoder work + f * max(R, N) + h * H <= R * L, with H pairs that hold a sample. Without
encoder units a rank that holds none is idle with L >= f + h to spare: H = max(R, N). With them,
H >= ceil(tokens / capacity), and a pair's LLM work is at most L - f - h, so a rank's is at most
that, and H >= ceil(LLM work / (L - f - h)).

**Waves.** In each wave the LLM part is at least m = max(f + h, llm_floor), since each wave runs
at least one sample, and every rank has f + h in it: paid, or to spare. V >= the least number of
waves that holds all tokens and all encoder tokens, and all conditions only tighten with more waves.
Encoder parts last, together, at least `apart` = max(encoder_floor * the waves that all encoder
tokens need, `whole_units`). So LLM work + R * V * (f + h) <= R * (L - apart), and V * m <= L -
apart.

**A long wave.** Let sample i have degree d. The wave of sample i then has an LLM part of T or more,
where T = f + h + l(d) + c_i(d) is at least what each of its d ranks takes; say it lasts T + t. Of
the other samples' least work, U - w_i in total, these d ranks do at most d * t in that wave. The
other R - d ranks hold at most (R - d) * capacity tokens in it, so they do at most K: what a
knapsack of so many tokens holds, where samples may be cut. The other waves, of which there are at
least V - 1, do the rest: their LLM parts last at least (U - w_i - K - d * t) / R + (V - 1) * (f +
h), and at least (V - 1) * m. Since d <= R, all LLM parts together last least at t = 0, and `apart`
comes on top; the least over all degrees d at which i fits is a bound. Where capacity keeps the
other ranks of a long wave from being filled, this is what is left of it. (Densities are rounded
down to 1 / 1024 tick a token, which changes what the knapsack holds by less than R * capacity /
1024 + 1. And a sample that is on some of the d ranks and on others may, since its chunks are whole
tokens, do on the others what up to four more tokens would do. On the d ranks it then lasts w / D or
more, D being the largest degree, which costs (R - d) / R * w / D, while four tokens of the density
p at which the knapsack is full save 4 * p / R. So the knapsack is given four more tokens for each
sample with w * (R - d) <= 4 * p * D.)

**Whole units.** The encoder parts of all waves last at least as long as what any one rank encodes
in the step, since each lasts as long as its slowest rank. Some rank encodes at least the mean, and
what it encodes is a sum of whole units: where units have at most `SIZES` times, the least such sum
that reaches the mean bounds it. And of the k * R + 1 dearest units some rank encodes k + 1, which
last at least as long as the k + 1 cheapest of these, for every k.

**Search.** Every condition that holds at L holds above it: bisection finds the least L at which
all do. A sample that fits one rank at the first L that is looked at, where nothing holds yet, does
so at all others: only the other samples are looked at again. And once the conditions hold at some
L, no sample's d0 is smaller below it than it is there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .moldable import Jobs, Limits
from .ticks import Coefficients, IntArray, latency_ticks, reach_ticks, unit_columns

SIZES = 3
"""Distinct times of encoder units up to which their sums are counted."""
SUMS = 4096
"""Sums that are looked at, at most."""


class _Step(NamedTuple):
    """What the conditions need to know of all samples together."""

    tokens: int
    encoder: int
    """Encoder ticks."""
    size: int
    """Encoder tokens."""
    unit: int
    """Ticks of the dearest unit."""
    apart: int
    """Least time of the encoder parts of all waves."""
    waves: int
    """Fewest waves."""


@kernel
def _loss(tokens: int, degree: int, limits: Limits, costs: Coefficients) -> int:
    growth = costs.attention_pair * tokens * costs.attention_half
    if growth < 1.5:
        return int(1.5 * (limits.largest + degree)) + 1
    return max(0, int(3.0 * degree + 1.5 - growth) + 1)


@kernel
def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


@kernel
def _work(
    tokens: int, reach: float, degree: int, room: int, limits: Limits, costs: Coefficients
) -> int:
    """Least rank-ticks of a sample's LLM work at this degree; -1: it does not end in `room`."""
    if _ceil(tokens, degree) > limits.capacity:
        return -1
    linear, attention, exchange = reach_ticks(tokens, reach, degree, costs)
    ticks = linear + attention + exchange
    latency = latency_ticks(degree, costs)
    left = room - costs.fixed - costs.linear_rank - latency
    if ticks > left:
        return -1
    work = max(0, degree * ticks - _loss(tokens, degree, limits, costs))
    return work + work * latency // max(1, left)


@kernel
def _first_work(
    tokens: int, reach: float, place: int, room: int, limits: Limits, costs: Coefficients
) -> tuple[int, int]:
    """The first degree from `limits.degrees[place]` on that ends within `room`, and its work.

    Returns:
        Its place in `limits.degrees`, -1 where none does, and the work.
    """
    for k in range(place, limits.degrees.shape[0]):
        work = _work(tokens, reach, limits.degrees[k], room, limits, costs)
        if work >= 0:
            return k, work
    return -1, 0


@kernel
def _llm_work(
    room: int,
    samples: IntArray,
    start: IntArray,
    found: IntArray,
    jobs: Jobs,
    limits: Limits,
    costs: Coefficients,
) -> int:
    """Least rank-ticks of these samples' LLM work within `room`; -1 where a sample cannot.

    `start` is the place of a degree below which none of them can; `found` receives their places.
    """
    total = 0
    for q in range(samples.shape[0]):
        i = samples[q]
        found[q], work = _first_work(jobs.tokens[i], jobs.reach[i], start[q], room, limits, costs)
        if found[q] < 0:
            return -1
        total += work
    return total


@kernel
def _room(lockstep: bool, span: int, step: _Step, costs: Coefficients) -> int:
    """The longest that a microbatch's LLM part may take within a makespan of `span`."""
    if not lockstep:
        return span
    least = max(costs.fixed + costs.linear_rank, costs.llm_floor)
    return span - step.apart - (step.waves - 1) * least


@kernel
def _holds(
    lockstep: bool, span: int, work: int, step: _Step, limits: Limits, costs: Coefficients
) -> bool:
    """Whether the necessary conditions hold at a makespan of `span` with this LLM work."""
    base = costs.fixed + costs.linear_rank
    if lockstep:
        left = span - step.apart
        least = max(base, costs.llm_floor)
        paid = limits.ranks * step.waves * base
        return left >= step.waves * least and work + paid <= limits.ranks * left
    if span < costs.fixed + step.unit:
        return False
    filled = _ceil(step.tokens, limits.capacity)
    pairs = max(limits.ranks, filled, _ceil(step.size, limits.encoder_capacity))
    holding = max(filled, _ceil(work, max(1, span - base)))
    if step.size == 0:
        holding = max(limits.ranks, filled)
    paid = costs.fixed * pairs + costs.linear_rank * holding
    return bool(work + step.encoder + paid <= limits.ranks * span)


@kernel
def _reachable(mean: int, sizes: IntArray) -> int:
    """The least sum of whole sizes, each any number of times, that is at least `mean`."""
    best = _ceil(mean, sizes[0]) * sizes[0]
    if sizes.shape[0] == 1:
        return int(best)
    second = sizes[1]
    third = sizes[2] if sizes.shape[0] > 2 else mean + 1
    for a in range(mean // third + 1):
        for b in range((mean - a * third) // second + 1):
            rest = a * third + b * second
            best = min(best, rest + _ceil(mean - rest, sizes[0]) * sizes[0])
        best = min(best, a * third + _ceil(mean - a * third, second) * second)
    if third <= mean:
        best = min(best, _ceil(mean, third) * third)
    return int(best)


@kernel
def whole_units(ticks: IntArray, ranks: int) -> int:
    """A time that the rank with the most encoder work cannot beat (**Whole units** above).

    Args:
        ticks: (units,) of each encoder unit.
        ranks: Ranks that share them, 1 or more.
    """
    if ticks.shape[0] == 0:
        return 0
    mean = _ceil(ticks.sum(), ranks)
    sizes = np.empty(SIZES, np.int64)
    kinds = 0
    for t in ticks:
        known = t == 0
        for s in range(min(kinds, SIZES)):
            known = known or sizes[s] == t
        if not known:
            if kinds < SIZES:
                sizes[kinds] = t
            kinds += 1
            if kinds > SIZES:
                break
    if kinds == 0:
        return 0
    if kinds <= SIZES:
        own = -np.sort(-sizes[:kinds])
        sums = 1
        for s in range(1, kinds):
            sums *= mean // own[s] + 1
        if sums <= SUMS:
            return max(_reachable(mean, own), int(own[0]))
    dearest = -np.sort(-ticks)
    best = max(mean, int(dearest[0]))
    for k in range(1, (dearest.shape[0] - 1) // ranks + 1):
        best = max(best, int(dearest[k * ranks - k : k * ranks + 1].sum()))
    return best


@kernel
def _sum_up(
    lockstep: bool, jobs: Jobs, unit_tokens: IntArray, limits: Limits, costs: Coefficients
) -> _Step:
    tokens, encoder, size = jobs.tokens.sum(), jobs.encoder_ticks.sum(), jobs.encoder_tokens.sum()
    unit = jobs.unit_ticks.max()
    encoding = _ceil(size, limits.ranks * limits.encoder_capacity)
    waves = max(1, _ceil(tokens, limits.ranks * limits.capacity), encoding)
    apart = costs.encoder_floor * encoding
    if lockstep:
        apart = max(apart, whole_units(unit_columns(unit_tokens, costs), limits.ranks))
    return _Step(tokens, encoder, size, unit, apart, waves)


@kernel
def lower_bound(
    lockstep: bool, jobs: Jobs, unit_tokens: IntArray, limits: Limits, costs: Coefficients
) -> int:
    """The least makespan at which the necessary conditions of the module's text hold.

    Args:
        lockstep: Whether ranks meet in waves.
        jobs: All samples; each must fit at some degree.
        unit_tokens: (units,) encoder tokens of all encoder units.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Ticks; 0 without samples.
    """
    n = jobs.tokens.shape[0]
    if n == 0:
        return 0
    step = _sum_up(lockstep, jobs, unit_tokens, limits, costs)
    least, own = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        least[i], own[i] = _first_work(jobs.tokens[i], jobs.reach[i], 0, 1 << 50, limits, costs)
    free = own.sum()
    low = max(0, free // limits.ranks + (step.apart if lockstep else 0))
    while low > 0 and _holds(lockstep, low, free, step, limits, costs):
        low -= low // 8 + 1
    room = _room(lockstep, low, step, costs)
    rest, start = np.empty(n, np.int64), np.empty(n, np.int64)
    others, still = 0, 0
    for i in range(n):
        work = _work(jobs.tokens[i], jobs.reach[i], 1, room, limits, costs)
        if work >= 0:
            still += work
        else:
            rest[others], start[others] = i, least[i]
            others += 1
    found = _bisect(lockstep, low, still, rest[:others], start[:others], step, jobs, limits, costs)
    return max(found, long_wave(own, step, jobs, limits, costs)) if lockstep else found


@kernel
def long_wave(own: IntArray, step: _Step, jobs: Jobs, limits: Limits, costs: Coefficients) -> int:
    """What all waves last because of the one that runs the dearest sample (**A long wave** above).

    Args:
        own: (n,) least rank-ticks of each sample's LLM work.
        step: Of all samples.
        jobs: All samples.
        limits: Cluster and capacities.
        costs: The coefficients.
    """
    base, i = costs.fixed + costs.linear_rank, np.argmax(own)
    waves, ranks, capacity = step.waves - 1, limits.ranks, limits.capacity
    rest = own.sum() - own[i]
    dense = np.argsort(-(own * 1024 // jobs.tokens), kind="mergesort")
    dense = dense[dense != i]
    tokens, work = np.cumsum(jobs.tokens[dense]), np.cumsum(own[dense])
    least = 1 << 60
    for degree in limits.degrees:
        if _ceil(jobs.tokens[i], degree) > capacity:
            continue
        linear, attention, exchange = reach_ticks(jobs.tokens[i], jobs.reach[i], degree, costs)
        longest = base + latency_ticks(degree, costs) + linear + attention + exchange
        room, held = (ranks - degree) * capacity, rest
        k = np.searchsorted(tokens, room, side="right")
        if k < dense.shape[0] and degree < ranks:
            most = 4 * limits.largest * own[dense[k]] // (jobs.tokens[dense[k]] * (ranks - degree))
            room += 4 * (own <= most).sum()
            k = np.searchsorted(tokens, room, side="right")
        if k < dense.shape[0]:
            before, done = (tokens[k - 1], work[k - 1]) if k > 0 else (0, 0)
            held = done + _ceil(own[dense[k]] * (room - before), jobs.tokens[dense[k]])
            held += ranks * capacity // 1024 + 1
        after = max(0, rest - held) // ranks + waves * base
        least = min(least, longest + max(after, waves * max(base, costs.llm_floor)))
    return int(step.apart + least)


@kernel
def _bisect(
    lockstep: bool, low: int, still: int, rest: IntArray, start: IntArray, step: _Step, jobs: Jobs,
    limits: Limits, costs: Coefficients,
) -> int:  # fmt: skip
    """The least makespan above `low` that holds; `still` is the work of samples not in `rest`."""
    found = np.empty(rest.shape[0], np.int64)
    stride, high = low // 16 + 1024, 0
    while high == 0 or high - low > 1:
        span = (low + high) // 2 if high > 0 else low + stride
        room = _room(lockstep, span, step, costs)
        work = _llm_work(room, rest, start, found, jobs, limits, costs)
        if work >= 0 and _holds(lockstep, span, still + work, step, limits, costs):
            high = span
            start[:] = found
        else:
            low = span
            stride *= 2
    return high
