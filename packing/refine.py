"""Even out a finished layout of waves, by what its microbatches really take.

A wave lasts as long as the slowest encoder part in it and the slowest LLM part. The microbatch that
sets one of them gives a sample to another, or swaps one, where that other stays below what its own
wave lasts anyway. Both are settled anew, so that what counts is what `settle` makes of them, not an
estimate. No change lengthens the step, and each one lowers the part that it is made for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .bins import settle_one
from .moldable import Jobs, Limits
from .ticks import BoolArray, Coefficients, IntArray, Layout, unit_columns

PARTNERS = 4
"""Microbatches that are looked at for one change, those with most room first."""
LOOKED_AT = 64
"""About so many samples of a microbatch are looked at for one change."""
EFFORT = 32
"""What is tried may cost so many times what it costs to settle the whole layout."""
TRIALS = 3
"""Changes that are tried in truth before a part is left as it is."""


class Parts(NamedTuple):
    """What the microbatches and waves of a layout take; column 0 is the encoder, 1 the LLM."""

    own: IntArray
    """(B, 2) of each microbatch."""
    wave: IntArray
    """(waves, 2) of each wave: the longest of its microbatches, or the floor."""
    stuck: BoolArray
    """(waves, 2) whether nothing more was found for it."""


class Change(NamedTuple):
    """Sample `a` of one microbatch goes to another, for `back` (-1: for nothing)."""

    saved: int
    a: int
    to: int
    back: int


@kernel
def _measure(parts: Parts, layout: Layout, v: int, costs: Coefficients) -> None:
    """Take over what wave v lasts."""
    encoder, llm = 0, costs.llm_floor
    for b in range(layout.first.shape[0]):
        if layout.wave[b] == v:
            encoder = max(encoder, parts.own[b, 0])
            llm = max(llm, parts.own[b, 1])
    parts.wave[v, 0] = max(encoder, costs.encoder_floor) if encoder > 0 else 0
    parts.wave[v, 1] = llm


@kernel
def _worst(parts: Parts, layout: Layout, ranks: int, costs: Coefficients) -> tuple[int, int]:
    """The wave and part that stands furthest above the mean of its ranks; -1: none does."""
    waves = parts.wave.shape[0]
    mean = np.zeros((waves, 2), np.int64)
    for b in range(layout.first.shape[0]):
        for p in range(2):
            mean[layout.wave[b], p] += parts.own[b, p] * layout.width[b]
    best, worst, part = 0, -1, 0
    for v in range(waves):
        for p in range(2):
            least = max(mean[v, p] // ranks, costs.llm_floor if p else costs.encoder_floor)
            if not parts.stuck[v, p] and parts.wave[v, p] - least > best:
                best, worst, part = parts.wave[v, p] - least, v, p
    return worst, part


@kernel
def _partners(parts: Parts, layout: Layout, b: int, p: int) -> IntArray:
    """Microbatches with room for part p, those with most in all their ranks first."""
    count = layout.first.shape[0]
    room = np.zeros(count, np.int64)
    for c in range(count):
        if c != b:
            slack = parts.wave[layout.wave[c], p] - parts.own[c, p]
            room[c] = slack * layout.width[c]
    out = np.empty(min(PARTNERS, count), np.int64)
    for k in range(out.shape[0]):
        out[k] = np.argmax(room)
        room[out[k]] = -1
    return out


@kernel
def _find(
    parts: Parts, layout: Layout, head: IntArray, following: IntArray, b: int, p: int,
    partners: IntArray, work: IntArray,
) -> Change:  # fmt: skip
    """The change that, were all work spread evenly over ranks, lowers part p of b the most."""
    own, wave = parts.own, parts.wave
    width, home = layout.width[b], layout.wave[b]
    room = (wave[home, 1 - p] - own[b, 1 - p]) * width
    best = Change(0, -1, -1, -1)
    ours = _sampled(head, following, b)
    for c in partners:
        if c < 0:
            continue
        theirs = _sampled(head, following, c)
        other, there = layout.width[c], layout.wave[c]
        top = min(wave[there, p], own[b, p] - 1) if there == home else wave[there, p]
        slack, spare = (top - own[c, p]) * other, (wave[there, 1 - p] - own[c, 1 - p]) * other
        for a in ours:
            for place in range(-1, theirs.shape[0]):
                back = theirs[place] if place >= 0 else -1
                moved = work[a, p] - (work[back, p] if back >= 0 else 0)
                beside = work[a, 1 - p] - (work[back, 1 - p] if back >= 0 else 0)
                if 0 < moved <= slack and beside <= spare and -beside <= room:
                    saved = moved // width
                    if there == home:
                        saved = min(saved, own[b, p] - own[c, p] - moved // other)
                    if saved > best.saved:
                        best = Change(saved, a, c, back)
    return best


@kernel
def _sampled(head: IntArray, following: IntArray, b: int) -> IntArray:
    """The samples of microbatch b, or evenly chosen ones where they are many."""
    rows = _list(head, following, b)
    step = 1 + rows.shape[0] // LOOKED_AT
    return rows[::step].copy()


@kernel
def _list(head: IntArray, following: IntArray, b: int) -> IntArray:
    count, i = 0, head[b]
    while i >= 0:
        count += 1
        i = following[i]
    out = np.empty(count, np.int64)
    i = head[b]
    for k in range(count):
        out[k] = i
        i = following[i]
    return out


@kernel
def _exchange(head: IntArray, following: IntArray, b: int, a: int, back: int) -> None:
    """Take sample a out of the list of microbatch b, and put `back` (-1: none) in."""
    before, i = -1, head[b]
    while i != a:
        before, i = i, following[i]
    after = following[a]
    if back >= 0:
        following[back] = after
        after = back
    if before < 0:
        head[b] = after
    else:
        following[before] = after


@kernel
def refine(
    layout: Layout, rounds: int, goal: int, jobs: Jobs, unit_offsets: IntArray,
    unit_tokens: IntArray, limits: Limits, costs: Coefficients,
) -> int:  # fmt: skip
    """Even out a layout of waves; changed in place, also the order of its samples.

    Args:
        layout: As `balance.lay_out` gives it, with waves.
        rounds: At most this many changes are tried.
        goal: Stop once all waves together last no longer, in ticks.
        jobs: All samples.
        unit_offsets: (n + 1,) where each sample's encoder units begin.
        unit_tokens: (units,) encoder tokens.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Changes made.
    """
    n, count = jobs.tokens.shape[0], layout.first.shape[0]
    if count < 2:
        return 0
    ticks = unit_columns(unit_tokens, costs)
    head, following = np.full(count, -1, np.int64), np.full(n, -1, np.int64)
    waves = layout.wave[-1] + 1
    parts = Parts(
        np.zeros((count, 2), np.int64),
        np.zeros((waves, 2), np.int64),
        np.zeros((waves, 2), np.bool_),
    )
    work = np.empty((n, 2), np.int64)
    for i in range(n):
        work[i, 0] = jobs.encoder_ticks[i]
        work[i, 1] = jobs.ticks[i, 1] - jobs.encoder_ticks[i]
    for b in range(count):
        for q in range(layout.offsets[b + 1] - 1, layout.offsets[b] - 1, -1):
            following[layout.order[q]] = head[b]
            head[b] = layout.order[q]
        _resettle(
            parts, layout, head, following, b, jobs, unit_offsets, unit_tokens, ticks, limits, costs
        )
    for v in range(waves):
        _measure(parts, layout, v, costs)
    done, trials, effort = 0, 0, 0
    cost = np.zeros(count, np.int64)
    for b in range(count):
        cost[b] = (layout.offsets[b + 1] - layout.offsets[b]) * (layout.width[b] + 8)
    partners = np.empty(0, np.int64)
    for _ in range(rounds):
        if parts.wave.sum() <= goal or effort > EFFORT * cost.sum():
            break
        v, p = _worst(parts, layout, limits.ranks, costs)
        if v < 0:
            break
        b = -1
        for c in range(count):
            if layout.wave[c] == v and (b < 0 or parts.own[c, p] > parts.own[b, p]):
                b = c
        if trials == 0:
            partners = _partners(parts, layout, b, p)
        change = _find(parts, layout, head, following, b, p, partners, work)
        if change.a < 0 or trials == TRIALS:
            parts.stuck[v, p] = True
            trials = 0
            continue
        effort += cost[b] + cost[change.to]
        if _try(
            parts, layout, head, following, b, p, change, jobs, unit_offsets, unit_tokens, ticks,
            limits, costs,
        ):  # fmt: skip
            done += 1
            trials = 0
            _measure(parts, layout, v, costs)
        else:
            trials += 1
            partners[partners == change.to] = -1
    place = 0
    for b in range(count):
        layout.offsets[b] = place
        for i in _list(head, following, b):
            layout.order[place] = i
            place += 1
        chosen = layout.order[layout.offsets[b] : place]
        chosen[:] = chosen[np.argsort(-jobs.tokens[chosen], kind="mergesort")]
    layout.offsets[count] = place
    return done


@kernel
def _resettle(
    parts: Parts, layout: Layout, head: IntArray, following: IntArray, b: int, jobs: Jobs,
    unit_offsets: IntArray, unit_tokens: IntArray, ticks: IntArray, limits: Limits,
    costs: Coefficients,
) -> bool:  # fmt: skip
    _, llm, encoder = settle_one(
        layout, b, _list(head, following, b), jobs.tokens, jobs.reach, unit_offsets, unit_tokens,
        ticks, limits.capacity, limits.encoder_capacity, True, True, costs,
    )  # fmt: skip
    if llm >= 0:
        parts.own[b, 0], parts.own[b, 1] = encoder, llm + costs.fixed
    return bool(llm >= 0)


@kernel
def _try(
    parts: Parts, layout: Layout, head: IntArray, following: IntArray, b: int, p: int,
    change: Change, jobs: Jobs, unit_offsets: IntArray, unit_tokens: IntArray, ticks: IntArray,
    limits: Limits, costs: Coefficients,
) -> bool:  # fmt: skip
    """Make a change, and unmake it unless it lowers part p of b and lengthens no wave."""
    c, a, back = change.to, change.a, change.back
    before = parts.own[b].copy()
    home, there = parts.wave[layout.wave[b]], parts.wave[layout.wave[c]]
    _swap(head, following, b, c, a, back)
    good = _resettle(
        parts, layout, head, following, b, jobs, unit_offsets, unit_tokens, ticks, limits, costs
    )
    good = good and parts.own[b, p] < before[p] and parts.own[b, 1 - p] <= home[1 - p]
    if good:
        good = _resettle(
            parts, layout, head, following, c, jobs, unit_offsets, unit_tokens, ticks, limits, costs
        )
        good = good and parts.own[c, 0] <= there[0] and parts.own[c, 1] <= there[1]
        if layout.wave[b] == layout.wave[c]:
            good = good and parts.own[c, p] < before[p]
    if good:
        return True
    if back >= 0:
        _swap(head, following, b, c, back, a)
    else:
        _swap(head, following, c, b, a, -1)
    for undone in (b, c):
        _resettle(
            parts, layout, head, following, undone, jobs, unit_offsets, unit_tokens, ticks, limits,
            costs,
        )  # fmt: skip
    return False


@kernel
def _swap(head: IntArray, following: IntArray, b: int, c: int, a: int, back: int) -> None:
    """Sample a goes from b to c; `back` goes from c to b, where it is one."""
    if back >= 0:
        _exchange(head, following, c, back, -1)
    _exchange(head, following, b, a, back)
    following[a] = head[c]
    head[c] = a
