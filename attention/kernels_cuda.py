"""torch's own flash attention op for CUDA behind the kernel table; it needs no extra package.

It has not run on a GPU yet: what is tested here is that calls bind to the op's schema in torch 2.10
to 2.13, that they give the right shapes on the meta device, and that their arguments mean what the
mask says, against a stand-in that computes them. `scripts/gpu_check` runs it for real.

Shape suffixes: see `calls`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .calls import Call, Request, varlen_calls
from .kernels_flash2 import limits
from .merge import take
from .tiles import Tile

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class CudaFlash:
    """`aten::_flash_attention_forward` and its backward."""

    name = "cuda_flash"

    def unusable(self, request: Request) -> str | None:
        """Why the kernel cannot run this, or None."""
        if reason := limits(request):
            return reason
        if request.softcap:
            return "it has no softcap"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no flash attention for CUDA"
        return None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype itself."""
        return dtype

    def calls(self, tiles: Sequence[Tile]) -> list[Call]:
        """One call for each window, as long as segments share no query row."""
        return varlen_calls(tiles)

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
        """out_CNH in the dtype of q, lse_CN in float32."""
        assert softcap is None
        assert call.starts is not None
        out_CNH, lse_NC, *_ = _forward(
            take(q_TNH, call.q_rows).contiguous(),
            take(k_SGH, call.k_rows).contiguous(),
            take(v_SGH, call.k_rows).contiguous(),
            *call.starts,
            max(call.queries),
            max(call.keys),
            0.0,
            call.causal,
            False,
            scale=scale,
            window_size_left=call.left,
            window_size_right=call.right,
        )
        lse_CN = lse_NC.t()
        # Rows without keys are marked by +inf, as in flash-attn 2.
        return out_CNH, lse_CN.masked_fill(lse_CN == math.inf, -math.inf)

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
        assert call.starts is not None
        device = q_TNH.device
        dq_CNH, dk_KGH, dv_KGH = _backward(
            take(grad_TNH, call.q_rows).contiguous(),
            take(q_TNH, call.q_rows).contiguous(),
            take(k_SGH, call.k_rows).contiguous(),
            take(v_SGH, call.k_rows).contiguous(),
            take(out_TNH, call.q_rows).contiguous(),
            take(lse_TN, call.q_rows).t().contiguous(),
            *call.starts,
            max(call.queries),
            max(call.keys),
            0.0,
            call.causal,
            # Without dropout the random state is not read.
            torch.zeros(2, dtype=torch.uint64, device=device),
            torch.empty(0, device=device),
            scale=scale,
            window_size_left=call.left,
            window_size_right=call.right,
        )
        return dq_CNH, dk_KGH, dv_KGH
