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


class _Load(NamedTuple):
    """Tokens and encoder tokens of some samples on each rank of their microbatch."""

    tokens: IntArray
    encoder_tokens: IntArray

    def plus(self, other: _Load) -> _Load:
        return _Load(self.tokens + other.tokens, self.encoder_tokens + other.encoder_tokens)


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
    for number, policy in enumerate(policies.tolist()):
        rows = layout.order[layout.offsets[number] : layout.offsets[number + 1]].tolist()
        whole = Part(int(layout.first[number]), int(layout.width[number]), policy, rows)
        apart: list[Part] = []
        if policy > POLICIES.index(memory.policies[0].policy) and len(rows) > 1:
            apart = list(_apart(layout, whole, samples, memory))
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


def _apart(
    layout: Layout, whole: Part, samples: SampleTable, memory: MemoryLimits
) -> Iterator[Part]:
    """Parts in which each sample has the policy that it needs alone, wide ones first."""
    bins: dict[tuple[bool, int, int], list[tuple[_Load, list[int]]]] = {}
    loads = {row: _load(layout, whole, row, samples) for row in whole.rows}
    for row in sorted(whole.rows, key=lambda row: -int(loads[row].tokens.max())):
        policy = _needed(loads[row], memory)
        narrow = _is_narrow(layout, row, samples)
        first = int(layout.sample_first[row]) if narrow else whole.first
        group = bins.setdefault((narrow, first, policy), [])
        for place, (load, rows) in enumerate(group):
            if _needed(both := load.plus(loads[row]), memory) <= policy:
                group[place] = (both, [*rows, row])
                break
        else:
            group.append((loads[row], [row]))
    for (narrow, first, policy), group in sorted(bins.items(), key=lambda entry: entry[0]):
        for _, rows in group:
            yield Part(first, 1 if narrow else whole.width, policy, rows)


def _is_narrow(layout: Layout, row: int, samples: SampleTable) -> bool:
    """Whether one rank holds a sample and encodes all of its units."""
    units = layout.unit_rank[samples.unit_offsets[row] : samples.unit_offsets[row + 1]]
    return bool(layout.sample_degree[row] == 1 and (units == layout.sample_first[row]).all())


def _load(layout: Layout, whole: Part, row: int, samples: SampleTable) -> _Load:
    tokens, encoder = np.zeros((2, whole.width), np.int64)
    degree, place = int(layout.sample_degree[row]), int(layout.sample_first[row]) - whole.first
    for position in range(degree):
        tokens[place + position] = cut_tokens(int(samples.llm_tokens[row]), degree, position)
    units = slice(samples.unit_offsets[row], samples.unit_offsets[row + 1])
    np.add.at(encoder, layout.unit_rank[units] - whole.first, samples.unit_tokens[units])
    return _Load(tokens, encoder)


def _needed(load: _Load, memory: MemoryLimits) -> int:
    """The first policy that holds a load; one past the last where none does."""
    for limits in memory.policies:
        if (limits.peak(load.tokens, load.encoder_tokens) <= memory.budget).all():
            return POLICIES.index(limits.policy)
    return len(POLICIES)


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
