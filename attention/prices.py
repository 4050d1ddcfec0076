"""Predict what a scheme of attention costs: seconds, bytes and messages of one layer.

The formula is that of docs/decisions/0009-schemes.md. d positions stand in d / u groups of u. One
position computes forward in A = 4 * pairs * q_heads * head_dim / F(n * u) seconds if heads are cut
evenly (with the busiest member's share of them instead), where F(m) = flops * m / (m + half_rate
tokens), and backward in 2.5 * A. Between groups, each of d / u - 1 rounds brings the needed rows of
another group's keys and values for the member's own heads, and takes as long to compute as a
group's own rows. A stage's rows travel while the stage before it computes; in backward gradients
of the same size return while the next one computes. Inside a group, rows are traded for heads
before and after, and nothing hides that. An exchange takes its latency, whatever its messages, and
their bytes over their links; links inside a node and across nodes work at once.

Imports numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .heads import Heads, kv_is_shared, share_heads

IntArray = NDArray[np.int64]

BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward."""

SUM_BYTES = 4
"""Of a log-sum-exp, or of a gradient that is yet to be added to others, on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Attention of one layer over one microbatch, shared evenly."""

    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of a number of q, k, v and their gradients on the wire."""
    tokens: float
    """Rows of each position's shard."""
    pairs: float
    """Visible (query, key) pairs of each position."""
    needed: float = 0.75
    """Part of another position's key rows that a position needs: 0.75 for causal masks in zigzag,
    1 for full ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What computing and moving cost on the ranks of a ring."""

    nodes: tuple[int, ...]
    """For each position, the node that its rank is on."""
    flops: float
    """Attention FLOPs per second of a rank, far from few rows."""
    bytes_per_s_in_node: float
    """That a rank sends, and receives, inside its node."""
    bytes_per_s_across: float
    """Likewise to other nodes."""
    latency: float = 0.0
    """Seconds of an exchange: of messages that are issued at once."""
    half_rate_tokens: float = 0.0
    """Rows that a rank computes together at which half of `flops` is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What the attention of one layer costs, forward and backward."""

    seconds: float
    """Until the slowest position is done."""
    waiting: float
    """Seconds of these in which it only waits for messages."""
    bytes: float
    """That the position which sends most sends."""
    exchanges: int
    """How often messages are issued, each of which takes the latency."""


def price(layer: Layer, links: Links, *, share: int, stages: Sequence[Sequence[int]]) -> Price:
    """Predict one layer's attention under a scheme.

    Args:
        layer: What is computed and moved.
        links: What that costs.
        share: Positions of a group (`Scheme.share`).
        stages: Rounds of each exchange between groups (`Scheme.stages`).

    Raises:
        ValueError: `links` has not one node for each position of the scheme.
    """
    groups = 1 + sum(len(rounds) for rounds in stages)
    if len(links.nodes) != share * groups:
        raise ValueError(
            f"links has nodes of {len(links.nodes)} positions for a scheme of {share * groups}; "
            "expected one for each: give the node of each rank of the ring"
        )
    heads = share_heads(layer.q_heads, layer.kv_heads, share)
    nodes = np.array(links.nodes).reshape(groups, share)
    rows = layer.tokens * share
    busiest = max(h.q_heads for h in heads)
    flops = links.flops * rows / (rows + links.half_rate_tokens) if rows else links.flops
    block = 4 * layer.pairs * share * busiest * layer.head_dim / flops / groups
    most_kv = max(h.kv_heads for h in heads)
    fetched = layer.needed * rows * (2 * most_kv * layer.head_dim * layer.itemsize)
    wires = [_stage_seconds(nodes, rounds, fetched, links) for rounds in stages]
    computing = [block * count for count in (1, *map(len, stages))]
    forward = _overlapped(computing, [*wires, 0.0])
    # Windows of compute, with the rows under way in each, and the gradients of two stages before.
    backward = _overlapped(
        [*(BACKWARD * x for x in computing), 0.0],
        [a + b for a, b in zip([*wires, 0.0, 0.0], [0.0, 0.0, *wires], strict=True)],
    )
    trades = _widths(heads, layer)
    traded = math.fsum(_trade(nodes, widths, layer.tokens, links) for widths in trades)
    seconds = forward + backward + traded
    return Price(
        seconds=seconds,
        waiting=seconds - (1 + BACKWARD) * math.fsum(computing),
        bytes=3 * fetched * (groups - 1) + layer.tokens * int(np.sum(trades, axis=0).sum(1).max()),
        exchanges=3 * len(stages) + 4 * (share > 1),
    )


def staged_bytes(rows: int, *, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that one rank receives in a layer's forward by stages; backward moves twice that.

    Args:
        rows: Key rows that the rank fetches (`AttentionPlan.fetched`).
        kv_heads: Heads of keys and values that it computes.
        head_dim: Width of a head.
        itemsize: Bytes of a number on the wire.
    """
    return 2 * rows * kv_heads * head_dim * itemsize


def _widths(heads: Sequence[Heads], layer: Layer) -> list[IntArray]:
    """Bytes a row that each member sends each other: in and back, forward and backward.

    Integers, so that their sums are the same on every machine.
    """
    number = layer.head_dim * layer.itemsize
    q = np.array([h.q_heads for h in heads], dtype=np.int64)
    kv = np.array([h.kv_heads for h in heads], dtype=np.int64)
    lse, others = SUM_BYTES * q, 1 - np.eye(len(heads), dtype=np.int64)
    gradient = max(SUM_BYTES, layer.itemsize) if kv_is_shared(heads) else layer.itemsize
    # Rows go to those who compute the heads, and results come back from them.
    return [
        others * (q + 2 * kv) * number,
        others * (q * number + lse)[:, None],
        others * ((3 * q + 2 * kv) * number + lse),
        others * (q * number + 2 * kv * layer.head_dim * gradient)[:, None],
    ]


def _trade(nodes: IntArray, widths: IntArray, tokens: float, links: Links) -> float:
    """Seconds of a trade inside the groups, that of the slowest member.

    Args:
        nodes: (groups, share), of each member.
        widths: (share, share), bytes a row that one member sends another.
        tokens: Rows of a member.
        links: What moving costs.
    """
    share = nodes.shape[1]
    if share == 1:
        return 0.0
    across = nodes[:, :, None] != nodes[:, None, :]
    slowest = 0.0
    for kind, rate in (
        (across, links.bytes_per_s_across),
        (~across, links.bytes_per_s_in_node),
    ):
        moved = np.where(kind, widths, 0)
        most = max(int(moved.sum(1).max()), int(moved.sum(2).max()))
        slowest = max(slowest, most * tokens / rate)
    return slowest + links.latency


def _stage_seconds(nodes: IntArray, rounds: Sequence[int], size: float, links: Links) -> float:
    """Seconds of one stage's messages of `size` bytes each, those of the slowest position."""
    across = np.zeros(nodes.shape, dtype=np.int64)
    for t in rounds:
        across += nodes != np.roll(nodes, t, axis=0)
    most_across, most_inside = int(across.max()), len(rounds) - int(across.min())
    moving = max(
        most_across * size / links.bytes_per_s_across,
        most_inside * size / links.bytes_per_s_in_node,
    )
    return moving + links.latency


def _overlapped(computing: Sequence[float], moving: Sequence[float]) -> float:
    """Seconds of windows, each of which ends when its compute and its messages are through."""
    return math.fsum(max(a, b) for a, b in zip(computing, moving, strict=True))
