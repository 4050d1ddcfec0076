"""The sum of token losses of a shard, without ever holding the logits of all its tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dynapar.data.samples import IGNORE

Head = Callable[[Tensor], Tensor]
"""(n, width) hidden states -> (n, vocabulary) logits."""


def token_loss_sum(hidden: Tensor, targets: Tensor, *, head: Head, chunk: int) -> Tensor:
    """Cross-entropy summed over the tokens that have a target.

    The logits of `chunk` tokens exist at a time, forward and backward: backward recomputes them.
    Tokens without a target never reach the head. Where no token has one, the result is an exact
    zero that keeps the graph, so that head and hidden states take part in backward all the same.

    Args:
        hidden: (n, width) hidden states of the last layer.
        targets: (n,) int64, IGNORE where a token has no loss; or (k, n) where one may have several.
        head: The output projection.
        chunk: Tokens at a time, 1 or more.

    Returns:
        Scalar, float32 (float64 for float64 hidden states).
    """
    loss = head(hidden[:0]).sum()
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    wanted = targets != IGNORE
    if not wanted.any():
        return loss
    hidden, targets = hidden[wanted.nonzero()[:, -1]], targets[wanted]
    for part, part_targets in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        loss = loss + checkpoint(_chunk_loss, part, part_targets, head, use_reentrant=False)
    return loss


def _chunk_loss(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits, targets, reduction="sum")
