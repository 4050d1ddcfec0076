"""Attention of this rank's shard of a packed microbatch: the one function that models call.

It is one operator, `dynapar::attend`, whose backward is the operator `dynapar::attend_backward`, so
that selective activation checkpointing and `torch.compile` see both. Operators take no objects: the
plan travels as an integer handle, and the autograd graph keeps the plan alive.

Shape suffixes: T rows of this rank's shard, N query heads, G key/value heads (N a multiple of G), H
head dimension.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import staged, ulysses
from .calls import Request
from .kernels import choose
from .plan import BoundPlan, live_plan


def attend(
    q_TNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    plan: BoundPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Exact attention of this rank's shard over the whole microbatch.

    Every rank of the ring calls it, with the same arguments but for the shard, and must enter its
    backward too, also where its shard has no row: let the (empty) output take part in the loss.
    Gradients of `sinks` are this shard's part, to be summed over ranks like any parameter's.

    Args:
        q_TNH: This rank's queries, in the order of `plan.plan.index(plan.position)`; T may be 0.
        k_TGH: The keys of the same tokens, same dtype and device.
        v_TGH: The values of the same tokens.
        plan: The microbatch's plan, bound to the ring that runs it.
        scale: Of the logits; None is H ** -0.5.
        softcap: Above 0, turns logits into softcap * tanh(logits / softcap).
        sinks: (N,), a learned logit per head that takes part in softmax and adds no value.

    Returns:
        out_TNH, in the dtype of q; 0 for a token that sees nothing. Sums are kept in float32, or
        float64 for float64.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit each other or the plan, or no kernel can
            run this (`KernelError`, with reasons).
    """
    _check(q_TNH, k_TGH, v_TGH, plan, softcap, sinks)
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    out_TNH: Tensor
    out_TNH, _ = _attend(q_TNH, k_TGH, v_TGH, sinks, plan.handle, scale, softcap)
    return out_TNH


@torch.library.custom_op("dynapar::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    setting = _setting(q, handle, scale, softcap)
    forward = ulysses.forward if setting.plan.scheme.share > 1 else staged.forward
    return forward(q, k, v, sinks, setting)


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=staged.accumulator(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@torch.library.custom_op("dynapar::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    setting = _setting(q, handle, scale, softcap)
    backward = ulysses.backward if setting.plan.scheme.share > 1 else staged.backward
    dq, dk, dv, dsinks = backward(grad, q, k, v, sinks, out, lse, setting)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@_attend_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


class _Context(Protocol):
    """What autograd keeps of a call."""

    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]
    handle: int
    scale: float
    softcap: float | None
    plan: BoundPlan | None

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


def _save(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, int, float, float | None],
    output: tuple[Tensor, Tensor],
) -> None:
    q, k, v, sinks, handle, scale, softcap = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, sinks, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.handle, ctx.scale, ctx.softcap = handle, scale, softcap
    # The graph may outlive the caller's reference. A compiled graph is traced without a plan.
    ctx.plan = None if torch.compiler.is_compiling() else live_plan(handle)


def _differentiate(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    dq, dk, dv, dsinks = _attend_backward(
        grad, q, k, v, sinks, out, lse, ctx.handle, ctx.scale, ctx.softcap
    )
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)


def _setting(q: Tensor, handle: int, scale: float, softcap: float | None) -> staged.Setting:
    plan = live_plan(handle)
    request = Request(
        device=q.device.type,
        dtype=q.dtype,
        head_dim=q.shape[-1],
        softcap=softcap is not None,
    )
    kernel = choose(request, name=plan.kernel)
    return staged.Setting(plan=plan, kernel=kernel, scale=scale, softcap=softcap)


def _check(
    q: Tensor, k: Tensor, v: Tensor, plan: BoundPlan, softcap: float | None, sinks: Tensor | None
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"attention got {shapes}; expected [tokens, heads, head_dim] with equal k and v and "
            "one head_dim: pass a shard without a batch dimension"
        )
    if not q.shape[0] == k.shape[0] == plan.tokens:
        raise ValueError(
            f"attention got {shapes}; expected {plan.tokens} tokens, this rank's shard at position "
            f"{plan.position} of {plan.degree}: cut inputs by plan.index"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention got {q.shape[1]} query heads and {k.shape[1]} key/value heads; expected a "
            "multiple: do not cut heads unevenly"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"attention got q, k, v of {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, "
            f"{v.device}; expected one dtype and device: cast them before"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected above 0: use None for no softcap")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device):
        raise ValueError(
            f"sinks have shape {list(sinks.shape)} on {sinks.device}; expected [{q.shape[1]}] on "
            f"{q.device}: one logit for each query head"
        )
