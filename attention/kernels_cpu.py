"""torch's flash attention op for the CPU, behind the kernel table.

bfloat16 and float16 are raised to float32: the op's own bfloat16 backward is ten times slower. Its
causal flag is aligned top-left, so it serves square calls alone; other limits become an additive
mask, in blocks of rows so that masks stay small. It takes no segments of several lengths, so a call
of these runs it once for each; what is left is that they are cut and joined at once, at the price
of a few microseconds a segment. It kills the process on empty inputs, which `Call` rules out, and
gives rows without keys a log-sum-exp of 0, which trimmed tiles rule out.

Shape suffixes: see `calls`; B segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .calls import Call, Request, blocks, call_of, joint_call, visible
from .merge import Rows, take
from .tiles import Tile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BLOCK_ROWS = 512
"""Query rows of one call on a tile that needs a mask."""

SHORT = 64
"""Query rows up to which a segment is worth copying to share a call with those before it."""

JOINED = 256
"""Query rows up to which results are worth joining to be merged at once."""


class CpuFlash:
    """`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward."""

    name = "cpu_flash"

    def unusable(self, request: Request) -> str | None:
        """Why the kernel cannot run this, or None."""
        if request.device != "cpu":
            return f"it runs on the CPU, not on {request.device}"
        if request.softcap:
            return "it has no softcap"
        if not request.dtype.is_floating_point:
            return f"it has no {request.dtype}"
        return None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float64 for float64, else float32."""
        return torch.float64 if dtype == torch.float64 else torch.float32

    def calls(self, tiles: Sequence[Tile]) -> list[Call]:
        """Full and square causal tiles, as many in a call as follow each other; others are cut."""
        parts = [part for tile in tiles for part in _parts(tile)]
        plain = sorted(part for part in parts if _window(part) is not None)
        masked = [part for part in parts if _window(part) is None]
        return [*(_call(run) for run in _runs(plain)), *(call_of(part) for part in masked)]

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
        """out_CNH and lse_CN, both in the dtype of q."""
        assert softcap is None
        bias, causal = _bias(call, q_TNH), call.causal
        parts = [
            _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
            for q, k, v in zip(
                _split(q_TNH, call.q_rows, call.queries, call),
                _split(k_SGH, call.k_rows, call.keys, call),
                _split(v_SGH, call.k_rows, call.keys, call),
                strict=True,
            )
        ]
        return _joined([out for out, _ in parts]), _joined([lse for _, lse in parts])

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
        """dq_CNH, dk_KGH, dv_KGH in the dtype of q."""
        assert softcap is None
        bias, causal = _bias(call, q_TNH), call.causal
        parts = [
            _backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
            for grad, q, k, v, out, lse in zip(
                _split(grad_TNH, call.q_rows, call.queries, call),
                _split(q_TNH, call.q_rows, call.queries, call),
                _split(k_SGH, call.k_rows, call.keys, call),
                _split(v_SGH, call.k_rows, call.keys, call),
                _split(out_TNH, call.q_rows, call.queries, call),
                _split(lse_TN, call.q_rows, call.queries, call),
                strict=True,
            )
        ]
        dq_CNH, dk_KGH, dv_KGH = (_joined(x) for x in zip(*parts, strict=True))
        return dq_CNH, dk_KGH, dv_KGH


def _parts(tile: Tile) -> list[Tile]:
    """Tiles that the op runs well: full, square causal, or small enough for a mask."""
    if tile.full or (tile.window == (-1, 0) and tile.queries == tile.keys):
        return [tile]
    if tile.window == (-1, 0):
        past = tile.keys - tile.queries
        return [
            tile._replace(keys=past, lo=1 - past),
            tile._replace(key=tile.key + past, keys=tile.queries, lo=0),
        ]
    return blocks(tile, BLOCK_ROWS)


def _window(tile: Tile) -> tuple[int, int] | None:
    """The window under which the op runs a tile without a mask, or None."""
    if tile.lo == 0 and tile.past_is_whole and tile.queries == tile.keys:
        return (-1, 0)  # Also of a single token, which is full too.
    return (-1, -1) if tile.full else None


def _runs(tiles: list[Tile]) -> list[list[Tile]]:
    """Cut a sorted list where tiles share query rows, or where copying would cost more than a call.

    Tiles of a run that touch are cut and joined without copies of what goes in. Only short ones are
    taken along across a gap.
    """
    runs: list[list[Tile]] = []
    for tile in tiles:
        if runs and _follows(runs[-1][-1], tile):
            runs[-1].append(tile)
        else:
            runs.append([tile])
    return runs


def _follows(before: Tile, tile: Tile) -> bool:
    query, key = before.query + before.queries, before.key + before.keys
    if _window(before) != _window(tile):
        return False
    # Results of causal tiles are those of a shard's own keys and come first: once joined they are
    # adopted. Others would be joined only to be merged.
    rows = max(before.queries, tile.queries)
    if (query, key) == (tile.query, tile.key):
        return rows <= JOINED or _window(tile) == (-1, 0)
    return query <= tile.query and rows <= SHORT


def _call(run: list[Tile]) -> Call:
    left, right = _window(run[0]) or run[0].window
    return joint_call(run, left, right)


def _split(x_TN: Tensor, rows: Rows, counts: tuple[int, ...], call: Call) -> Sequence[Tensor]:
    """Rows [C, N, ...] as views [B, N, C / B, ...]: one for all segments if these are alike."""
    x_CN = take(x_TN, rows)
    if call.alike:
        return [x_CN.unflatten(0, (len(counts), counts[0])).transpose(1, 2)]
    split: Sequence[Tensor] = x_CN.transpose(0, 1).unsqueeze(0).split(counts, 2)
    return split


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """What the op gives, [B, N, C / B, ...] each, as the rows of a call."""
    rows = [x_BNC.transpose(1, 2) for x_BNC in parts]
    return rows[0].flatten(0, 1) if len(rows) == 1 else torch.cat(rows, 1)[0]


def _bias(call: Call, q_TNH: Tensor) -> Tensor | None:
    """The additive mask of a call that is neither full nor causal; the op refuses boolean ones."""
    if call.full or call.causal:
        return None
    seen = visible(call, q_TNH.device)
    return torch.zeros(seen.shape, dtype=q_TNH.dtype).masked_fill_(~seen, -math.inf)
