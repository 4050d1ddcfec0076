"""Join attention results over disjoint sets of keys, as if softmax had seen them all.

Accumulators are float32, or float64 for float64 inputs: a ring adds up as many roundings as it has
ranks. A row that has seen no key has an output of 0 and a log-sum-exp of -inf, on either side.

Shape suffixes: T query rows of a shard, C query rows of a call, N query heads, H head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Rows = slice | Tensor
"""Rows of a tensor: a slice, or (n,) int64 without repetition."""


def count(rows: Rows) -> int:
    """How many rows these are."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def take(x: Tensor, rows: Rows) -> Tensor:
    """Some rows of `x`: a view for a slice, a copy for a list of rows."""
    if isinstance(rows, slice):
        # Much quicker than indexing, and there is a call for each short sequence.
        return x.narrow(0, rows.start, rows.stop - rows.start)
    return x.index_select(0, rows)


def take_into(out: Tensor, x: Tensor, rows: Rows) -> None:
    """Copy some rows of `x` to `out`, contiguous and of the same dtype."""
    if isinstance(rows, slice):
        out.copy_(take(x, rows))
    else:
        torch.index_select(x, 0, rows, out=out)


def put_(x: Tensor, rows: Rows, value: Tensor) -> None:
    """Overwrite some rows of `x`, in place."""
    if isinstance(rows, slice):
        take(x, rows).copy_(value)
    else:
        x.index_copy_(0, rows, value.to(x.dtype))


def add_(x: Tensor, rows: Rows, value: Tensor) -> None:
    """Add to some rows of `x` in the precision of `x`, in place."""
    if isinstance(rows, slice):
        take(x, rows).add_(value)
    else:
        x.index_add_(0, rows, value.to(x.dtype))


def added(
    total: Tensor | None, rows: Rows, value: Tensor, *, tokens: int, dtype: torch.dtype
) -> Tensor:
    """`total` with a value added to some of its rows, in place where it can.

    Args:
        total: The sum so far; None is 0, which a value for all rows simply replaces.
        rows: Where the value's rows are.
        value: Left to the sum.
        tokens: Rows of the sum.
        dtype: Of the sum.
    """
    if total is None:
        if rows == slice(0, tokens):
            return value.to(dtype).contiguous()
        total = value.new_zeros(tokens, *value.shape[1:], dtype=dtype)
    add_(total, rows, value)
    return total


def merge_(out_CNH: Tensor, lse_CN: Tensor, part_CNH: Tensor, part_lse_CN: Tensor) -> None:
    """Fold a partial result over other keys into one, in place.

    Args:
        out_CNH: float32 or float64, the result so far.
        lse_CN: Its log-sum-exp, natural logarithm, of the same dtype.
        part_CNH: The result over other keys, of any floating dtype.
        part_lse_CN: Its log-sum-exp.
    """
    total_CN = torch.logaddexp(lse_CN, part_lse_CN)
    share_CN = torch.sub(part_lse_CN, total_CN).exp_()
    # Both -inf: their difference is nan, and a row that has seen nothing stays as it is.
    share_CN.masked_fill_(total_CN == -math.inf, 0.0)
    # One pass over the output, where weighing both sides and adding up would take two.
    out_CNH.lerp_(part_CNH.to(out_CNH.dtype), share_CN.unsqueeze(-1))
    lse_CN.copy_(total_CN)


def folded(
    total: tuple[Tensor, Tensor] | None,
    rows: Rows,
    part: tuple[Tensor, Tensor],
    *,
    first: bool,
    tokens: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The result so far with a call's result folded in, in place where it can.

    Args:
        total: out_TNH and lse_TN; None before the first call of a shard.
        rows: Where the call's rows are.
        part: out_CNH and lse_CN of the call, left to the result.
        first: Whether none of these rows has a result yet, so that copying does.
        tokens: Rows of the shard.
        dtype: float32 or float64, of the result.
    """
    part_CNH, part_lse_CN = part
    if total is None:
        if rows == slice(0, tokens):
            return part_CNH.to(dtype).contiguous(), part_lse_CN.to(dtype).contiguous()
        total = nothing(part_CNH, tokens=tokens, dtype=dtype)
    out_TNH, lse_TN = total
    if first:
        put_(out_TNH, rows, part_CNH)
        put_(lse_TN, rows, part_lse_CN)
        return total
    out_CNH, lse_CN = take(out_TNH, rows), take(lse_TN, rows)
    merge_(out_CNH, lse_CN, part_CNH, part_lse_CN)
    if not isinstance(rows, slice):
        put_(out_TNH, rows, out_CNH)
        put_(lse_TN, rows, lse_CN)
    return total


def nothing(like_TNH: Tensor, *, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result of rows that see no key: out_TNH of 0 and lse_TN of -inf."""
    _, heads, width = like_TNH.shape
    out_TNH = like_TNH.new_zeros(tokens, heads, width, dtype=dtype)
    return out_TNH, like_TNH.new_full((tokens, heads), -math.inf, dtype=dtype)


def add_sinks_(out_TNH: Tensor, lse_TN: Tensor, sinks_N: Tensor) -> None:
    """Let one more key per head, with a logit of its own and value 0, take part; in place.

    Args:
        out_TNH: The merged result over all keys.
        lse_TN: Its log-sum-exp.
        sinks_N: The logits.
    """
    total_TN = torch.logaddexp(lse_TN, sinks_N.to(lse_TN.dtype))
    out_TNH.mul_(torch.exp(lse_TN - total_TN).unsqueeze(-1))
    lse_TN.copy_(total_TN)


def sinks_gradient(grad_TNH: Tensor, out_TNH: Tensor, lse_TN: Tensor, sinks_N: Tensor) -> Tensor:
    """This shard's part of the gradient of the sinks: (N,), in the dtype of `lse_TN`.

    Args:
        grad_TNH: Of the output.
        out_TNH: The output, sinks included.
        lse_TN: The log-sum-exp, sinks included.
        sinks_N: The logits.
    """
    share_TN = torch.exp(sinks_N.to(lse_TN.dtype) - lse_TN)
    return -(share_TN * (grad_TNH * out_TNH).sum(-1)).sum(0)
