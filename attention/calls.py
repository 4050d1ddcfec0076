"""What a kernel is asked to compute, and what every kernel offers.

A *call* is one launch: segments of query rows against segments of key rows, all under one
(left, right) window. A kernel's forward gives a partial output with its log-sum-exp. Its backward
is given the output and log-sum-exp over *all* keys, which makes the partial gradients exact.

Shape suffixes: T query rows of a shard, S key rows of a source, C query rows of a call, K key rows
of a call, N query heads, G key/value heads (N is a multiple of G), H head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .bands import IntArray, trim_all
from .merge import Rows
from .tiles import Tile


class AttentionError(RuntimeError):
    """Attention cannot run as asked: no kernel does it, or its plan is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a kernel must be able to run."""

    device: str
    """Type of device, such as "cpu"."""
    dtype: torch.dtype
    """Of q, k and v."""
    head_dim: int
    softcap: bool = False
    """Whether logits become softcap * tanh(logits / softcap)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One launch of a kernel. Its segments share no query row."""

    q_rows: Rows
    """Query rows of the shard, segment by segment."""
    k_rows: Rows
    """Key rows of the source, segment by segment."""
    queries: tuple[int, ...]
    """Query rows of each segment, 1 or more."""
    keys: tuple[int, ...]
    """Key rows of each segment, 1 or more."""
    left: int
    """Row i of a segment sees key j only if j >= i + keys - queries - left; -1 is no limit."""
    right: int
    """Row i of a segment sees key j only if j <= i + keys - queries + right; -1 is no limit."""
    first: bool = False
    """Whether no earlier call of the plan has touched these query rows."""
    starts: tuple[Tensor, Tensor] | None = None
    """Of queries and keys: (segments + 1,) int32 where each segment starts, for kernels that take
    segments of any length."""

    @property
    def causal(self) -> bool:
        """Whether the window alone bounds the future, on the diagonal that ends both segments."""
        return (self.left, self.right) == (-1, 0)

    @property
    def full(self) -> bool:
        """Whether every query of a segment sees all its keys."""
        return (self.left, self.right) == (-1, -1)

    @property
    def alike(self) -> bool:
        """Whether all segments have as many queries, and as many keys."""
        return len(set(self.queries)) == len(set(self.keys)) == 1

    def to(self, device: torch.device) -> Call:
        """The call with its index tensors on another device."""
        if device.type == "cpu":
            return self
        rows = [x if isinstance(x, slice) else x.to(device) for x in (self.q_rows, self.k_rows)]
        starts = self.starts and (self.starts[0].to(device), self.starts[1].to(device))
        return replace(self, q_rows=rows[0], k_rows=rows[1], starts=starts)


class Kernel(Protocol):
    """A way to compute calls."""

    name: str

    def unusable(self, request: Request) -> str | None:
        """Why the kernel cannot run this, or None."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that q, k and v are brought to, and that partial results come in."""

    def calls(self, tiles: Sequence[Tile]) -> list[Call]:
        """Arrange the tiles of one (position, source) in launches."""

    def forward(
        self,
        q_TNH: Tensor,
        k_SGH: Tensor,
        v_SGH: Tensor,
        call: Call,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """out_CNH and lse_CN (float32 or float64, natural logarithm, -inf where no key is seen)."""

    def backward(
        self,
        grad_TNH: Tensor,
        q_TNH: Tensor,
        k_SGH: Tensor,
        v_SGH: Tensor,
        out_TNH: Tensor,
        lse_TN: Tensor,
        call: Call,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq_CNH, dk_KGH, dv_KGH of the call, given the output and log-sum-exp over all keys."""


def call_of(tile: Tile) -> Call:
    """The call of a single tile."""
    left, right = tile.window
    return Call(
        q_rows=slice(tile.query, tile.query + tile.queries),
        k_rows=slice(tile.key, tile.key + tile.keys),
        queries=(tile.queries,),
        keys=(tile.keys,),
        left=left,
        right=right,
    )


def varlen_calls(tiles: Sequence[Tile]) -> list[Call]:
    """Arrange tiles in as few calls as equal windows and unshared query rows allow.

    Two calls beat one with repeated keys, so tiles that share query rows go to different calls.
    """
    groups: dict[tuple[int, int, int], list[Tile]] = {}
    ends: dict[tuple[int, int, int], int] = {}
    for tile in sorted(tiles):
        # A single query that sees all its keys is causal too, and joins those.
        window = (-1, 0) if tile.queries == 1 and tile.full else tile.window
        level = 0
        while ends.get(key := (*window, level), 0) > tile.query:
            level += 1
        groups.setdefault(key, []).append(tile)
        ends[key] = tile.query + tile.queries
    return [
        replace(
            call := joint_call(group, left, right),
            starts=(_starts(call.queries), _starts(call.keys)),
        )
        for (left, right, _), group in groups.items()
    ]


def joint_call(tiles: Sequence[Tile], left: int, right: int) -> Call:
    """The call of several tiles that share no query row, under one window."""
    queries, keys = tuple(t.queries for t in tiles), tuple(t.keys for t in tiles)
    return Call(
        q_rows=_rows([t.query for t in tiles], queries),
        k_rows=_rows([t.key for t in tiles], keys),
        queries=queries,
        keys=keys,
        left=left,
        right=right,
    )


def _starts(counts: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32))


def _rows(begins: Sequence[int], counts: Sequence[int]) -> Rows:
    """Rows of segments, as a slice where they touch."""
    ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
    if list(begins[1:]) == ends[:-1]:
        return slice(begins[0], ends[-1])
    sizes = np.array(counts, dtype=np.int64)
    first = np.array(begins, dtype=np.int64) - (np.cumsum(sizes) - sizes)
    return torch.from_numpy(np.repeat(first, sizes) + np.arange(int(sizes.sum())))


def blocks(tile: Tile, rows: int) -> list[Tile]:
    """Cut a tile into blocks of query rows, each with only the keys that it can see."""
    starts = np.arange(0, tile.queries, rows)
    bands: IntArray = np.empty((len(starts), 6), dtype=np.int64)
    bands[:, 0], bands[:, 1] = starts, np.minimum(starts + rows, tile.queries)
    bands[:, 2:] = 0, tile.keys, tile.lo, tile.hi
    trimmed, _ = trim_all(bands)
    cut = []
    for q0, q1, k0, k1, lo, hi in trimmed.tolist():
        lowest, highest = max(lo - (q0 - k0), k0 - k1 + 1), min(hi - (q0 - k0), q1 - q0 - 1)
        cut.append(Tile(tile.query + q0, q1 - q0, tile.key + k0, k1 - k0, lowest, highest))
    return cut


def visible(call: Call, device: torch.device) -> Tensor:
    """(queries, keys) bool, the pairs that a call of one segment sees."""
    queries, keys = call.queries[0], call.keys[0]
    rows = torch.arange(queries, device=device)[:, None] + (keys - queries)
    ahead = torch.arange(keys, device=device)[None] - rows
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if call.left != -1:
        seen &= ahead >= -call.left
    if call.right != -1:
        seen &= ahead <= call.right
    return seen
