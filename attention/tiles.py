"""Cut the bands of a microbatch into tiles: what each position computes on each source's keys.

A tile is a trimmed band placed in rows: a rectangle of query rows of a shard and of key rows of
another (or the same) shard, of which the pairs between two diagonals are visible. Only the order of
rows matters to a kernel, not where they stand in their sequence, so tiles that touch can often be
joined into one: after joining, a zigzag-sharded causal sequence is one tile for each source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .bands import Bands, IntArray, area_all, trim_all
from .shards import Spans


class Tile(NamedTuple):
    """Row i of its queries sees row j of its keys if lo <= i - j <= hi.

    Normalised: every row and column holds a visible pair, lo >= 1 - keys and hi <= queries - 1, and
    equality means that this side has no limit.
    """

    query: int
    """First row in the shard of the position that computes it."""
    queries: int
    key: int
    """First row among the source's rows (in `TileTable`) or those fetched from it (afterwards)."""
    keys: int
    lo: int
    hi: int

    @property
    def past_is_whole(self) -> bool:
        """Whether no key is too far back for a query."""
        return self.hi >= self.queries - 1

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.past_is_whole and self.lo <= 1 - self.keys

    @property
    def window(self) -> tuple[int, int]:
        """FlashAttention's (left, right), aligned bottom-right; -1 is no limit."""
        more = self.keys - self.queries
        left = -1 if self.past_is_whole else self.hi + more
        right = -1 if self.lo <= 1 - self.keys else -self.lo - more
        return left, right


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """All tiles of a ring, ordered by the position that computes them, source, query and key."""

    position: IntArray
    """(n,) int64, who computes the tile."""
    source: IntArray
    """(n,) int64, whose keys it needs."""
    tiles: IntArray
    """(n, 6) int64, in the order of `Tile`'s fields; keys in rows of the source's shard."""
    work: IntArray
    """(n,) int64, visible pairs."""


def cut_tiles(spans: Spans, bands: Sequence[Bands], degree: int) -> TileTable:
    """Meet each span of queries with each span of keys and each band of their sequence.

    Args:
        spans: The shards.
        bands: The mask of each sequence.
        degree: Positions of the ring.
    """
    order = np.argsort(spans.sequence, kind="stable")
    pieces = np.bincount(spans.sequence, minlength=len(bands))
    masks = np.array([len(b) for b in bands], dtype=np.int64)
    q, k, which = _join(pieces, masks)
    q, k = order[q], order[k]
    table = np.array([band for b in bands for band in b], dtype=np.int64).reshape(-1, 6)[which]
    table[:, 0] = np.maximum(table[:, 0], spans.start[q])
    table[:, 1] = np.minimum(table[:, 1], spans.stop[q])
    table[:, 2] = np.maximum(table[:, 2], spans.start[k])
    table[:, 3] = np.minimum(table[:, 3], spans.stop[k])
    table, kept = trim_all(table)
    q, k = q[kept], k[kept]
    q0, q1, k0, k1, lo, hi = table.T
    queries, keys, offset = q1 - q0, k1 - k0, q0 - k0
    tiles = np.stack(
        [
            q0 - spans.start[q] + spans.row[q],
            queries,
            k0 - spans.start[k] + spans.row[k],
            keys,
            np.maximum(lo - offset, 1 - keys),
            np.minimum(hi - offset, queries - 1),
        ],
        axis=1,
    )
    position, source = spans.position[q], spans.position[k]
    by = np.lexsort((tiles[:, 2], tiles[:, 0], source, position))
    return TileTable(
        position=position[by], source=source[by], tiles=tiles[by], work=area_all(table)[by]
    )


def _join(pieces: IntArray, masks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """All (query piece, key piece, band) of the same sequence, as running numbers of each."""
    combinations = pieces * pieces * masks
    sequence = np.repeat(np.arange(len(pieces)), combinations)
    inside = np.arange(len(sequence)) - np.repeat(
        np.cumsum(combinations) - combinations, combinations
    )
    count = pieces[sequence]
    first_piece = (np.cumsum(pieces) - pieces)[sequence]
    first_mask = (np.cumsum(masks) - masks)[sequence]
    return (
        first_piece + inside // count % count,
        first_piece + inside % count,
        first_mask + inside // (count * count),
    )


def needed_rows(tiles: IntArray, rows: int) -> NDArrayBool:
    """Which of a source's rows some tiles need.

    Args:
        tiles: (n, 6) int64, tiles of one (position, source).
        rows: Rows of the source's shard.

    Returns:
        (rows,) bool.
    """
    change = np.zeros(rows + 1, dtype=np.int64)
    np.add.at(change, tiles[:, 2], 1)
    np.add.at(change, tiles[:, 2] + tiles[:, 3], -1)
    needed: NDArrayBool = np.cumsum(change[:-1]) > 0
    return needed


def moved_rows(table: TileTable) -> int:
    """Key rows that all positions together fetch from others, each once for each who needs it."""
    apart = table.position != table.source
    if not apart.any():
        return 0
    keys = table.tiles[apart, 2:4]
    rows = int(keys.sum(1).max())
    # Rows of different pairs of positions stand apart on one line.
    start = keys[:, 0] + rows * (
        table.position[apart] * (int(table.source.max()) + 1) + table.source[apart]
    )
    order = np.argsort(start, kind="stable")
    start = start[order]
    stop = np.maximum.accumulate(start + keys[order, 1])
    covered = np.concatenate([start[:1], stop[:-1]])
    return int(np.maximum(stop - np.maximum(start, covered), 0).sum())


def fuse(tiles: Iterable[Tile]) -> list[Tile]:
    """Join tiles that touch into fewer ones that hold the same pairs.

    Args:
        tiles: Tiles of one (position, source), ascending by query, then key.
    """
    wide: list[Tile] = []
    for tile in tiles:
        joined = _beside(wide[-1], tile) if wide else None
        if joined is None:
            wide.append(tile)
        else:
            wide[-1] = joined
    tall: list[Tile] = []
    for tile in wide:
        joined = _below(tall[-1], tile) if tall else None
        if joined is None:
            tall.append(tile)
        else:
            tall[-1] = joined
    return tall


def _beside(a: Tile, b: Tile) -> Tile | None:
    """`b` takes up the keys where `a` ends, for the same queries, and no limit lies between."""
    if (a.query, a.queries, a.key + a.keys) != (b.query, b.queries, b.key):
        return None
    if a.lo > 1 - a.keys or not b.past_is_whole:
        return None
    return Tile(a.query, a.queries, a.key, a.keys + b.keys, b.lo - a.keys, a.hi)


def _below(a: Tile, b: Tile) -> Tile | None:
    """`b` takes up the queries where `a` ends, over keys that begin alike, on one diagonal."""
    if (a.query + a.queries, a.key) != (b.query, b.key):
        return None
    if not (a.past_is_whole and b.past_is_whole):
        return None
    queries = a.queries + b.queries
    if a.keys == b.keys and a.full and b.full:
        return Tile(a.query, queries, a.key, b.keys, 1 - b.keys, queries - 1)
    if a.keys == a.queries - a.lo and b.lo + a.queries == a.lo:
        return Tile(a.query, queries, a.key, b.keys, a.lo, queries - 1)
    return None


NDArrayBool = np.ndarray[tuple[int], np.dtype[np.bool_]]
