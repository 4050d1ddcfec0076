"""Attention by the book, in torch operations: the oracle of the other kernels, and for softcap.

It holds all logits of a call at once, so it cuts large tiles into blocks of rows. Any device.

Shape suffixes: see `calls`; M = N / G, query heads that share a key/value head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .calls import Call, Request, blocks, call_of, visible
from .merge import take
from .tiles import Tile

BLOCK_ROWS = 512
"""Query rows of one call."""


class Math:
    """Plain matrix products and softmax, one segment a call."""

    name = "math"

    def unusable(self, request: Request) -> str | None:
        """Why the kernel cannot run this, or None."""
        return None if request.dtype.is_floating_point else f"it has no {request.dtype}"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float64 for float64, else float32."""
        return torch.float64 if dtype == torch.float64 else torch.float32

    def calls(self, tiles: Sequence[Tile]) -> list[Call]:
        """Blocks of rows, each with only the keys that it can see."""
        return [call_of(part) for tile in tiles for part in blocks(tile, BLOCK_ROWS)]

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
        """out_CNH and lse_CN in the dtype of q."""
        k_KGH, v_KGH = take(k_SGH, call.k_rows), take(v_SGH, call.k_rows)
        q_CGMH = _grouped(take(q_TNH, call.q_rows), k_KGH.shape[1])
        logits_GMCK, _ = _logits(q_CGMH, k_KGH, call, scale, softcap)
        lse_GMC = torch.logsumexp(logits_GMCK, -1)
        weights_GMCK = torch.exp(logits_GMCK - lse_GMC.unsqueeze(-1))
        out_CGMH = torch.einsum("gmck,kgh->cgmh", weights_GMCK, v_KGH)
        return out_CGMH.flatten(1, 2), lse_GMC.flatten(0, 1).t()

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
        k_KGH, v_KGH = take(k_SGH, call.k_rows), take(v_SGH, call.k_rows)
        heads = k_KGH.shape[1]
        q_CGMH, grad_CGMH, out_CGMH = (
            _grouped(take(x, call.q_rows), heads) for x in (q_TNH, grad_TNH, out_TNH)
        )
        lse_GMC = take(lse_TN, call.q_rows).t().unflatten(0, (heads, -1))
        logits_GMCK, slope_GMCK = _logits(q_CGMH, k_KGH, call, scale, softcap)
        weights_GMCK = torch.exp(logits_GMCK - lse_GMC.unsqueeze(-1))
        dv_KGH = torch.einsum("gmck,cgmh->kgh", weights_GMCK, grad_CGMH)
        delta_GMC1 = (grad_CGMH * out_CGMH).sum(-1).permute(1, 2, 0).unsqueeze(-1)
        dp_GMCK = torch.einsum("cgmh,kgh->gmck", grad_CGMH, v_KGH)
        dlogits_GMCK = weights_GMCK * (dp_GMCK - delta_GMC1) * scale
        if slope_GMCK is not None:
            dlogits_GMCK = dlogits_GMCK * slope_GMCK
        dq_CGMH = torch.einsum("gmck,kgh->cgmh", dlogits_GMCK, k_KGH)
        dk_KGH = torch.einsum("gmck,cgmh->kgh", dlogits_GMCK, q_CGMH)
        return dq_CGMH.flatten(1, 2), dk_KGH, dv_KGH


def _grouped(x_CNH: Tensor, heads: int) -> Tensor:
    return x_CNH.reshape(x_CNH.shape[0], heads, -1, x_CNH.shape[-1])


def _logits(
    q_CGMH: Tensor, k_KGH: Tensor, call: Call, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """The logits, -inf where not visible, and the derivative of the softcap."""
    logits_GMCK = torch.einsum("cgmh,kgh->gmck", q_CGMH, k_KGH) * scale
    slope_GMCK = None
    if softcap is not None:
        capped_GMCK = torch.tanh(logits_GMCK / softcap)
        logits_GMCK, slope_GMCK = capped_GMCK * softcap, 1 - capped_GMCK.square()
    if not call.full:
        logits_GMCK = logits_GMCK.masked_fill(~visible(call, q_CGMH.device), -math.inf)
    return logits_GMCK, slope_GMCK
