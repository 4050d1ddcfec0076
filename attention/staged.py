"""Compute a ring's attention by staged exchange of keys and values.

Local tiles come first. The needed rows of the other positions come straight from their owners in
stages, each on its way while the stage before it computes; partial results are merged by their
log-sum-exp. Backward fetches the rows again, runs each call with the global output and log-sum-exp,
and returns the gradients of fetched rows to their owner, who sums them. Autograd neither schedules
nor differentiates communication.

All ranks of a ring issue the same exchanges in the same order: rows of stage 0, then rows of stage
i + 1 (and in backward the gradients of stage i) for each i. Keys and values travel in the dtype of
the input, their gradients in the one that the kernel gives.

Where positions share heads (`ulysses`), the members of a group hold the rows of all their shards
for some heads: what is called a shard here is the group's, and messages go between counterparts.

Shape suffixes: T query rows of this shard, which are its key rows too, S key rows of a source, N
query heads, G key/value heads, H head dimension; 2 stands for keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import Kernel
from .exchange import Message, Pending
from .merge import add_, add_sinks_, added, folded, nothing, sinks_gradient, take_into
from .plan import BoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all calls of one attention share."""

    plan: BoundPlan
    kernel: Kernel
    scale: float
    softcap: float | None
    repeats: tuple[int, ...] = ()
    """How often each key/value head is repeated before a kernel gets it; empty is once each."""


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
    total: tuple[Tensor, Tensor] | None = None

    def fold(k_SGH: Tensor, v_SGH: Tensor, source: int) -> None:
        nonlocal total
        k_SGH, v_SGH = (_repeated(x, setting.repeats) for x in (k_SGH, v_SGH))
        for call in calls[source]:
            part = kernel.forward(
                q, k_SGH, v_SGH, call, scale=setting.scale, softcap=setting.softcap
            )
            total = folded(
                total, call.q_rows, part, first=call.first, tokens=plan.local.tokens, dtype=sums
            )

    ahead = _fetch(plan, k_TGH, v_TGH, 0, "attention forward rows")
    fold(k_TGH.to(dtype), v_TGH.to(dtype), plan.group)
    for stage in range(len(plan.stages)):
        current = ahead
        ahead = _fetch(plan, k_TGH, v_TGH, stage + 1, "attention forward rows")
        for source, k_SGH, v_SGH in current.arrived(dtype):
            fold(k_SGH, v_SGH, source)
    out_TNH, lse_TN = total or nothing(q_TNH, tokens=plan.local.tokens, dtype=sums)
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
    given, sums = q_TNH.dtype, accumulator(q_TNH.dtype)
    dsinks_N = None
    if sinks_N is not None:
        dsinks_N = sinks_gradient(grad_TNH.to(sums), out_TNH.to(sums), lse_TN, sinks_N)
        dsinks_N = dsinks_N.to(sinks_N.dtype)
    dq, dk, dv = gradients(grad_TNH, q_TNH, k_TGH, v_TGH, out_TNH, lse_TN, setting)
    return dq.to(given), dk.to(given), dv.to(given), dsinks_N


