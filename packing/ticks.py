"""Turn work into ticks: the one place where time becomes integers.

A tick is one microsecond. Each term of a sample (linear, attention, exchange, and each encoder
unit) is rounded half up once, here; all that follows is sums and maxima of int64, which come out
the same on every machine. Only + - * / and floor touch floating point, so these do as well.

A sample of s tokens and reach r that d ranks share costs, on each of them (`reach_ticks`):

    linear     linear_token * s/d
    attention  attention_pair * s * (r/d + attention_half)
    exchange   exchange_layers * (d - 1) * max(0, wire * s/d - attention / (exchange_layers * d))

The *reach* says how much a sample's tokens see: twice the pairs of query and key that the mask
lets see each other, over the tokens, less one. A causal sample's is its tokens (`sample_ticks`),
any other's is less. Keys of the whole sample are exchanged, whatever part of them a rank needs.

and a microbatch takes, on each of its ranks (`microbatch_ticks`), the sum over the samples and
encoder units that it holds, linear_rank once if it holds any sample, the latency of its largest
degree, and `fixed`. The slowest rank is the microbatch's time.
"""

from __future__ import annotations

from math import floor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._jit import kernel

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

LINEAR, ATTENTION, EXCHANGE, ENCODER = 0, 1, 2, 3
"""Columns of `Loads.parts`."""


class Coefficients(NamedTuple):
    """What work costs, in ticks. All are 0 or more; attention and exchange are per rank."""

    linear_token: float
    """Of one token's linear layers."""
    linear_rank: int
    """Once per microbatch on each rank that holds a sample."""
    attention_pair: float
    """Of one token times one of reach: of a squared token, where half of the pairs are seen."""
    attention_half: float
    """Tokens on a rank at which attention runs at half of its rate."""
    exchange_layers: int
    """Layers that exchange keys and values, 1 or more."""
    wire_in_node: float
    """Of moving one token's keys and values, forward and backward, one hop and layer."""
    wire_across: float
    """The same where the ranks span nodes."""
    hop: float
    """Latency of one hop through all layers."""
    encoder_token: float
    """Of one encoder token."""
    encoder_square: float
    """Of one squared encoder token, inside one encoder unit."""
    fixed: int
    """Once per microbatch, and of a dummy."""
    llm_floor: int
    """Least time of a wave's LLM part."""
    encoder_floor: int
    """Least time of a wave's encoder part, if the wave encodes at all."""
    node: int
    """Ranks of a node: a degree above it pays `wire_across`."""


class Layout(NamedTuple):
    """A plan as arrays: B microbatches in global order, n samples, all ranks absolute."""

    first: IntArray
    """(B,) first rank of each microbatch."""
    width: IntArray
    """(B,) ranks of each microbatch, consecutive."""
    wave: IntArray
    """(B,) wave of each microbatch; all 0 where there are no waves."""
    offsets: IntArray
    """(B + 1,) microbatch b runs `order[offsets[b]:offsets[b + 1]]`."""
    order: IntArray
    """(n,) samples, in packing order."""
    sample_first: IntArray
    """(n,) first rank of each sample."""
    sample_degree: IntArray
    """(n,) ranks of each sample, consecutive."""
    unit_rank: IntArray
    """(units,) the rank that encodes each encoder unit."""


class Loads(NamedTuple):
    """What `microbatch_ticks` finds; S is the sum of all widths, microbatch after microbatch."""

    ticks: IntArray
    """(B,) time of each microbatch."""
    slowest: IntArray
    """(B,) position of its slowest rank, the first of equals."""
    parts: IntArray
    """(S, 4) linear, attention, exchange with latency, encoder ticks of each rank."""
    tokens: IntArray
    """(S,) LLM tokens after the cuts."""
    encoder_tokens: IntArray
    """(S,) encoder tokens."""
    starts: IntArray
    """(B,) where each microbatch's rows begin."""


