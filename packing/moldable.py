"""Decide how many ranks a sample gets.

Here all samples of a microbatch have its width as their degree (`bins.settle` refines that later),
so that a microbatch's time is a sum: `overhead(width)` + the sum of `job_ticks` + `remainder`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import inlined, kernel
from .ticks import Coefficients, FloatArray, IntArray, latency_ticks, reach_ticks, unit_columns

NEVER = 1 << 60
"""Later than any time."""


class Jobs(NamedTuple):
    """Samples as the construction sees them, (n,) int64 each but for `reach`."""

    tokens: IntArray
    """LLM tokens."""
    reach: FloatArray
    """(n,) float64, see `ticks`."""
    encoder_ticks: IntArray
    """Time of all encoder units, on one rank."""
    unit_ticks: IntArray
    """Time of the dearest encoder unit."""
    encoder_tokens: IntArray
    """Encoder tokens of all units."""
    unit_size: IntArray
    """Encoder tokens of the largest unit."""
    units: IntArray
    """Encoder units."""
    shadow: IntArray
    """A second load, which is balanced beside the first one: a machine ends when the larger of
    its two is done. All 0 but where encoder and LLM are waited for apart."""
    ticks: IntArray
    """(n, node + 1) what `job_ticks` gives at each degree inside a node; column 0 is unused."""
    share: IntArray
    """(n, node + 1) what `share_tokens` gives, likewise."""


class Limits(NamedTuple):
    """The cluster and what its ranks hold."""

    ranks: int
    node: int
    """Ranks of a node."""
    grain: int
    """Ranks of half a node (of a node, where that is odd): rings across nodes are made of these."""
    degrees: IntArray
    """The degrees allowed, ascending from 1."""
    largest: int
    """The last of them."""
    pod: int
    """Ranks of a pod, whole nodes: no run of ranks crosses from one to the next."""
    aligned: bool
    """Whether a run of d ranks starts at a multiple of d: inside its node, or, where it is longer
    than a node, in the cluster."""
    capacity: int
    """LLM tokens of a rank in a microbatch."""
    encoder_capacity: int
    """Encoder tokens of a rank in a microbatch."""


@kernel
def describe(
    tokens: IntArray, reach: FloatArray, unit_offsets: IntArray, unit_tokens: IntArray,
    costs: Coefficients,
) -> Jobs:  # fmt: skip
    """Sum up each sample's encoder units, and price each sample at every degree inside a node."""
    n = tokens.shape[0]
    zeros = np.zeros((6, n), np.int64)
    none = np.zeros((n, costs.node + 1), np.int64)
    jobs = Jobs(
        tokens, reach, zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], zeros[5], none,
        none.copy(),
    )  # fmt: skip
    ticks = unit_columns(unit_tokens, costs)
    for i in range(n):
        jobs.units[i] = unit_offsets[i + 1] - unit_offsets[i]
        for u in range(unit_offsets[i], unit_offsets[i + 1]):
            jobs.encoder_ticks[i] += ticks[u]
            jobs.encoder_tokens[i] += unit_tokens[u]
            jobs.unit_ticks[i] = max(jobs.unit_ticks[i], ticks[u])
            jobs.unit_size[i] = max(jobs.unit_size[i], unit_tokens[u])
        for degree in range(1, costs.node + 1):
            jobs.ticks[i, degree] = priced(
                tokens[i], reach[i], jobs.encoder_ticks[i], degree, costs
            )
            jobs.share[i, degree] = shared(tokens[i], degree)
    return jobs


def without_encoder(jobs: Jobs, shadow: IntArray, whole: int, costs: Coefficients) -> Jobs:
    """The same samples with their encoder work as a second load instead of the first one.

    Args:
        jobs: All samples.
        shadow: (n,) the second load.
        whole: Samples of at most this many ticks on one rank are expected to stay whole in wide
            microbatches (`bins.settle`), evenly spread over the ranks.
        costs: The coefficients.
    """
    none = np.zeros_like(jobs.tokens)
    bare = jobs._replace(encoder_ticks=none, unit_ticks=none.copy(), shadow=shadow)
    return _reprice(bare, whole, costs)


