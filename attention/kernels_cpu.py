"""torch's flash attention op for the CPU, behind the kernel table.

bfloat16 and float16 are raised to float32: the op's own bfloat16 backward is ten times slower. Its
causal flag is aligned top-left, so it serves square calls alone; other limits become an additive
mask, in blocks of rows so that masks stay small. It kills the process on empty inputs, which
`Call` rules out, and gives rows without keys a log-sum-exp of 0, which trimmed tiles rule out.

Shape suffixes: see `calls`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .calls import Call, Request, blocks, call_of, visible
from .merge import take
from .tiles import Tile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BLOCK_ROWS = 512
"""Query rows of one call on a tile that needs a mask."""


class CpuFlash:
    """`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward, one segment a call."""

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
        """One call for a full or square causal tile; other tiles are cut."""
        return [call_of(part) for tile in tiles for part in _parts(tile)]

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
        out_1NCH, lse_1NC = _forward(
            _heads_first(take(q_TNH, call.q_rows)),
            _heads_first(take(k_SGH, call.k_rows)),
            _heads_first(take(v_SGH, call.k_rows)),
            0.0,
            call.causal,
            attn_mask=_bias(call, q_TNH),
            scale=scale,
        )
        return out_1NCH[0].transpose(0, 1), lse_1NC[0].t()

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
        gradients = _backward(
            _heads_first(take(grad_TNH, call.q_rows)),
            _heads_first(take(q_TNH, call.q_rows)),
            _heads_first(take(k_SGH, call.k_rows)),
            _heads_first(take(v_SGH, call.k_rows)),
            _heads_first(take(out_TNH, call.q_rows)),
            take(lse_TN, call.q_rows).t().unsqueeze(0),
            0.0,
            call.causal,
            attn_mask=_bias(call, q_TNH),
            scale=scale,
        )
        dq_CNH, dk_KGH, dv_KGH = (x[0].transpose(0, 1) for x in gradients)
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


def _heads_first(x_CNH: Tensor) -> Tensor:
    """[1, N, C, H] as a view; the op takes strides, so nothing is copied."""
    return x_CNH.transpose(0, 1).unsqueeze(0)


def _bias(call: Call, q_TNH: Tensor) -> Tensor | None:
    """The additive mask of a call that is neither full nor causal; the op refuses boolean ones."""
    if call.full or call.causal:
        return None
    seen = visible(call, q_TNH.device)
    return torch.zeros(seen.shape, dtype=q_TNH.dtype).masked_fill_(~seen, -math.inf)
