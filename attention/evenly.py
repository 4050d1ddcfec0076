"""Cut sequences so that the attention work of the positions is even, whatever the masks.

Zigzag is even under causal and full masks. Under windows, chunks, prefixes, spans and trees it can
be off by a tenth to a third. Here the other sequences of a pack are cut finer, no more than needed,
and chunks dealt by the work of their queries. A position gets exactly as many tokens of a sequence
as zigzag would give it: counts of tokens, and so capacities, hold for both.

Imports numpy alone, like `shards`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .bands import Bands, IntArray, area_all, trim_all
from .shards import Spans, cut, cut_tokens, cuts, owners, spans_of

FloatArray = NDArray[np.float64]

UNEVEN = 0.02
"""Content where no position has more than this above its share of the work."""

FINEST = 32
"""Tokens below which no chunk is made: smaller ones cost kernels more than they even out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """A sequence that zigzag need not share evenly."""

    number: int
    tokens: int
    positions: IntArray
    """Those that share it, in order."""
    masks: tuple[Bands, ...]
    """One for each mask class."""
    area: IntArray
    """(classes,) its visible pairs."""

    def deal(self, per: int) -> tuple[IntArray, IntArray]:
        """The place of each chunk, and the (places, classes) work of each place.

        Args:
            per: Chunks for each place, fewer where the sequence is short; 0 is zigzag.
        """
        places = len(self.positions)
        while per and self.tokens < FINEST * places * per:
            per //= 2
        zigzag = owners(places)
        chunks = chunk_work(self.masks, cuts(self.tokens, places * per if per else len(zigzag)))
        owner = _heaviest_first(chunks, places) if per else zigzag
        work = np.zeros((places, len(self.masks)), np.int64)
        np.add.at(work, owner, chunks)
        return owner, work


def cut_evenly(
    lengths: Sequence[int],
    *,
    degree: int,
    masks: Sequence[Sequence[Bands]],
    positions: Sequence[Sequence[int]] | None = None,
) -> Spans:
    """Share the sequences of a pack out over the positions of a ring, evenly.

    Sequences that zigzag cannot be trusted with are tried in zigzag chunks and then in 2, 4, 8 and
    16 chunks for each place, dealt heaviest first to the place that would have least. Of each
    sequence, the place that got most goes to the position that has had least. The first cut that
    leaves no position more than `UNEVEN` above its share of the pack is taken, or else the best.

    Args:
        lengths: Tokens of each sequence, 1 or more, in pack order.
        degree: Positions of the ring, 1 or more.
        masks: For each mask class of the model, the mask of each sequence. All classes share one
            cut, since a token is on one rank in all layers; the worst class counts.
        positions: For each sequence, the positions that share it, in order; None is all of them.

    Raises:
        ValueError: A length, degree or list of positions is impossible.
    """
    spans = cut(lengths, degree=degree, positions=positions)
    everyone = [range(degree)] * len(lengths)
    shared = [np.array(p, np.int64) for p in (everyone if positions is None else positions)]
    area = np.stack([_areas(mask) for mask in masks], axis=1)
    odd = [
        _Sequence(
            number=i,
            tokens=length,
            positions=shared[i],
            masks=tuple(mask[i] for mask in masks),
            area=area[i],
        )
        for i, length in enumerate(lengths)
        if len(shared[i]) > 1 and not all(_even_under_zigzag(length, mask[i]) for mask in masks)
    ]
    if not odd:
        return spans
    ideal = np.zeros((degree, len(masks)))
    for where, pairs in zip(shared, area, strict=True):
        ideal[where] += pairs / len(where)
    owner = _search(sorted(odd, key=lambda one: -int(one.area.sum())), ideal)
    table = np.stack([spans.position, spans.sequence, spans.start, spans.stop])
    parts = [table[:, ~np.isin(table[1], list(owner))]]
    for one in odd:
        mine = owner[one.number]
        at = _exact_cuts(mine, cut_tokens(one.tokens, len(one.positions)))
        number = np.full(len(mine), one.number)
        parts.append(np.stack([one.positions[mine], number, at[:-1], at[1:]]))
    return spans_of(np.concatenate(parts, axis=1), degree)