@kernel
def _reprice(jobs: Jobs, whole: int, costs: Coefficients) -> Jobs:
    ticks = np.zeros_like(jobs.ticks)
    for i in range(ticks.shape[0]):
        for degree in range(1, ticks.shape[1]):
            ticks[i, degree] = priced(
                jobs.tokens[i], jobs.reach[i], jobs.encoder_ticks[i], degree, costs
            )
            if ticks[i, 1] <= whole:
                ticks[i, degree] = min(ticks[i, degree], (ticks[i, 1] + degree - 1) // degree)
    return Jobs(
        jobs.tokens, jobs.reach, jobs.encoder_ticks, jobs.unit_ticks, jobs.encoder_tokens,
        jobs.unit_size, jobs.units, jobs.shadow, ticks, jobs.share,
    )  # fmt: skip


@kernel
def next_degree(degree: int, limits: Limits) -> int:
    """The least allowed degree above this one; `NEVER` above the largest."""
    place = np.searchsorted(limits.degrees, degree, side="right")
    return int(limits.degrees[place]) if place < limits.degrees.shape[0] else NEVER


@kernel
def may_start(first: int, degree: int, limits: Limits) -> bool:
    """Whether a run of `degree` ranks, which must be allowed, may start at this rank."""
    if degree > limits.node:
        step = degree if limits.aligned else limits.grain
        inside = first % limits.pod + degree <= limits.pod and first + degree <= limits.ranks
        return bool(inside and first % step == 0)
    place = first % limits.node
    return bool(place + degree <= limits.node and not (limits.aligned and place % degree))


@kernel
def widest(first: int, room: int, limits: Limits) -> int:
    """The largest allowed degree whose run may start at rank `first` and has at most `room` ranks.

    `room` may not reach beyond the node of `first`.
    """
    place = np.searchsorted(limits.degrees, room, side="right") - 1
    while place > 0 and limits.aligned and first % limits.node % limits.degrees[place]:
        place -= 1
    return int(limits.degrees[place])


@kernel
def shared(tokens: int, degree: int) -> int:
    """At least the tokens on the fullest rank after the cuts; exact where `degree` divides."""
    if tokens % degree == 0:
        return tokens // degree
    return 2 * ((tokens + 2 * degree - 1) // (2 * degree))


@kernel
def share_tokens(jobs: Jobs, i: int, degree: int) -> int:
    """At least the tokens of sample i on the fullest rank after the cuts."""
    if degree < jobs.share.shape[1]:
        return int(jobs.share[i, degree])
    return shared(jobs.tokens[i], degree)


@kernel
def dealt_tokens(total: int, largest: int, units: int, degree: int) -> int:
    """What no rank exceeds when units are dealt, each to any rank that has room for it.

    With this much room on every rank a unit always finds some: were every rank too full for it,
    they would together hold more than all units do, by tokens or by count.
    """
    by_tokens = (total + largest * (degree - 1) + degree - 1) // degree
    by_count = (units + degree - 1) // degree * largest
    return int(min(by_tokens, by_count))


@kernel
def overhead(degree: int, costs: Coefficients) -> int:
    """Ticks of a microbatch of samples of this degree before any sample's own."""
    return costs.fixed + costs.linear_rank + latency_ticks(degree, costs)


@kernel
def priced(tokens: int, reach: float, encoder_ticks: int, degree: int, costs: Coefficients) -> int:
    """Ticks that a sample adds to each rank of a microbatch of this degree."""
    linear, attention, exchange = reach_ticks(tokens, reach, degree, costs)
    return linear + attention + exchange + int(encoder_ticks + degree - 1) // degree


@kernel
def job_ticks(jobs: Jobs, i: int, degree: int, costs: Coefficients) -> int:
    """Ticks that sample i adds to each rank of a microbatch of this degree."""
    if degree < jobs.ticks.shape[1]:
        return int(jobs.ticks[i, degree])
    return priced(jobs.tokens[i], jobs.reach[i], jobs.encoder_ticks[i], degree, costs)


@kernel
def width_columns(
    widths: IntArray, jobs: Jobs, costs: Coefficients
) -> tuple[IntArray, IntArray, IntArray]:
    """Ticks and token shares of all samples at the given widths, as tables.

    Args:
        widths: (k,) ranks, each 1 or more.
        jobs: All samples, n.
        costs: The coefficients.

    Returns:
        (n, c) `job_ticks`, (n, c) `share_tokens`, and (k,) the column of each width.
    """
    inside = jobs.ticks.shape[1]
    column = widths.copy()
    wide = np.empty(widths.shape[0], np.int64)
    count = 0
    for k in range(widths.shape[0]):
        if widths[k] < inside:
            continue
        place = 0
        while place < count and wide[place] != widths[k]:
            place += 1
        if place == count:
            wide[count] = widths[k]
            count += 1
        column[k] = inside + place
    if count == 0:
        return jobs.ticks, jobs.share, column
    n = jobs.tokens.shape[0]
    ticks, share = np.empty((n, inside + count), np.int64), np.empty((n, inside + count), np.int64)
    ticks[:, :inside], share[:, :inside] = jobs.ticks, jobs.share
    for i in range(n):
        for place in range(count):
            ticks[i, inside + place] = job_ticks(jobs, i, wide[place], costs)
            share[i, inside + place] = share_tokens(jobs, i, wide[place])
    return ticks, share, column


@kernel
def remainder(unit: int, degree: int) -> int:
    """What whole units can add to the slowest rank above the mean."""
    return int(unit * (degree - 1) // degree)


@kernel
def alone(jobs: Jobs, i: int, degree: int, costs: Coefficients) -> int:
    """Ticks of a microbatch of sample i alone; its second load, where that is longer."""
    rest = remainder(jobs.unit_ticks[i], degree)
    ticks = overhead(degree, costs) + job_ticks(jobs, i, degree, costs) + rest
    return max(ticks, int(jobs.shadow[i] // degree))


@inlined
def ends_alone(
    ticks: int, target: int, tokens: int, encoded: int, capacity: int, encoder_capacity: int
) -> bool:
    """Whether one rank is enough, from a sample's own numbers: no call that takes structures."""
    return ticks <= target and tokens <= capacity and encoded <= encoder_capacity


@kernel
def all_fit(jobs: Jobs, degree: int, limits: Limits) -> bool:
    """Whether every sample alone keeps within both capacities at this degree."""
    tokens, encoded, share = jobs.tokens, jobs.encoder_tokens, degree * limits.capacity
    capacity, encoder_capacity = limits.capacity, limits.encoder_capacity
    inside = degree < jobs.share.shape[1]
    for i in range(tokens.shape[0]):
        if tokens[i] > share:
            return False
        held = jobs.share[i, degree] if inside else shared(tokens[i], degree)
        easy = held <= capacity and encoded[i] <= encoder_capacity
        if not easy and not fits(jobs, i, degree, limits):
            return False
    return True


@kernel
def fits(jobs: Jobs, i: int, degree: int, limits: Limits) -> bool:
    """Whether sample i alone keeps within both capacities at this degree."""
    if share_tokens(jobs, i, degree) > limits.capacity:
        return False
    dealt = dealt_tokens(jobs.encoder_tokens[i], jobs.unit_size[i], jobs.units[i], degree)
    return bool(dealt <= limits.encoder_capacity)


@kernel
def least_place(
    jobs: Jobs, i: int, target: int, start: int, limits: Limits, costs: Coefficients
) -> int:
    """Where in `Limits.degrees`, from `start` on, the degree is that `least_degree` looks for.

    -1: none fits. Two targets of which the second is no later, with the first one's place as the
    second one's start, give what a start of 0 gives.
    """
    # Local names: numba counts references to what a call takes out of a structure.
    table, share, degrees = jobs.ticks, jobs.share, limits.degrees
    tokens, reach, encoder = jobs.tokens[i], jobs.reach[i], jobs.encoder_ticks[i]
    encoded, size, units = jobs.encoder_tokens[i], jobs.unit_size[i], jobs.units[i]
    unit, shadow = jobs.unit_ticks[i], jobs.shadow[i]
    capacity, encoder_capacity = limits.capacity, limits.encoder_capacity
    inside = table.shape[1]
    best, best_ticks = -1, NEVER
    for place in range(start, degrees.shape[0]):
        degree = degrees[place]
        held = share[i, degree] if degree < inside else shared(tokens, degree)
        if held > capacity:
            continue
        dealt = encoded  # what one rank gets at most is at most all
        if encoded > encoder_capacity:
            dealt = dealt_tokens(encoded, size, units, degree)
        if dealt > encoder_capacity:
            continue
        if degree < inside:
            ticks = table[i, degree]
        else:
            ticks = priced(tokens, reach, encoder, degree, costs)
        ticks += overhead(degree, costs) + remainder(unit, degree)
        ticks = max(ticks, shadow // degree)
        if ticks <= target:
            return place
        if ticks < best_ticks:
            best, best_ticks = place, ticks
    return best


@kernel
def least_degree(jobs: Jobs, i: int, target: int, limits: Limits, costs: Coefficients) -> int:
    """The least degree that fits and ends by `target`; failing that the fastest; 0: none fits."""
    place = least_place(jobs, i, target, 0, limits, costs)
    return int(limits.degrees[place]) if place >= 0 else 0


@kernel
def first_misfit(jobs: Jobs, limits: Limits) -> int:
    """The first sample that keeps within both capacities at no degree; -1: there is none."""
    tokens, encoded = jobs.tokens, jobs.encoder_tokens
    for i in range(tokens.shape[0]):
        if tokens[i] <= limits.capacity and encoded[i] <= limits.encoder_capacity:
            continue
        place = 0
        while place < limits.degrees.shape[0] and not fits(jobs, i, limits.degrees[place], limits):
            place += 1
        if place == limits.degrees.shape[0]:
            return i
    return -1


@kernel
def least_degrees(jobs: Jobs, target: int, limits: Limits, costs: Coefficients) -> IntArray:
    """(n,) `least_degree` of every sample."""
    out = np.empty(jobs.tokens.shape[0], np.int64)
    for i in range(out.shape[0]):
        out[i] = least_degree(jobs, i, target, limits, costs)
    return out


@kernel
def shared_work(
    jobs: Jobs, order: IntArray, target: int, limits: Limits, costs: Coefficients
) -> int:
    """Rank-ticks when every sample of `order` takes its least degree at `target`."""
    total = 0
    column, tokens, encoded = jobs.ticks[:, 1], jobs.tokens, jobs.encoder_tokens
    base = overhead(1, costs)
    for i in order:
        if ends_alone(
            column[i] + base,
            target,
            tokens[i],
            encoded[i],
            limits.capacity,
            limits.encoder_capacity,
        ):
            total += column[i]
            continue
        d = least_degree(jobs, i, target, limits, costs)
        ticks = job_ticks(jobs, i, d, costs)
        over = max(0, overhead(d, costs) + ticks - target)
        total += d * (ticks + over + latency_ticks(d, costs))
    return total


@kernel
def work_at_degree(jobs: Jobs, degree: int, costs: Coefficients) -> tuple[int, int]:
    """All samples at one degree, without the overhead of microbatches.

    Returns:
        Their least rank-ticks, and the LLM ticks of the longest one on each of its ranks.
    """
    total, longest = 0, 0
    tokens, reach, encoders = jobs.tokens, jobs.reach, jobs.encoder_ticks
    for i in range(tokens.shape[0]):
        linear, attention, exchange = reach_ticks(tokens[i], reach[i], degree, costs)
        ticks = linear + attention + exchange
        total += degree * ticks + encoders[i]
        longest = max(longest, ticks)
    return total, longest
