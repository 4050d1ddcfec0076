"""Compute a ring's attention by trading rows for heads, inside groups of the ring.

The members of a group send each other their rows of the heads that each computes, so that every one
of them holds all rows of the group for its own heads. It computes these as `staged` does: alone
where the ring is one group, else with its counterparts in the other groups. Results go back to the
owners of the rows. Gradients of a key/value head that several members read are summed there, and
travel as wide as they are summed; all others are complete and travel in the dtype of the input.

Backward trades again instead of keeping what forward traded, which would be as much memory as
queries, keys, values and outputs together. Autograd neither schedules nor differentiates
communication, and all ranks issue the same exchanges in the same order: the trade of all members of
a group, what `staged` does, the trade back.

Shape suffixes: T rows of this shard, R rows of its group, N query heads, G key/value heads, H head
dimension; X is some heads, of either kind. Of R rows there are only those heads that this rank
computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from . import staged
from .exchange import Message
from .heads import Heads, kv_is_shared, share_heads
from .merge import Rows, count, put_, sinks_gradient, take, take_into
from .plan import BoundPlan
from .staged import Setting, accumulator

Kind = Literal["q", "kv"]
"""Whether a tensor's dim 1 is query heads or key/value heads."""

_Part = tuple[Tensor, Rows]
"""Rows of a tensor, not yet copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traded:
    """What of one tensor is on its way: its kind, and what shape and dtype a row and head have."""

    kind: Kind
    dtype: torch.dtype
    width: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, kind: Kind) -> _Traded:
        return cls(kind=kind, dtype=x.dtype, width=tuple(x.shape[2:]))

    def count(self, rows: int, heads: int) -> int:
        return rows * heads * math.prod(self.width)


def forward(
    q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, sinks_N: Tensor | None, setting: Setting
) -> tuple[Tensor, Tensor]:
    """As `staged.forward`."""
    plan, heads = setting.plan, _heads(q_TNH, k_TGH, setting)
    mine = heads[plan.member]
    q_RNH, k_RGH, v_RGH = _to_heads(
        plan, heads, [(q_TNH, "q"), (k_TGH, "kv"), (v_TGH, "kv")], "attention forward trade"
    )
    if mine.q_heads:
        sinks = None if sinks_N is None else sinks_N[slice(*mine.q)]
        inner = replace(setting, repeats=mine.repeats)
        out_RNH, lse_RN = staged.forward(q_RNH, k_RGH, v_RGH, sinks, inner)
    else:
        out_RNH, lse_RN = q_RNH, q_RNH[..., 0].to(accumulator(q_TNH.dtype))
    out_TNH = torch.empty(q_TNH.shape, dtype=out_RNH.dtype, device=q_TNH.device)
    lse_TN = torch.empty(q_TNH.shape[:2], dtype=lse_RN.dtype, device=q_TNH.device)
    back = _to_rows(plan, heads, [(lse_RN, "q"), (out_RNH, "q")], "attention forward results")
    for theirs, (lse, out) in back:
        out_TNH[:, slice(*theirs.q)] = out
        lse_TN[:, slice(*theirs.q)] = lse
    return out_TNH, lse_TN


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
    """As `staged.backward`."""
    plan, heads = setting.plan, _heads(q_TNH, k_TGH, setting)
    given, sums = q_TNH.dtype, accumulator(q_TNH.dtype)
    mine = heads[plan.member]
    # What one member alone computes needs no sum any more, so it is rounded before it travels.
    kv = sums if kv_is_shared(heads) else given
    lse_RN, grad_RNH, q_RNH, k_RGH, v_RGH, out_RNH = _to_heads(
        plan,
        heads,
        [
            (lse_TN, "q"),
            (grad_TNH, "q"),
            (q_TNH, "q"),
            (k_TGH, "kv"),
            (v_TGH, "kv"),
            (out_TNH, "q"),
        ],
        "attention backward trade",
    )
    if mine.q_heads:
        inner = replace(setting, repeats=mine.repeats)
        dq_RNH, dk_RGH, dv_RGH = staged.gradients(
            grad_RNH, q_RNH, k_RGH, v_RGH, out_RNH, lse_RN, inner
        )
    else:
        dq_RNH, dk_RGH, dv_RGH = q_RNH, k_RGH, v_RGH
    dq_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    dk_TGH, dv_TGH = (torch.zeros(k_TGH.shape, dtype=sums, device=k_TGH.device) for _ in range(2))
    back = _to_rows(
        plan,
        heads,
        [(dk_RGH.to(kv), "kv"), (dv_RGH.to(kv), "kv"), (dq_RNH.to(given), "q")],
        "attention backward gradients traded",
    )
    for theirs, (dk, dv, dq) in back:
        dq_TNH[:, slice(*theirs.q)] = dq
        dk_TGH[:, slice(*theirs.kv)] += dk
        dv_TGH[:, slice(*theirs.kv)] += dv
    dsinks_N = None
    if sinks_N is not None:
        dsinks_N = sinks_gradient(grad_TNH.to(sums), out_TNH.to(sums), lse_TN, sinks_N)
        dsinks_N = dsinks_N.to(sinks_N.dtype)
    return dq_TNH, dk_TGH.to(given), dv_TGH.to(given), dsinks_N


def _heads(q_TNH: Tensor, k_TGH: Tensor, setting: Setting) -> tuple[Heads, ...]:
    return share_heads(q_TNH.shape[1], k_TGH.shape[1], setting.plan.scheme.share)


def _of(heads: Heads, kind: Kind) -> tuple[int, int]:
    return heads.q if kind == "q" else heads.kv


def _count(heads: Heads, kind: Kind) -> int:
    return heads.q_heads if kind == "q" else heads.kv_heads


def _to_heads(
    plan: BoundPlan,
    heads: Sequence[Heads],
    tensors: Sequence[tuple[Tensor, Kind]],
    operation: str,
) -> list[Tensor]:
    """All rows of the group for this member's heads, from this shard's rows of all heads.

    Args:
        plan: Of the microbatch.
        heads: Of each member.
        tensors: [T, heads, ...] each and their kind, the widest dtypes first.
        operation: For recordings.
    """
    everything = slice(0, plan.tokens)
    parts: list[list[_Part]] = [
        [(x_TX[:, slice(*_of(theirs, kind))], everything) for x_TX, kind in tensors]
        for theirs in heads
    ]
    mine, device = heads[plan.member], tensors[0][0].device
    rows = plan.local.members_on(device)
    kinds = [_Traded.of(x_TX, kind) for x_TX, kind in tensors]
    shapes = [
        [(plan.plan.tokens[position], _count(mine, traded.kind)) for traded in kinds]
        for position in _positions(plan)
    ]
    whole = [
        torch.empty(
            plan.local.tokens, _count(mine, traded.kind), *traded.width,
            dtype=traded.dtype, device=device,
        )
        for traded in kinds
    ]  # fmt: skip
    for member, received in _trade(plan, parts, kinds, shapes, operation):
        for x_RX, part in zip(whole, received, strict=True):
            put_(x_RX, rows[member], part)
    return whole


def _to_rows(
    plan: BoundPlan,
    heads: Sequence[Heads],
    tensors: Sequence[tuple[Tensor, Kind]],
    operation: str,
) -> Iterator[tuple[Heads, Sequence[Tensor]]]:
    """For each member in order, its heads and, for these, this shard's rows of each tensor.

    Args:
        plan: Of the microbatch.
        heads: Of each member.
        tensors: [R, this member's heads, ...] each and their kind, the widest dtypes first.
        operation: For recordings.
    """
    rows = plan.local.members_on(tensors[0][0].device)
    parts: list[list[_Part]] = [[(x_RX, theirs) for x_RX, _ in tensors] for theirs in rows]
    kinds = [_Traded.of(x_RX, kind) for x_RX, kind in tensors]
    shapes = [[(plan.tokens, _count(theirs, traded.kind)) for traded in kinds] for theirs in heads]
    for member, received in _trade(plan, parts, kinds, shapes, operation):
        yield heads[member], received


def _positions(plan: BoundPlan) -> range:
    """Of the members of this group."""
    first = plan.position - plan.member
    return range(first, first + plan.scheme.share)


def _trade(
    plan: BoundPlan,
    parts: Sequence[Sequence[_Part]],
    kinds: Sequence[_Traded],
    shapes: Sequence[Sequence[tuple[int, int]]],
    operation: str,
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Send each member its parts in one message, and give what comes from each, in order.

    Args:
        plan: Of the microbatch.
        parts: For each member, what goes there of each tensor; one's own needs no message. Copied
            once, into the message.
        kinds: Of each tensor, the widest dtypes first, so that all lie aligned in a message.
        shapes: For each member, the rows and heads that come from there of each tensor.
        operation: For recordings.
    """
    device = parts[0][0][0].device
    sends: list[Message] = []
    receives: list[Message] = []
    arriving: list[Sequence[Tensor]] = []
    for member, rank in enumerate(plan.members):
        if member == plan.member:
            arriving.append([take(x, rows) for x, rows in parts[member]])
            continue
        given = [(count(rows), x.shape[1]) for x, rows in parts[member]]
        message, views = _message(kinds, given, device)
        for view, (x, rows) in zip(views, parts[member], strict=True):
            take_into(view, x, rows)
        buffer, received = _message(kinds, shapes[member], device)
        arriving.append(received)
        if message.numel():
            sends.append((rank, message))
        if buffer.numel():
            receives.append((rank, buffer))
    plan.transport.exchange(sends, receives, operation=operation).wait()
    yield from enumerate(arriving)


def _message(
    kinds: Sequence[_Traded], shapes: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """A buffer of bytes, and the tensors that lie in it one after the other."""
    sizes = [
        traded.count(*shape) * traded.dtype.itemsize
        for traded, shape in zip(kinds, shapes, strict=True)
    ]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    views = [
        part.view(traded.dtype).view(*shape, *traded.width)
        for part, traded, shape in zip(buffer.split(sizes), kinds, shapes, strict=True)
    ]
    return buffer, views