def gradients(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TGH: Tensor,
    v_TGH: Tensor,
    out_TNH: Tensor,
    lse_TN: Tensor,
    setting: Setting,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this shard's q, k and v as summed, in float32 or float64; see `backward`."""
    plan, kernel = setting.plan, setting.kernel
    dtype, sums = kernel.compute_dtype(q_TNH.dtype), accumulator(q_TNH.dtype)
    calls = plan.calls(kernel, q_TNH.device)
    grad, q, out = (x.to(dtype) for x in (grad_TNH, q_TNH, out_TNH))
    dq_TNH: Tensor | None = None

    def differentiate(
        k_SGH: Tensor, v_SGH: Tensor, source: int, sums_2SRH: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        nonlocal dq_TNH
        dk_SRH, dv_SRH = sums_2SRH
        k_SRH, v_SRH = (_repeated(x, setting.repeats) for x in (k_SGH, v_SGH))
        for call in calls[source]:
            dq, dk, dv = kernel.backward(
                grad, q, k_SRH, v_SRH, out, lse_TN, call,
                scale=setting.scale, softcap=setting.softcap,
            )  # fmt: skip
            dq_TNH = added(dq_TNH, call.q_rows, dq, tokens=plan.local.tokens, dtype=sums)
            dk_SRH = added(dk_SRH, call.k_rows, dk, tokens=len(k_SRH), dtype=sums)
            dv_SRH = added(dv_SRH, call.k_rows, dv, tokens=len(v_SRH), dtype=sums)
        if dk_SRH is None or dv_SRH is None:
            dk_SRH, dv_SRH = (torch.zeros_like(x, dtype=sums) for x in (k_SRH, v_SRH))
        return dk_SRH, dv_SRH

    ahead = _fetch(plan, k_TGH, v_TGH, 0, "attention backward rows")
    own = differentiate(k_TGH.to(dtype), v_TGH.to(dtype), plan.group, (None, None))
    dk_TGH, dv_TGH = (_summed(x, setting.repeats) for x in own)
    returning: _Rows | None = None
    for stage in range(len(plan.stages)):
        current = ahead
        ahead = _fetch(plan, k_TGH, v_TGH, stage + 1, "attention backward rows")
        partial: dict[int, Tensor] = {}
        for source, k_SGH, v_SGH in current.arrived(dtype):
            # Added up where they travel from.
            sums_2SRH = _zeros_repeated(k_SGH, setting.repeats, sums)
            differentiate(k_SGH, v_SGH, source, sums_2SRH.unbind())
            partial[source] = _summed(sums_2SRH, setting.repeats).to(dtype)
        posted = _return(plan, partial, k_TGH, stage, dtype)
        _land(plan, returning, dk_TGH, dv_TGH)
        returning = posted
    _land(plan, returning, dk_TGH, dv_TGH)
    if dq_TNH is None:
        dq_TNH = torch.zeros_like(q_TNH, dtype=sums, memory_format=torch.contiguous_format)
    return dq_TNH, dk_TGH, dv_TGH


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the log-sum-exp: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _repeated(x_SGH: Tensor, repeats: tuple[int, ...]) -> Tensor:
    """Each head as often as `repeats` says."""
    if not repeats:
        return x_SGH
    heads = zip(x_SGH.split(1, 1), repeats, strict=True)
    return torch.cat([x_S1H.expand(-1, count, -1) for x_S1H, count in heads], 1)


def _zeros_repeated(like_SGH: Tensor, repeats: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sums [2, S, R, H] for the gradients of keys and values as a kernel gets them."""
    rows, heads, width = like_SGH.shape
    return like_SGH.new_zeros(2, rows, sum(repeats) or heads, width, dtype=dtype)


def _summed(x_SRH: Tensor, repeats: tuple[int, ...]) -> Tensor:
    """The sum over the repetitions of each head, after any leading dims."""
    if not repeats:
        return x_SRH
    return torch.stack([x.sum(-2) for x in x_SRH.split(repeats, -2)], -2)


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
            message = k_TGH.new_empty(2, plan.local.send_rows[user], *k_TGH.shape[1:])
            for rows_SGH, x_TGH in zip(message, (k_TGH, v_TGH), strict=True):
                take_into(rows_SGH, x_TGH, send[user])
            sends.append((plan.counterpart(user), message))
        if plan.local.fetch[source]:
            shape = (2, plan.local.fetch[source], *k_TGH.shape[1:])
            buffer = torch.empty(shape, dtype=k_TGH.dtype, device=k_TGH.device)
            receives.append((plan.counterpart(source), buffer))
            buffers.append((source, buffer))
    return _Rows(plan.transport.exchange(sends, receives, operation=operation), buffers)


def _return(
    plan: BoundPlan, partial: dict[int, Tensor], k_TGH: Tensor, stage: int, dtype: torch.dtype
) -> _Rows:
    """Send the gradients of rows fetched in a stage to their owners, receive those of own rows."""
    sends = [(plan.counterpart(source), dkv_2SGH) for source, dkv_2SGH in partial.items()]
    receives: list[Message] = []
    buffers: list[tuple[int, Tensor]] = []
    for t in plan.stages[stage]:
        user = plan.user(t)
        if plan.local.send_rows[user]:
            shape = (2, plan.local.send_rows[user], *k_TGH.shape[1:])
            buffer = torch.empty(shape, dtype=dtype, device=k_TGH.device)
            receives.append((plan.counterpart(user), buffer))
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
