"""Cut the sequences of a packed microbatch into shards, one for each position of the ring.

A *position* is a rank's place in its ring, 0 to degree - 1. A sequence shared by m positions is cut
at floor(i * length / parts), so any length fits any number of positions without padding; a position
may get no token of a short sequence, or none at all. In a shard the sequences stand in pack order,
and the tokens of each in ascending order. `evenly` deals chunks by the work of the masks where
zigzag, made for causal ones, is not even.

Imports numpy alone: the planner uses the same cuts to count tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]

Layout = Literal["zigzag", "contiguous"]
"""zigzag: place j of m holds chunks j and 2m - 1 - j of 2m, which evens out causal work.
contiguous: place j holds the j-th of m even spans, for full masks and layers that need neighbours.
"""

LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous")


def owners(sharers: int, layout: Layout = "zigzag") -> IntArray:
    """The place, among the positions that share a sequence, that holds each of its chunks.

    >>> owners(3).tolist()
    [0, 1, 2, 2, 1, 0]
    """
    places = np.arange(sharers, dtype=np.int64)
    return np.concatenate([places, places[::-1]]) if layout == "zigzag" else places


def cuts(lengths: ArrayLike, chunks: int) -> IntArray:
    """Where sequences are cut: floor(i * length / chunks) for i = 0 to chunks.

    Args:
        lengths: (...) integers, tokens.
        chunks: Pieces that each sequence is cut into, 1 or more.

    Returns:
        (..., chunks + 1) int64, ascending.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    return tokens[..., None] * np.arange(chunks + 1, dtype=np.int64) // chunks


def cut_tokens(lengths: ArrayLike, degree: int, layout: Layout = "zigzag") -> IntArray:
    """Tokens of each place after a sequence is cut; they differ by at most 2.

    Args:
        lengths: (...) integers, tokens of one sequence or of many.
        degree: Positions that share each of them, 1 or more.
        layout: How chunks go to places.

    Returns:
        (..., degree) int64.

    >>> cut_tokens(10, 4).tolist()
    [3, 2, 2, 3]
    """
    owner = owners(degree, layout)
    sizes = np.diff(cuts(lengths, len(owner)), axis=-1)
    tokens: IntArray = sizes[..., :degree]
    if layout == "zigzag":
        tokens = tokens + sizes[..., : degree - 1 : -1]
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Which tokens each position holds: the non-empty spans, by position, in shard order."""

    position: IntArray
    """(n,) int64, ascending."""
    sequence: IntArray
    """(n,) int64, ascending within a position."""
    start: IntArray
    """(n,) int64, first token inside the sequence."""
    stop: IntArray
    """(n,) int64, exclusive."""
    row: IntArray
    """(n,) int64, row of the first token in the position's shard."""
    tokens: IntArray
    """(degree,) int64, rows of each position's shard."""


def cut(
    lengths: Sequence[int],
    *,
    degree: int,
    positions: Sequence[Sequence[int]] | None = None,
    layout: Layout = "zigzag",
) -> Spans:
    """Share the sequences of a packed microbatch out over the positions of a ring.

    Args:
        lengths: Tokens of each sequence, 1 or more, in pack order.
        degree: Positions of the ring, 1 or more.
        positions: For each sequence, the positions that share it, in order; None is all of them.
        layout: How chunks go to the positions that share a sequence.

    Raises:
        ValueError: A length, degree, layout or list of positions is impossible.
    """
    _check(lengths, degree, positions, layout)
    tokens = np.array(lengths, dtype=np.int64)
    everyone = tuple(range(degree))
    shared = [everyone] * len(tokens) if positions is None else [tuple(p) for p in positions]
    counts = np.array([len(p) for p in shared], dtype=np.int64)
    parts: list[IntArray] = []
    for count in np.unique(counts).tolist():
        which = np.flatnonzero(counts == count)
        owner = owners(count, layout)
        at = cuts(tokens[which], len(owner))
        holders = np.array([shared[i] for i in which.tolist()], dtype=np.int64)[:, owner]
        sequence = np.broadcast_to(which[:, None], holders.shape)
        parts.append(np.stack([holders, sequence, at[:, :-1], at[:, 1:]]).reshape(4, -1))
    return spans_of(np.concatenate([np.empty((4, 0), np.int64), *parts], axis=1), degree)


def spans_of(table: IntArray, degree: int) -> Spans:
    """The spans of chunks.

    Args:
        table: (4, n) int64: position, sequence, start and stop of each chunk, in any order.
        degree: Positions of the ring.
    """
    table = table[:, table[2] < table[3]]
    return _joined(table[:, np.lexsort((table[2], table[1], table[0]))], degree)


def _joined(table: IntArray, degree: int) -> Spans:
    """Join spans that touch, such as the two middle chunks of a zigzag, and number the rows."""
    position, sequence, start, stop = table
    touches = np.zeros(table.shape[1], dtype=bool)
    touches[1:] = (
        (position[1:] == position[:-1]) & (sequence[1:] == sequence[:-1]) & (start[1:] == stop[:-1])
    )
    first = np.flatnonzero(~touches)
    last = np.append(first[1:], table.shape[1])[: len(first)] - 1
    position, sequence, start, stop = position[first], sequence[first], start[first], stop[last]
    sizes = stop - start
    tokens = np.bincount(position, weights=sizes, minlength=degree).astype(np.int64)
    before = np.cumsum(tokens) - tokens
    row = np.cumsum(sizes) - sizes - before[position]
    return Spans(
        position=position, sequence=sequence, start=start, stop=stop, row=row, tokens=tokens
    )


def index(spans: Spans, lengths: Sequence[int], position: int) -> IntArray:
    """Where a position's rows lie in the packed microbatch (the sequences one after another).

    Args:
        spans: Of the whole microbatch.
        lengths: Tokens of each sequence.
        position: 0 to degree - 1.

    Returns:
        (tokens of the position,) int64: `packed[index]` is its shard.
    """
    sizes = np.array(lengths, dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    here = np.flatnonzero(spans.position == position)
    first = begins[spans.sequence[here]] + spans.start[here] - spans.row[here]
    count = spans.stop[here] - spans.start[here]
    return np.repeat(first, count) + np.arange(int(count.sum()), dtype=np.int64)


def _check(
    lengths: Sequence[int], degree: int, positions: Sequence[Sequence[int]] | None, layout: Layout
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {list(LAYOUTS)}: name one of them")
    if degree < 1:
        raise ValueError(f"degree is {degree}; expected 1 or more: count the ranks of the ring")
    for i, length in enumerate(lengths):
        if length < 1:
            raise ValueError(
                f"lengths[{i}] is {length}; expected 1 or more: leave empty sequences out"
            )
    if positions is None:
        return
    if len(positions) != len(lengths):
        raise ValueError(
            f"positions has {len(positions)} entries for {len(lengths)} sequences; expected one "
            "for each: list the positions that share each sequence"
        )
    for i, shared in enumerate(positions):
        inside = all(0 <= p < degree for p in shared)
        if not shared or not inside or len(set(shared)) != len(shared):
            raise ValueError(
                f"positions[{i}] is {list(shared)}; expected one or more different ones of 0 to "
                f"{degree - 1}: positions count within the ring, ranks within the group"
            )
