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


def take(x: Tensor, rows: Rows) -> Tensor:
    """Some rows of `x`: a view for a slice, a copy for a list of rows."""
    if isinstance(rows, slice):
        # Much quicker than indexing, and there is a call for each short sequence.
        return x.narrow(0, rows.start, rows.stop - rows.start)
    return x.index_select(0, rows)


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


def merge(
    out_CNH: Tensor, lse_CN: Tensor, part_CNH: Tensor, part_lse_CN: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine two partial results over disjoint keys.

    Args:
        out_CNH: float32 or float64, the result so far.
        lse_CN: Its log-sum-exp, natural logarithm, of the same dtype.
        part_CNH: The result over other keys, of any floating dtype.
        part_lse_CN: Its log-sum-exp.

    Returns:
        The output and the log-sum-exp over both, in the dtype of `out_CNH`.
    """
    top_CN = torch.maximum(lse_CN, part_lse_CN)
    # Both -inf: subtracting -inf would give nan, subtracting 0 gives weights of 0.
    top_CN = top_CN.masked_fill(top_CN == -math.inf, 0.0)
    old_CN, new_CN = torch.exp(lse_CN - top_CN), torch.exp(part_lse_CN - top_CN)
    total_CN = old_CN + new_CN
    divisor_CN = total_CN.masked_fill(total_CN == 0, 1.0)
    kept_CNH = out_CNH * (old_CN / divisor_CN).unsqueeze(-1)
    both_CNH = torch.addcmul(
        kept_CNH, part_CNH.to(out_CNH.dtype), (new_CN / divisor_CN).unsqueeze(-1)
    )
    return both_CNH, torch.log(total_CN) + top_CN


def merge_rows_(
    out_TNH: Tensor,
    lse_TN: Tensor,
    rows: Rows,
    part_CNH: Tensor,
    part_lse_CN: Tensor,
    *,
    first: bool,
) -> None:
    """Fold a call's result into the accumulators, in place.

    Args:
        out_TNH: float32 or float64, the results so far.
        lse_TN: Their log-sum-exp.
        rows: Where the call's rows are.
        part_CNH: The call's result.
        part_lse_CN: Its log-sum-exp.
        first: Whether none of these rows has a result yet, so that copying does.
    """
    if not first:
        part_CNH, part_lse_CN = merge(
            take(out_TNH, rows), take(lse_TN, rows), part_CNH, part_lse_CN
        )
    put_(out_TNH, rows, part_CNH)
    put_(lse_TN, rows, part_lse_CN)


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