@kernel
def sample_ticks(tokens: int, degree: int, costs: Coefficients) -> tuple[int, int, int]:
    """As `reach_ticks`, of a causal sample."""
    return reach_ticks(tokens, float(tokens), degree, costs)


@kernel
def reach_ticks(
    tokens: int, reach: float, degree: int, costs: Coefficients
) -> tuple[int, int, int]:
    """Linear, attention, exchange ticks of a sample on each of the `degree` ranks that share it."""
    share = tokens / degree
    linear = floor(costs.linear_token * share + 0.5)
    work = costs.attention_pair * tokens * (reach / degree + costs.attention_half)
    attention = floor(work + 0.5)
    exchange = 0
    if degree > 1:
        wire = costs.wire_in_node if degree <= costs.node else costs.wire_across
        exposed = wire * share - work / (costs.exchange_layers * degree)
        if exposed > 0.0:
            exchange = floor(costs.exchange_layers * (degree - 1) * exposed + 0.5)
    return linear, attention, exchange


@kernel
def latency_ticks(degree: int, costs: Coefficients) -> int:
    """Hop latency of a microbatch whose largest degree is `degree`."""
    return floor(costs.hop * (degree - 1) + 0.5)


@kernel
def unit_ticks(tokens: int, costs: Coefficients) -> int:
    """Ticks of encoding one encoder unit."""
    size = float(tokens)
    return floor(costs.encoder_token * size + costs.encoder_square * size * size + 0.5)


@kernel
def cut_tokens(tokens: int, degree: int, position: int) -> int:
    """Tokens of a sample on one position: zigzag chunks cut at floor(i * tokens / (2 * degree))."""
    pieces = 2 * degree
    mirror = pieces - 1 - position
    near = (position + 1) * tokens // pieces - position * tokens // pieces
    return near + (mirror + 1) * tokens // pieces - mirror * tokens // pieces


@kernel
def add_cuts(held: IntArray, start: int, tokens: int, degree: int) -> None:
    """Add `cut_tokens` of every position to `held[start : start + degree]`, by one division."""
    pieces = 2 * degree
    size = tokens // pieces
    rest, carry = tokens - size * pieces, 0
    for piece in range(pieces):
        carry += rest
        more = carry >= pieces
        if more:
            carry -= pieces
        position = piece if piece < degree else pieces - 1 - piece
        held[start + position] += size + more


@kernel
def _columns(tokens: IntArray, reach: FloatArray, degree: int, costs: Coefficients) -> IntArray:
    out = np.empty((tokens.shape[0], 3), np.int64)
    for i in range(tokens.shape[0]):
        out[i, 0], out[i, 1], out[i, 2] = reach_ticks(tokens[i], reach[i], degree, costs)
    return out


def sample_columns(
    tokens: IntArray, degree: int, costs: Coefficients, *, reach: FloatArray | None = None
) -> IntArray:
    """Ticks of many samples at one degree.

    Args:
        tokens: (n,) int64, each 1 or more.
        degree: Ranks that share each sample, 1 or more.
        costs: The coefficients.
        reach: (n,) float64; None where all samples are causal.

    Returns:
        (n, 3) int64: linear, attention and exchange, on each of the ranks.
    """
    if degree < 1:
        raise ValueError(f"degree is {degree}; expected 1 or more")
    given = tokens if reach is None else reach
    return _columns(np.array(tokens, np.int64), np.array(given, np.float64), degree, costs)


@kernel
def unit_columns(unit_tokens: IntArray, costs: Coefficients) -> IntArray:
    """(units,) ticks of encoding each encoder unit."""
    out = np.empty(unit_tokens.shape[0], np.int64)
    for u in range(unit_tokens.shape[0]):
        out[u] = unit_ticks(unit_tokens[u], costs)
    return out


