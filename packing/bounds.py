"""A makespan that no plan can beat, with its proof.

Take any valid plan of makespan at most L. Write f = fixed, h = linear_rank, l(d) = latency of
degree d, c_i(d) = linear + attention + exchange ticks of sample i at degree d on each of its ranks.

**Degrees.** The microbatch of sample i has a largest degree of at least i's own degree d, so it
lasts at least f + h + l(d) + c_i(d). That must be at most `room`: L where ranks meet once a step;
with V waves, L less the encoder parts of all waves and the least LLM part of the other V - 1.
Tokens must fit: ceil(s_i / d) <= capacity. Let d0 be the least degree that does both.

**Work.** d * c_i(d) >= d0 * c_i(d0) - loss for every d >= d0. Before rounding, d * c_i(d) is a
constant (linear), plus attention_pair * s^2 + growth * d with growth = attention_pair * s *
attention_half, plus an exchange that never falls with d: (d - 1) * max(0, layers * wire * s -
attention_pair * s * (s/d + attention_half)), where wire only rises as ranks begin to span nodes
(wire_in_node <= wire_across is assumed).
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
Encoder parts last, together, at least `apart` = max(encoder work / R, encoder_floor * the waves
that all encoder tokens need, the dearest unit). So LLM work + R * V * (f + h) <= R * (L - apart),
and V * m <= L - apart.

Every condition that holds at L holds above it: bisection finds the least L at which all do.
"""

from __future__ import annotations

from ._jit import kernel
from .moldable import Jobs, Limits
from .ticks import Coefficients, latency_ticks, sample_ticks


@kernel
def _loss(tokens: int, degree: int, limits: Limits, costs: Coefficients) -> int:
    growth = costs.attention_pair * tokens * costs.attention_half
    if growth < 1.5:
        return int(1.5 * (limits.largest + degree)) + 1
    return max(0, int(3.0 * degree + 1.5 - growth) + 1)


@kernel
def _llm_work(room: int, jobs: Jobs, limits: Limits, costs: Coefficients) -> int:
    """Least rank-ticks of all samples' LLM work within `room`; -1 where a sample cannot."""
    base = costs.fixed + costs.linear_rank
    total = 0
    for i in range(jobs.tokens.shape[0]):
        tokens = jobs.tokens[i]
        found = False
        for degree in limits.degrees:
            if (tokens + degree - 1) // degree <= limits.capacity:
                linear, attention, exchange = sample_ticks(tokens, degree, costs)
                ticks = linear + attention + exchange
                latency = latency_ticks(degree, costs)
                if base + latency + ticks <= room:
                    found = True
                    break
        if not found:
            return -1
        work = max(0, degree * ticks - _loss(tokens, degree, limits, costs))
        total += work
        if latency > 0:
            total += work * latency // max(1, room - base - latency)
    return total


@kernel
def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


@kernel
def _step_holds(
    span: int, tokens: int, encoder: int, size: int, unit: int, jobs: Jobs, limits: Limits,
    costs: Coefficients,
) -> bool:  # fmt: skip
    """Whether the necessary conditions hold at a makespan of `span`, ranks meeting once."""
    base = costs.fixed + costs.linear_rank
    if span < costs.fixed + unit:
        return False
    work = _llm_work(span, jobs, limits, costs)
    if work < 0:
        return False
    filled = _ceil(tokens, limits.capacity)
    pairs = max(limits.ranks, filled, _ceil(size, limits.encoder_capacity))
    holding = max(filled, _ceil(work, max(1, span - base)))
    if size == 0:
        holding = max(limits.ranks, filled)
    paid = costs.fixed * pairs + costs.linear_rank * holding
    return bool(work + encoder + paid <= limits.ranks * span)


@kernel
def _waves_hold(
    span: int, tokens: int, encoder: int, size: int, unit: int, jobs: Jobs, limits: Limits,
    costs: Coefficients,
) -> bool:  # fmt: skip
    """The same with waves; `span` as a whole, encoder parts included."""
    base = costs.fixed + costs.linear_rank
    encoding = _ceil(size, limits.ranks * limits.encoder_capacity)
    waves = max(1, _ceil(tokens, limits.ranks * limits.capacity), encoding)
    apart = max(_ceil(encoder, limits.ranks), costs.encoder_floor * encoding, unit)
    least = max(base, costs.llm_floor)
    span -= apart
    if span < waves * least:
        return False
    work = _llm_work(span - (waves - 1) * least, jobs, limits, costs)
    return bool(work >= 0 and work + limits.ranks * waves * base <= limits.ranks * span)


@kernel
def lower_bound(lockstep: bool, jobs: Jobs, limits: Limits, costs: Coefficients) -> int:
    """The least makespan at which the necessary conditions of the module's text hold.

    Args:
        lockstep: Whether ranks meet in waves.
        jobs: All samples; each must fit at some degree.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Ticks; 0 without samples.
    """
    if jobs.tokens.shape[0] == 0:
        return 0
    tokens, encoder, size, unit = 0, 0, 0, 0
    for i in range(jobs.tokens.shape[0]):
        tokens += jobs.tokens[i]
        encoder += jobs.encoder_ticks[i]
        size += jobs.encoder_tokens[i]
        unit = max(unit, jobs.unit_ticks[i])
    low, high = 0, 1 << 16
    while True:
        if lockstep:
            holds = _waves_hold(high, tokens, encoder, size, unit, jobs, limits, costs)
        else:
            holds = _step_holds(high, tokens, encoder, size, unit, jobs, limits, costs)
        if holds:
            break
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if lockstep:
            holds = _waves_hold(middle, tokens, encoder, size, unit, jobs, limits, costs)
        else:
            holds = _step_holds(middle, tokens, encoder, size, unit, jobs, limits, costs)
        if holds:
            high = middle
        else:
            low = middle
    return high
