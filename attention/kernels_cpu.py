"""torch's flash attention op for the CPU, behind the kernel table.

bfloat16 and float16 are raised to float32: the op's own bfloat16 backward is ten times slower. Its
causal flag is aligned top-left, so it serves square calls alone; other limits become an additive
mask, in blocks of rows so that masks stay small. Short sequences cost more to launch than to
compute, so causal ones of like lengths go in one launch, filled up at their ends, where no real
query looks. It kills the process on empty inputs, which
`Call` rules out, and gives rows without keys a log-sum-exp of 0, which trimmed tiles rule out.

Shape suffixes: see `calls`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .calls import Call, Request, blocks, call_of, joint_call, visible
from .merge import take
from .tiles import Tile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BLOCK_ROWS = 512
"""Query rows of one call on a tile that needs a mask."""

SHORT = 256
"""Tokens up to which a causal sequence may share a launch."""

LAUNCH_PAIRS = 512
"""Pairs of a square that may be wasted for each launch that is saved; a launch takes longer."""


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
        """One call for a full or square causal tile, or for many short ones; others are cut."""
        parts = [part for tile in tiles for part in _parts(tile)]
        groups = _alike(_apart(part for part in parts if _short_causal(part)))
        joined = {part for group in groups for part in group}
        return [
            *(_padded_call(group) for group in groups),
            *(call_of(part) for part in parts if part not in joined),
        ]

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
        q_rows, k_rows, real = call.padded or (call.q_rows, call.k_rows, None)
        segments = len(call.queries)
        out_BNCH, lse_BNC = _forward(
            _split(take(q_TNH, q_rows), segments),
            _split(take(k_SGH, k_rows), segments),
            _split(take(v_SGH, k_rows), segments),
            0.0,
            call.causal,
            attn_mask=_bias(call, q_TNH),
            scale=scale,
        )
        return _joined(out_BNCH, real), _joined(lse_BNC, real)

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
        q_rows, k_rows, real = call.padded or (call.q_rows, call.k_rows, None)
        segments = len(call.queries)
        grad_CNH = take(grad_TNH, q_rows)
        if real is not None:
            # Filled-up slots give nothing to anyone.
            grad_CNH = torch.zeros_like(grad_CNH).index_copy_(0, real, take(grad_TNH, call.q_rows))
        gradients = _backward(
            _split(grad_CNH, segments),
            _split(take(q_TNH, q_rows), segments),
            _split(take(k_SGH, k_rows), segments),
            _split(take(v_SGH, k_rows), segments),
            _split(take(out_TNH, q_rows), segments),
            _split(take(lse_TN, q_rows), segments),
            0.0,
            call.causal,
            attn_mask=_bias(call, q_TNH),
            scale=scale,
        )
        dq_CNH, dk_KGH, dv_KGH = (_joined(x, real) for x in gradients)
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


def _short_causal(tile: Tile) -> bool:
    """Whether a tile is short, square and causal, as any single token is."""
    square = tile.queries == tile.keys <= SHORT
    return square and tile.lo == 0 and tile.past_is_whole


def _apart(tiles: Iterable[Tile]) -> list[Tile]:
    """Those that share no query row with another; the rest cannot share a launch."""
    apart: list[Tile] = []
    for tile in sorted(tiles):
        if not apart or apart[-1].query + apart[-1].queries <= tile.query:
            apart.append(tile)
    return apart


def _alike(squares: list[Tile]) -> list[list[Tile]]:
    """Groups of two or more square tiles whose waste, filled up to the longest, is worth it."""
    groups: list[list[Tile]] = [[]]
    pairs = 0
    for tile in sorted(squares, key=lambda tile: (tile.queries, tile)):
        alone = tile.queries**2 + LAUNCH_PAIRS
        if tile.queries**2 * (len(groups[-1]) + 1) > pairs + alone:
            groups.append([])
            pairs = 0
        groups[-1].append(tile)
        pairs += alone
    return [group for group in groups if len(group) > 1]


def _padded_call(tiles: list[Tile]) -> Call:
    call = joint_call(tiles, -1, 0)
    counts = torch.tensor(call.queries)
    longest = call.queries[-1]
    if call.queries[0] == longest:
        return call
    slot = torch.arange(longest)
    last = torch.minimum(slot, counts[:, None] - 1)
    q_rows = torch.tensor([tile.query for tile in tiles])[:, None] + last
    k_rows = torch.tensor([tile.key for tile in tiles])[:, None] + last
    real = (slot < counts[:, None]).flatten().nonzero().flatten()
    return replace(call, padded=(q_rows.flatten(), k_rows.flatten(), real))


def _split(x_CN: Tensor, segments: int) -> Tensor:
    """Rows [C, N, ...] as [segments, N, C / segments, ...]; the op takes strides: no copy."""
    return x_CN.view(segments, len(x_CN) // segments, *x_CN.shape[1:]).transpose(1, 2)


def _joined(x_BNC: Tensor, real: Tensor | None) -> Tensor:
    """What the op gives, [B, N, C, ...], as the rows of a call."""
    rows_CN: Tensor = x_BNC.transpose(1, 2).flatten(0, 1)
    return rows_CN if real is None else rows_CN.index_select(0, real)


def _bias(call: Call, q_TNH: Tensor) -> Tensor | None:
    """The additive mask of a call that is neither full nor causal; the op refuses boolean ones."""
    if call.full or call.causal:
        return None
    seen = visible(call, q_TNH.device)
    return torch.zeros(seen.shape, dtype=q_TNH.dtype).masked_fill_(~seen, -math.inf)