@kernel
def microbatch_ticks(
    layout: Layout,
    tokens: IntArray,
    reach: FloatArray,
    unit_offsets: IntArray,
    unit_tokens: IntArray,
    costs: Coefficients,
) -> Loads:
    """Price every microbatch of a layout: the function that all who speak of time share.

    Args:
        layout: Microbatches, samples and encoder units on ranks.
        tokens: (n,) LLM tokens of each sample.
        reach: (n,) their reach.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens of each unit.
        costs: The coefficients.
    """
    count = layout.first.shape[0]
    starts = np.empty(count, np.int64)
    total = 0
    for b in range(count):
        starts[b] = total
        total += layout.width[b]
    parts = np.zeros((total, 4), np.int64)
    held = np.zeros(total, np.int64)
    encoded = np.zeros(total, np.int64)
    busy = np.zeros(total, np.bool_)
    ticks = np.zeros(count, np.int64)
    slowest = np.zeros(count, np.int64)
    for b in range(count):
        base = starts[b] - layout.first[b]
        largest = 1
        for q in range(layout.offsets[b], layout.offsets[b + 1]):
            i = layout.order[q]
            degree = layout.sample_degree[i]
            largest = max(largest, degree)
            linear, attention, exchange = reach_ticks(tokens[i], reach[i], degree, costs)
            start = base + layout.sample_first[i]
            add_cuts(held, start, tokens[i], degree)
            for row in range(start, start + degree):
                parts[row, 0] += linear
                parts[row, 1] += attention
                parts[row, 2] += exchange
                busy[row] = True
            for u in range(unit_offsets[i], unit_offsets[i + 1]):
                row = base + layout.unit_rank[u]
                parts[row, 3] += unit_ticks(unit_tokens[u], costs)
                encoded[row] += unit_tokens[u]
        latency = latency_ticks(largest, costs)
        for row in range(starts[b], starts[b] + layout.width[b]):
            parts[row, 2] += latency
            if busy[row]:
                parts[row, 0] += costs.linear_rank
            whole = parts[row, 0] + parts[row, 1] + parts[row, 2] + parts[row, 3] + costs.fixed
            if whole > ticks[b]:
                ticks[b] = whole
                slowest[b] = row - starts[b]
    return Loads(ticks, slowest, parts, held, encoded, starts)


@kernel
def queue_starts(layout: Layout, ticks: IntArray, ranks: int) -> tuple[IntArray, int]:
    """Start of each microbatch, and the makespan, where ranks meet once a step.

    In global order, each microbatch starts when the last of its ranks is free.
    """
    free = np.zeros(ranks, np.int64)
    start = np.zeros(layout.first.shape[0], np.int64)
    makespan = 0
    for b in range(layout.first.shape[0]):
        begin = layout.first[b]
        end = begin + layout.width[b]
        for rank in range(begin, end):
            start[b] = max(start[b], free[rank])
        for rank in range(begin, end):
            free[rank] = start[b] + ticks[b]
        makespan = max(makespan, start[b] + ticks[b])
    return start, makespan


@kernel
def wave_parts(layout: Layout, loads: Loads, waves: int, costs: Coefficients) -> IntArray:
    """(waves, 2) encoder and LLM ticks of each wave, where ranks meet in every module call.

    The encoder part is the slowest rank's, at least its traffic, and 0 where no rank encodes; so
    is the LLM part, with latency and `fixed`, which a dummy costs too.
    """
    out = np.zeros((waves, 2), np.int64)
    for v in range(waves):
        out[v, 1] = max(costs.fixed, costs.llm_floor)
    for b in range(layout.first.shape[0]):
        v = layout.wave[b]
        for row in range(loads.starts[b], loads.starts[b] + layout.width[b]):
            parts = loads.parts[row]
            out[v, 0] = max(out[v, 0], parts[3])
            out[v, 1] = max(out[v, 1], parts[0] + parts[1] + parts[2] + costs.fixed)
            if loads.encoder_tokens[row] > 0:
                out[v, 0] = max(out[v, 0], costs.encoder_floor)
    return out
