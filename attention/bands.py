"""Describe a mask as disjoint bands: rectangles of one sequence, each cut by two diagonals.

A query q in q0..q1 of a band sees a key k in k0..k1 when lo <= q - k <= hi (ends q1 and k1
exclusive). Causal, full, sliding-window, chunked and prefix masks, spans whose tokens see each
other both ways, and trees (`trees`) are unions of bands. Cutting a sequence into chunks cuts bands
into smaller bands, and a trimmed band is one (left, right) window of a stock flash kernel.

Imports numpy alone: the planner prices attention by `area`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

UNLIMITED = 1 << 40
"""Stands for infinity in a band's `lo` and `hi`, so that they stay integers."""


class Band(NamedTuple):
    """Query q in q0..q1 of a sequence sees key k in k0..k1 if lo <= q - k <= hi; ends exclusive."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int


Bands = tuple[Band, ...]
"""The mask of one sequence: bands that share no (query, key) pair."""


def causal(length: int) -> Bands:
    """Each token sees itself and all before it.

    Args:
        length: Tokens of the sequence, 1 or more.
    """
    return (Band(0, _positive("length", length), 0, length, 0, UNLIMITED),)


def full(length: int) -> Bands:
    """Each token sees all tokens of the sequence.

    Args:
        length: Tokens of the sequence, 1 or more.
    """
    return (Band(0, _positive("length", length), 0, length, -UNLIMITED, UNLIMITED),)


def window(length: int, *, width: int) -> Bands:
    """Each token sees itself and the width - 1 tokens before it (the convention of transformers).

    Args:
        length: Tokens of the sequence, 1 or more.
        width: Tokens in sight, 1 or more.
    """
    return (Band(0, _positive("length", length), 0, length, 0, _positive("width", width) - 1),)


def chunked(length: int, *, width: int) -> Bands:
    """Each token sees itself and those before it in its own chunk (Llama 4).

    Args:
        length: Tokens of the sequence, 1 or more.
        width: Tokens of a chunk, 1 or more; chunks count from the start of the sequence.
    """
    starts = range(0, _positive("length", length), _positive("width", width))
    cuts = [(start, min(start + width, length)) for start in starts]
    return tuple(Band(start, stop, start, stop, 0, UNLIMITED) for start, stop in cuts)


def prefix(length: int, *, tokens: int) -> Bands:
    """The first `tokens` tokens see each other both ways, the rest is causal.

    Args:
        length: Tokens of the sequence, 1 or more.
        tokens: Tokens of the prefix, 0 to `length`.
    """
    return spans(length, [(0, tokens)])


def spans(
    length: int,
    both_ways: Sequence[tuple[int, int]],
    *,
    width: int | None = None,
    beyond_width: bool = False,
) -> Bands:
    """A causal or sliding-window mask with spans, such as images, whose tokens see each other.

    Args:
        length: Tokens of the sequence, 1 or more.
        both_ways: (start, stop) of each span, stop exclusive; disjoint, inside the sequence.
        width: Tokens in sight of a sliding window; None is causal.
        beyond_width: Whether a span's tokens also see those of their own span that the window has
            left behind; False keeps the window, as Gemma 3 does.

    Raises:
        ValueError: A span is outside the sequence or overlaps another.
    """
    ends = 0
    for start, stop in sorted(both_ways):
        if not ends <= start <= stop <= length:
            raise ValueError(
                f"span ({start}, {stop}) overlaps another or leaves a sequence of {length} tokens; "
                "expected disjoint spans inside it: merge or cut the spans"
            )
        ends = stop
    bands = list(causal(length) if width is None else window(length, width=width))
    wide = [(a, b) for a, b in both_ways if b - a > 1]
    bands += [Band(a, b, a, b, -UNLIMITED, -1) for a, b in wide]
    if width is not None and beyond_width:
        bands += [Band(a, b, a, b, width, UNLIMITED) for a, b in wide if b - a > width]
    return tuple(bands)


def trim(band: Band) -> Band | None:
    """Drop the rows and columns that see nothing; None if nothing is left.

    Afterwards every row and every column holds at least one visible pair, so no kernel meets an
    empty row.
    """
    kept, _ = trim_all(np.array([band], dtype=np.int64))
    return Band(*kept[0].tolist()) if len(kept) else None


def area(band: Band) -> int:
    """Visible pairs of any band, trimmed or not: the unit of attention work.

    >>> area(causal(4)[0])
    10
    """
    kept, _ = trim_all(np.array([band], dtype=np.int64))
    return int(area_all(kept).sum())


def fa_window(band: Band) -> tuple[int, int]:
    """FlashAttention's (left, right) for a trimmed band, aligned bottom-right; -1 is no limit.

    Key j of the band's keys is visible to row i of its queries when
    i + keys - queries - left <= j <= i + keys - queries + right.

    >>> fa_window(causal(4)[0])
    (-1, 0)
    """
    left, right = fa_window_all(np.array([band], dtype=np.int64))
    return int(left[0]), int(right[0])


def trim_all(bands: IntArray) -> tuple[IntArray, IntArray]:
    """`trim` for many bands at once.

    Args:
        bands: (n, 6) int64, in the order of `Band`'s fields.

    Returns:
        (m, 6) int64, the bands with something left, and (m,) int64, which ones they are.
    """
    kept = np.arange(len(bands))
    bands = bands.copy()
    while True:
        alive = (bands[:, [0, 2]] < bands[:, [1, 3]]).all(1)
        # Two diagonals that cross out everything: the loop would go on for as many rows as it has.
        alive &= bands[:, 4] <= bands[:, 5]
        if not alive.all():
            bands, kept = bands[alive], kept[alive]
        q0, q1, k0, k1, lo, hi = bands.T
        tight = np.stack(
            [
                np.maximum(q0, k0 + lo),
                np.minimum(q1, k1 + hi),
                np.maximum(k0, q0 - hi),
                np.minimum(k1, q1 - lo),
                lo,
                hi,
            ],
            axis=1,
        )
        if np.array_equal(tight, bands):
            return bands, kept
        bands = tight


def area_all(bands: IntArray) -> IntArray:
    """`area` for many trimmed bands at once.

    A rectangle less two corners: where the first row lacks m keys, the next lacks m - 1, and so on.

    Args:
        bands: (n, 6) int64, trimmed.

    Returns:
        (n,) int64, pairs.
    """
    q0, q1, k0, k1, lo, hi = bands.T
    queries = q1 - q0

    def corner(pairs: IntArray) -> IntArray:
        most, below = np.maximum(pairs, 0), np.maximum(pairs - queries, 0)
        corners: IntArray = most * (most + 1) // 2 - below * (below + 1) // 2
        return corners

    pairs: IntArray = queries * (k1 - k0) - corner(k1 - 1 - (q0 - lo)) - corner(q1 - 1 - hi - k0)
    return pairs


def fa_window_all(bands: IntArray) -> tuple[IntArray, IntArray]:
    """`fa_window` for many trimmed bands at once.

    Args:
        bands: (n, 6) int64, trimmed.

    Returns:
        left and right, each (n,) int64.
    """
    q0, q1, k0, k1, lo, hi = bands.T
    queries, keys, offset = q1 - q0, k1 - k0, q0 - k0
    left = np.where(queries - 1 + offset <= hi, -1, hi - offset + (keys - queries))
    right = np.where(offset - lo >= keys - 1, -1, offset - lo - (keys - queries))
    return left, right


def check_bands(length: int, bands: Bands) -> None:
    """Refuse a mask that leaves its sequence or counts a pair twice.

    The pairs that two bands share are a band themselves, so the check is exact. Only bands whose
    keys meet are compared: chunks and trees of any size take no time.

    Args:
        length: Tokens of the sequence.
        bands: Its mask.

    Raises:
        ValueError: Naming the band, or the two bands and a pair that both hold.
    """
    for band in bands:
        if not (0 <= band.q0 <= band.q1 <= length and 0 <= band.k0 <= band.k1 <= length):
            raise ValueError(
                f"{band} leaves a sequence of {length} tokens; expected 0 <= q0 <= q1 <= {length} "
                "and the same of k0 and k1: give ends inside the sequence"
            )
    table = np.array(bands, dtype=np.int64).reshape(-1, 6)
    first, second = _meeting(table)
    a, b = table[first], table[second]
    low = np.maximum(a, b)[:, [0, 2, 4]]
    high = np.minimum(a, b)[:, [1, 3, 5]]
    common = np.stack([low, high], axis=2).reshape(-1, 6)
    shared, which = trim_all(common)
    if len(which):
        one, two = (bands[i] for i in sorted((first[which[0]], second[which[0]])))
        query = int(shared[0, 0])
        key = max(int(shared[0, 2]), query - int(shared[0, 5]))
        raise ValueError(
            f"{one} and {two} both hold query {query} and key {key}; expected disjoint bands, "
            "since a pair in two bands would be counted twice: cut one of them"
        )


def _meeting(table: IntArray) -> tuple[IntArray, IntArray]:
    """The pairs of bands that have keys in common, as two lists of their numbers."""
    order = np.argsort(table[:, 2], kind="stable")
    k0, k1 = table[order, 2], table[order, 3]
    here = np.arange(len(table))
    more = np.maximum(np.searchsorted(k0, k1, side="left") - here - 1, 0)
    first = np.repeat(here, more)
    second = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(more) - more, more)
    return order[first], order[second]


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} is {value}; expected 1 or more: leave empty sequences out")
    return value