def _search(odd: Sequence[_Sequence], ideal: FloatArray) -> dict[int, IntArray]:
    """By number of the sequence, the place of each of its chunks.

    Args:
        odd: Those to deal, heaviest first.
        ideal: (degree, classes), the work of each position if every sequence were shared evenly.
    """
    full = np.maximum(ideal.max(0), 1.0)
    others = ideal.copy()
    for one in odd:
        others[one.positions] -= one.area / len(one.positions)
    best, found = math.inf, {}
    for per in (0, 2, 4, 8, 16):
        load, tried = others.copy(), {}
        for one in odd:
            owner, work = one.deal(per)
            most = np.argsort(-(work / full).max(1), kind="stable")
            least = np.argsort((load[one.positions] / full).max(1), kind="stable")
            place = np.empty_like(most)
            place[most] = least
            load[one.positions[place]] += work
            tried[one.number] = place[owner]
        excess = float((load.max(0) / full).max()) - 1
        if excess < best:
            best, found = excess, tried
        if best <= UNEVEN:
            break
    return found


def _heaviest_first(work: IntArray, places: int) -> IntArray:
    """Deal (chunks, classes) work, equally many chunks to each place; the worst class counts."""
    share = (work << 20) // np.maximum(work.sum(0), 1)
    load = np.zeros((places, work.shape[1]), np.int64)
    room = np.full(places, len(work) // places)
    owner = np.empty(len(work), np.int64)
    for chunk in np.argsort(-share.sum(1), kind="stable").tolist():
        after = np.where(room > 0, (load + share[chunk]).max(1), np.iinfo(np.int64).max)
        place = int(after.argmin())
        owner[chunk] = place
        load[place] += share[chunk]
        room[place] -= 1
    return owner


def _exact_cuts(owner: IntArray, tokens: IntArray) -> IntArray:
    """Where even chunks are cut such that each place has its tokens exactly."""
    sizes = np.empty(len(owner), np.int64)
    for place, count in enumerate(tokens.tolist()):
        mine = owner == place
        sizes[mine] = np.diff(cuts(count, int(mine.sum())))
    return np.concatenate([[0], np.cumsum(sizes)])


def chunk_work(masks: Sequence[Bands], at: IntArray) -> IntArray:
    """The pairs that the queries of each chunk of a sequence see.

    Args:
        masks: Masks of the sequence.
        at: (chunks + 1,) int64, where it is cut.

    Returns:
        (chunks, masks) int64.
    """
    found = np.zeros((len(at) - 1, len(masks)), np.int64)
    for column, mask in enumerate(masks):
        table = np.repeat(np.array(mask, np.int64).reshape(1, -1, 6), len(at) - 1, axis=0)
        table[:, :, 0] = np.maximum(table[:, :, 0], at[:-1, None])
        table[:, :, 1] = np.minimum(table[:, :, 1], at[1:, None])
        trimmed, kept = trim_all(table.reshape(-1, 6))
        np.add.at(found[:, column], kept // max(len(mask), 1), area_all(trimmed))
    return found


def _areas(masks: Sequence[Bands]) -> IntArray:
    """(sequences,) int64, the visible pairs of each sequence's mask."""
    table = np.array([band for mask in masks for band in mask], np.int64).reshape(-1, 6)
    sequence = np.repeat(np.arange(len(masks)), [len(mask) for mask in masks])
    trimmed, kept = trim_all(table)
    area = np.zeros(len(masks), np.int64)
    np.add.at(area, sequence[kept], area_all(trimmed))
    return area


def _even_under_zigzag(length: int, mask: Bands) -> bool:
    """Whether it is causal or full, told without counting."""
    if len(mask) != 1:
        return not mask
    q0, q1, k0, k1, lo, hi = mask[0]
    whole = (q0, q1, k0, k1) == (0, length, 0, length)
    return whole and hi >= length - 1 and (lo == 0 or lo <= 1 - length)
