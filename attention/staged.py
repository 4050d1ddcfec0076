"""Compute a ring's attention by staged exchange of keys and values.

Local tiles come first. The needed rows of the other positions come straight from their owners in
stages, each on its way while the stage before it computes; partial results are merged by their
log-sum-exp. Backward fetches the rows again, runs each call with the global output and log-sum-exp,
and returns the gradients of fetched rows to their owner, who sums them. Autograd neither schedules
nor differentiates communication.

All ranks of a ring issue the same exchanges in the same order: rows of stage 0, then rows of stage
i + 1 (and in backward the gradients of stage i) for each i. Keys and values travel in the dtype of
the input, their gradients in the one that the kernel gives.

Shape suffixes: T query rows of this shard, which are its key rows too, S key rows of a source, N
query heads, G key/value heads, H head dimension; 2 stands for keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import Kernel
from .exchange import Message, Pending
from .merge import add_, add_sinks_, merge_rows_, sinks_gradient, take
from .plan import BoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all calls of one attention share."""

    plan: BoundPlan
    kernel: Kernel
    scale: float
    softcap: float | None


@dataclass(slots=True)
class _Rows:
    """Rows of keys and values on their way from the sources of a stage."""

    pending: Pending
    buffers: list[tuple[int, Tensor]]

    def arrived(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
        self.pending.wait()
        for source, rows_2SGH in self.buffers:
            k_SGH, v_SGH = rows_2SGH.to(dtype)
            yield source, k_SGH, v_SGH


def forward(
    q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, sinks_N: Tensor | None, setting: Setting
) -> tuple[Tensor, Tensor]:
    """This shard's attention over the keys of the whole ring.

    Returns:
        out_TNH in the dtype of q, and lse_TN in float32, or float64 for float64.
    """
    plan, kernel = setting.plan, setting.kernel
    dtype, sums = kernel.compute_dtype(q_TNH.dtype), accumulator(q_TNH.dtype)
    calls = plan.calls(kernel, q_TNH.device)
    q = q_TNH.to(dtype)
    out_TNH = torch.zeros(q_TNH.shape, dtype=sums, device=q_TNH.device)
    lse_TN = torch.full(q_TNH.shape[:2], -math.inf, dtype=sums, device=q_TNH.device)

    def fold(k_SGH: Tensor, v_SGH: Tensor, source: int) -> None:
        for call in calls[source]:
            part, part_lse = kernel.forward(
                q, k_SGH, v_SGH, call, scale=setting.scale, softcap=setting.softcap
            )
            merge_rows_(out_TNH, lse_TN, call.q_rows, part, part_lse, first=call.first)

    ahead = _fetch(plan, k_TGH, v_TGH, 0, "attention forward rows")
    fold(k_TGH.to(dtype), v_TGH.to(dtype), plan.position)
    for stage in range(len(plan.stages)):
        current = ahead
        ahead = _fetch(plan, k_TGH, v_TGH, stage + 1, "attention forward rows")
        for source, k_SGH, v_SGH in current.arrived(dtype):
            fold(k_SGH, v_SGH, source)
    if sinks_N is not None:
        add_sinks_(out_TNH, lse_TN, sinks_N)
    return out_TNH.to(q_TNH.dtype), lse_TN


def backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    sinks_N: Tensor | None,
    out_TNH: Tensor,
    lse_TN: Tensor,
    setting: Setting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of this shard's q, k and v, and this shard's part of the sinks' gradient.

    Args:
        grad_TNH: Of the output.
        q_TNH: As in forward, and so on.
        k_TGH: ...
        v_TGH: ...
        sinks_N: ...
        out_TNH: What forward gave.
        lse_TN: What forward gave.
        setting: As in forward.
    """
    plan, kernel = setting.plan, setting.kernel
    given, dtype = q_TNH.dtype, kernel.compute_dtype(q_TNH.dtype)
    sums = accumulator(given)
    calls = plan.calls(kernel, q_TNH.device)
    grad, q, out = (x.to(dtype) for x in (grad_TNH, q_TNH, out_TNH))
    dq_TNH = torch.zeros(q_TNH.shape, dtype=sums, device=q_TNH.device)
    dk_TGH, dv_TGH = (torch.zeros(k_TGH.shape, dtype=sums, device=q_TNH.device) for _ in range(2))

    def differentiate(
        k_SGH: Tensor, v_SGH: Tensor, source: int, dk_SGH: Tensor, dv_SGH: Tensor
    ) -> None:
        for call in calls[source]:
            dq, dk, dv = kernel.backward(
                grad, q, k_SGH, v_SGH, out, lse_TN, call,
                scale=setting.scale, softcap=setting.softcap,
            )  # fmt: skip
            add_(dq_TNH, call.q_rows, dq)
            add_(dk_SGH, call.k_rows, dk)
            add_(dv_SGH, call.k_rows, dv)

    ahead = _fetch(plan, k_TGH, v_TGH, 0, "attention backward rows")
    differentiate(k_TGH.to(dtype), v_TGH.to(dtype), plan.position, dk_TGH, dv_TGH)
    returning: _Rows | None = None
    for stage in range(len(plan.stages)):
        current = ahead
        ahead = _fetch(plan, k_TGH, v_TGH, stage + 1, "attention backward rows")
        partial: dict[int, Tensor] = {}
        for source, k_SGH, v_SGH in current.arrived(dtype):
            dkv_2SGH = torch.zeros(2, *k_SGH.shape, dtype=sums, device=q_TNH.device)
            differentiate(k_SGH, v_SGH, source, *dkv_2SGH)
            partial[source] = dkv_2SGH.to(dtype)
        posted = _return(plan, partial, k_TGH, stage, dtype)
        _land(plan, returning, dk_TGH, dv_TGH)
        returning = posted
    _land(plan, returning, dk_TGH, dv_TGH)
    dsinks_N = None
    if sinks_N is not None:
        dsinks_N = sinks_gradient(grad_TNH.to(sums), out_TNH.to(sums), lse_TN, sinks_N)
        dsinks_N = dsinks_N.to(sinks_N.dtype)
    return dq_TNH.to(given), dk_TGH.to(given), dv_TGH.to(given), dsinks_N


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the log-sum-exp: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fetch(plan: BoundPlan, k_TGH: Tensor, v_TGH: Tensor, stage: int, operation: str) -> _Rows:
    """Send the rows that others need in a stage, receive those needed here; none after the last."""
    rounds = plan.stages[stage] if stage < len(plan.stages) else ()
    send = plan.local.send_on(k_TGH.device)
    sends: list[Message] = []
    receives: list[Message] = []
    buffers: list[tuple[int, Tensor]] = []
    for t in rounds:
        user, source = plan.user(t), plan.source(t)
        if plan.local.send_rows[user]:
            rows = [take(x, send[user]) for x in (k_TGH, v_TGH)]
            sends.append((plan.ranks[user], torch.stack(rows)))
        if plan.local.fetch[source]:
            shape = (2, plan.local.fetch[source], *k_TGH.shape[1:])
            buffer = torch.empty(shape, dtype=k_TGH.dtype, device=k_TGH.device)
            receives.append((plan.ranks[source], buffer))
            buffers.append((source, buffer))
    return _Rows(plan.transport.exchange(sends, receives, operation=operation), buffers)


def _return(
    plan: BoundPlan, partial: dict[int, Tensor], k_TGH: Tensor, stage: int, dtype: torch.dtype
) -> _Rows:
    """Send the gradients of rows fetched in a stage to their owners, receive those of own rows."""
    sends = [(plan.ranks[source], dkv_2SGH) for source, dkv_2SGH in partial.items()]
    receives: list[Message] = []
    buffers: list[tuple[int, Tensor]] = []
    for t in plan.stages[stage]:
        user = plan.user(t)
        if plan.local.send_rows[user]:
            shape = (2, plan.local.send_rows[user], *k_TGH.shape[1:])
            buffer = torch.empty(shape, dtype=dtype, device=k_TGH.device)
            receives.append((plan.ranks[user], buffer))
            buffers.append((user, buffer))
    operation = "attention backward gradients"
    return _Rows(plan.transport.exchange(sends, receives, operation=operation), buffers)


def _land(plan: BoundPlan, returned: _Rows | None, dk_TGH: Tensor, dv_TGH: Tensor) -> None:
    """Add the gradients that others computed for rows of this shard, in the order of rounds."""
    if returned is None:
        return
    send = plan.local.send_on(dk_TGH.device)
    for user, dk_SGH, dv_SGH in returned.arrived(dk_TGH.dtype):
        add_(dk_TGH, send[user], dk_SGH)
        add_(dv_TGH, send[user], dv_SGH)
