"""Split microbatches that recompute only because they hold too much at once.

A step is planned with the capacities of one policy. Where those are wide for the sake of one long
sample, short ones are packed as wide, and recompute although they need not. Run one after the
other they fit under a policy that keeps more; each part costs a microbatch's fixed time, and what
is not repeated is saved. A split is made where the parts, on the same ranks and in the same place
of every queue, take less time than the whole, so that nothing that follows starts later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dynapar.costs import Costs
from dynapar.memory.limits import MemoryLimits
from dynapar.memory.policies import POLICIES
from dynapar.meta import IntArray, SampleTable
from dynapar.packing.ticks import Layout, Loads, cut_tokens
from dynapar.plan.pricing import price_layout


class Part(NamedTuple):
    """Samples of a microbatch that run together, apart from its others."""

    first: int
    width: int
    policy: int
    rows: list[int]


def split(
    layout: Layout,
    policies: IntArray,
    loads: Loads,
    *,
    samples: SampleTable,
    memory: MemoryLimits,
    costs: Costs,
    ranks_per_node: int,
) -> tuple[Layout, IntArray]:
    """The layout with microbatches split where that ends them sooner, and all policies.

    Args:
        layout: Of a step whose ranks meet once.
        policies: (B,) of each microbatch, by its place in `POLICIES`.
        loads: The layout's price under them.
        samples: The step's samples.
        memory: The budget.
        costs: Of microbatches that keep everything.
        ranks_per_node: As in `price_layout`.
    """
    parts: list[list[Part]] = []
    sizes = _Sizes(layout, samples, memory)
    for number, policy in enumerate(policies.tolist()):
        rows = layout.order[layout.offsets[number] : layout.offsets[number + 1]].tolist()
        whole = Part(int(layout.first[number]), int(layout.width[number]), policy, rows)
        apart: list[Part] = []
        if policy > POLICIES.index(memory.policies[0].policy) and len(rows) > 1:
            apart = list(sizes.apart(whole))
        parts.append(apart if len(apart) > 1 else [whole])
    if all(len(group) == 1 for group in parts):
        return layout, policies
    trial, chosen = _joined(layout, parts)
    priced = price_layout(
        trial, samples, costs, ranks_per_node=ranks_per_node, recompute=chosen, memory=memory
    )
    place = 0
    for number, group in enumerate(parts):
        ticks = priced.ticks[place : place + len(group)].tolist()
        place += len(group)
        width = int(layout.width[number])
        if len(group) > 1 and _longest(group, ticks, width) >= loads.ticks[number]:
            rows = [row for part in group for row in part.rows]
            parts[number] = [Part(int(layout.first[number]), width, int(policies[number]), rows)]
    return _joined(layout, parts)


def _longest(group: Sequence[Part], ticks: Sequence[int], width: int) -> int:
    """Time from the first part to the last: as wide as the whole one by one, then rank by rank."""
    wide, own = 0, {0: 0}
    for part, t in zip(group, ticks, strict=True):
        if part.width == width:
            wide += t
        else:
            own[part.first] = own.get(part.first, 0) + t
    return wide + max(own.values())


class _Sizes:
    """What samples take of a rank's budget, as shares that add up to at most 1 where they fit.

    A share is the largest over the moments that may be the peak. Shares that sum to 1 or less fit
    at every moment, so what is packed by them fits; where one moment rules, they are exact.
    """

    def __init__(self, layout: Layout, samples: SampleTable, memory: MemoryLimits) -> None:
        self.first = layout.sample_first.tolist()
        self.degree = layout.sample_degree.tolist()
        self.unit_rank = layout.unit_rank.tolist()
        self.tokens = samples.llm_tokens.tolist()
        self.offsets = samples.unit_offsets.tolist()
        self.units = samples.unit_tokens.tolist()
        self.policies = [
            (
                POLICIES.index(limits.policy),
                [
                    (piece.token / left, piece.encoder_token / left)
                    for piece in limits.pieces
                    if (left := memory.budget - piece.fixed) > 0
                ],
            )
            for limits in memory.policies
        ]
        self.alone = self._alone(samples)

    def _alone(self, samples: SampleTable) -> list[tuple[int, float]]:
        """Of each sample on one rank: the first policy that holds it, if any, and its share."""
        tokens = samples.llm_tokens.astype(np.float64)
        sums = np.concatenate(([0], np.cumsum(samples.unit_tokens)))
        encoder = (sums[samples.unit_offsets[1:]] - sums[samples.unit_offsets[:-1]]).astype(float)
        policy, share = np.full(len(tokens), len(POLICIES)), np.ones(len(tokens))
        for number, pieces in reversed(self.policies):
            own = np.max([a * tokens + e * encoder for a, e in pieces], axis=0)
            policy[own <= 1.0] = number
            share[own <= 1.0] = own[own <= 1.0]
        return list(zip(policy.tolist(), share.tolist(), strict=True))

    def apart(self, whole: Part) -> Iterator[Part]:
        """Parts in which each sample has the policy that it needs alone, wide ones first."""
        bins: dict[tuple[bool, int, int], list[tuple[list[float], list[int]]]] = {}
        for row in sorted(whole.rows, key=lambda row: -self.tokens[row] // self.degree[row]):
            narrow = self._is_narrow(row)
            first, width = (self.first[row], 1) if narrow else (whole.first, whole.width)
            if narrow:
                policy, share = self.alone[row]
                shares = [share]
            else:
                policy, shares = self._needed(row, first, width, otherwise=whole.policy)
            group = bins.setdefault((narrow, first, policy), [])
            for held, rows in group:
                if all(a + b <= 1.0 for a, b in zip(held, shares, strict=True)):
                    held[:] = [a + b for a, b in zip(held, shares, strict=True)]
                    rows.append(row)
                    break
            else:
                group.append((shares, [row]))
        for (narrow, first, policy), group in sorted(bins.items(), key=lambda entry: entry[0]):
            for _, rows in group:
                yield Part(first, 1 if narrow else whole.width, policy, rows)

    def _is_narrow(self, row: int) -> bool:
        """Whether one rank holds a sample and encodes all of its units."""
        own = self.unit_rank[self.offsets[row] : self.offsets[row + 1]]
        return bool(self.degree[row] == 1 and all(rank == self.first[row] for rank in own))

    def _needed(
        self, row: int, first: int, width: int, *, otherwise: int
    ) -> tuple[int, list[float]]:
        """The first policy that holds a sample, and its share of each rank's budget."""
        tokens, encoder = [0] * width, [0] * width
        degree = self.degree[row]
        for position in range(degree):
            place = self.first[row] - first + position
            tokens[place] = cut_tokens(self.tokens[row], degree, position)
        for unit in range(self.offsets[row], self.offsets[row + 1]):
            encoder[self.unit_rank[unit] - first] += self.units[unit]
        shares = [1.0] * width
        for policy, pieces in self.policies:
            shares = [
                max(a * t + e * m for a, e in pieces) for t, m in zip(tokens, encoder, strict=True)
            ]
            if max(shares) <= 1.0:
                return policy, shares
        return otherwise, shares


def _joined(layout: Layout, parts: Sequence[Sequence[Part]]) -> tuple[Layout, IntArray]:
    """A layout of all parts in order, and their policies."""
    flat = [part for group in parts for part in group]
    counts = [len(part.rows) for part in flat]
    joined = layout._replace(
        first=np.array([part.first for part in flat], np.int64),
        width=np.array([part.width for part in flat], np.int64),
        wave=np.zeros(len(flat), np.int64),
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        order=np.array([row for part in flat for row in part.rows], np.int64),
    )
    return joined, np.array([part.policy for part in flat], np.int64)
