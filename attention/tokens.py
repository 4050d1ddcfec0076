"""Cut tensors that have an entry for each token into shards, and put shards together again.

One index map serves token ids, targets, loss weights, position ids of any number of rows, hidden
states: whatever has the tokens of the packed microbatch along one of its dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import AttentionPlan


def shard(packed: Tensor, plan: AttentionPlan, position: int, *, dim: int = -1) -> Tensor:
    """What one position holds of a tensor; differentiable.

    Args:
        packed: The sequences one after another along `dim`, any other dims, such as (4, 1, tokens).
        plan: Of the microbatch.
        position: 0 to degree - 1.
        dim: Which dim the tokens are.

    Raises:
        ValueError: The tensor does not have as many tokens as the plan.
    """
    _check(packed, sum(plan.lengths), dim, "the packed microbatch")
    index = torch.from_numpy(plan.index(position)).to(packed.device)
    return packed.index_select(dim, index)


def unshard(shards: Sequence[Tensor], plan: AttentionPlan, *, dim: int = -1) -> Tensor:
    """The packed tensor from the shards of all positions; differentiable.

    Args:
        shards: By position, equal but for `dim`; that of a position without tokens is empty.
        plan: Of the microbatch.
        dim: Which dim the tokens are.

    Raises:
        ValueError: Shards are missing, or one does not have as many tokens as its position.
    """
    if len(shards) != plan.degree:
        raise ValueError(
            f"{len(shards)} shards were given of a microbatch of degree {plan.degree}; expected "
            "one of each position: gather them from all ranks of the ring"
        )
    for position, part in enumerate(shards):
        _check(part, plan.tokens[position], dim, f"position {position}")
    order = torch.cat([torch.from_numpy(plan.index(p)) for p in range(plan.degree)])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return torch.cat(list(shards), dim).index_select(dim, back.to(shards[0].device))


def _check(x: Tensor, tokens: int, dim: int, whose: str) -> None:
    if x.shape[dim] != tokens:
        raise ValueError(
            f"a tensor of shape {list(x.shape)} has {x.shape[dim]} entries in dim {dim}; expected "
            f"{tokens}, the tokens of {whose}: name the dim that the tokens are"
        )
