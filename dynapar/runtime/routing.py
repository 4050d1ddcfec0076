"""Carry encoded rows to the owners of their tokens, and their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dynapar.attention.exchange import Exchange
from dynapar.runtime.layout import Route


class _RouteRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, route: Route, ranks: Sequence[int], transport: Exchange
    ) -> Tensor:
        ctx.route, ctx.ranks, ctx.transport, ctx.shape = route, ranks, transport, rows.shape
        parts = [rows[index] for index in route.sends]
        return torch.cat(_swap(parts, route.counts, ranks, transport, "embedding rows"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        route = ctx.route
        counts = [len(index) for index in route.sends]
        parts = list(grad.contiguous().split(list(route.counts)))
        back = _swap(parts, counts, ctx.ranks, ctx.transport, "embedding gradients")
        out = grad.new_zeros(ctx.shape)
        out[torch.cat(route.sends)] = torch.cat(back)  # a row has one owner: nothing to add up
        return out, None, None, None


def route_rows(rows: Tensor, *, route: Route, ranks: Sequence[int], transport: Exchange) -> Tensor:
    """Send this rank's encoded rows to the owners of their tokens; differentiable.

    All ranks of a ring call it in a microbatch that has media, also with nothing to send, and
    `rows` requires a gradient on all of them or on none: what is trained decides that, never
    whether this rank has media. Otherwise some ranks wait in backward for others that never come.

    Args:
        rows: (m, width), what this rank encoded.
        route: Of this rank in the microbatch.
        ranks: The ring.
        transport: Carries the ring's messages.

    Returns:
        (arriving, width), in the order of `route.places`.
    """
    received = _RouteRows.apply(rows, route, ranks, transport)  # type: ignore[no-untyped-call]
    return torch.index_select(received, 0, route.order)


def _swap(
    parts: Sequence[Tensor],
    counts: Sequence[int],
    ranks: Sequence[int],
    transport: Exchange,
    operation: str,
) -> list[Tensor]:
    """Part p goes to the rank at position p; counts[p] rows come from there."""
    here = ranks.index(transport.rank)
    buffers = [parts[here].new_empty((count, *parts[here].shape[1:])) for count in counts]
    buffers[here] = parts[here]
    others = [p for p in range(len(ranks)) if p != here]
    transport.exchange(
        [(ranks[p], parts[p]) for p in others],
        [(ranks[p], buffers[p]) for p in others],
        operation=operation,
    ).wait()
    return buffers
