"""flash-attn 2 behind the kernel table, by the signatures that its 2.7 and 2.8 releases document.

It has not run on a GPU yet: what is tested here is that calls bind to those signatures and that
their arguments mean what the mask says, against a stand-in that computes them. `scripts/gpu_check`
runs it for real.

Shape suffixes: see `calls`.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .calls import Call, Request, varlen_calls
from .merge import take
from .tiles import Tile

MODULE = "flash_attn.flash_attn_interface"


class Flash2:
    """`_flash_attn_varlen_forward` and `_flash_attn_varlen_backward` of flash-attn 2."""

    name = "flash_attn_2"

    def unusable(self, request: Request) -> str | None:
        """Why the kernel cannot run this, or None."""
        if reason := limits(request):
            return reason
        try:
            interface = importlib.import_module(MODULE)
        except ImportError as error:
            return f"flash-attn cannot be imported ({error})"
        return _too_old(interface)

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
        assert call.starts is not None
        out_CNH, lse_NC, *_ = _flash_attn()._flash_attn_varlen_forward(
            take(q_TNH, call.q_rows).contiguous(),
            take(k_SGH, call.k_rows).contiguous(),
            take(v_SGH, call.k_rows).contiguous(),
            *call.starts,
            max(call.queries),
            max(call.keys),
            0.0,
            scale,
            call.causal,
            window_size_left=call.left,
            window_size_right=call.right,
            softcap=softcap or 0.0,
        )
        lse_CN = lse_NC.t()
        # It marks rows without keys by +inf.
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
        assert call.starts is not None
        grad, q, out = (take(x, call.q_rows).contiguous() for x in (grad_TNH, q_TNH, out_TNH))
        k, v = (take(x, call.k_rows).contiguous() for x in (k_SGH, v_SGH))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn()._flash_attn_varlen_backward(
            grad,
            q,
            k,
            v,
            out,
            take(lse_TN, call.q_rows).t().contiguous(),
            dq,
            dk,
            dv,
            *call.starts,
            max(call.queries),
            max(call.keys),
            0.0,
            scale,
            call.causal,
            call.left,
            call.right,
            softcap or 0.0,
            None,
            torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def limits(request: Request) -> str | None:
    """Why no kernel of the flash-attn 2 family can run this, or None."""
    if request.device != "cuda":
        return f"it runs on CUDA, not on {request.device}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"it has float16 and bfloat16, not {request.dtype}"
    if request.head_dim > 256 or request.head_dim % 8:
        return f"it has head dimensions of 8 to 256 by 8, not {request.head_dim}"
    if torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < (8, 0):
        return f"it needs compute capability 8.0, and this GPU has {found[0]}.{found[1]}"
    return None


def _too_old(interface: ModuleType) -> str | None:
    """Why an installed flash-attn has other signatures, or None.

    From 2.7 on the functions are operators of torch, which show no signature; what they wrap does.
    """
    forward = interface._flash_attn_varlen_forward
    names = inspect.signature(getattr(forward, "_init_fn", forward)).parameters
    if "window_size_left" in names and "softcap" in names:
        return None
    return f"the installed flash-attn takes {list(names)}; version 2.7 or newer is needed"


def _flash_attn() -> ModuleType:
    return importlib.import_module(MODULE)
