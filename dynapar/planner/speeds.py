"""Deal a planned step again where ranks are not equally fast.

The planner lays a step out for equal ranks. Here its samples that fit one rank are dealt anew, the
dearest first, each to the rank that would end first with it; rings keep their degrees and move, in
their node, to where they end first. Where all ranks must run equally many microbatches, rings and
the places of microbatches in the queues stay, and samples change their microbatch. Within a budget
of bytes a sample goes where its rank's bytes hold it, under the cheapest recompute policy that
holds it alone. The result is taken where it ends sooner at these speeds than the plan as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import Costs, coefficients
from dynapar.plan import MicroBatch, StepPlan
from dynapar.plan.pricing import price_layout
from dynapar.planner.alone import Alone
from dynapar.planner.build import GivenMicroBatch, GivenSample, assemble
from dynapar.planner.config import PlannerConfig
from dynapar.planner.recompute import relaxed
from dynapar.speeds import FULL

SHORT = 4
"""What takes one rank at most one part in this of the step is dealt whole, also out of rings."""


def deal_by_speed(
    plan: StepPlan,
    *,
    speeds: Sequence[int],
    cluster: Cluster,
    costs: Costs,
    config: PlannerConfig,
) -> StepPlan:
    """The plan, or one of the same samples that ends sooner on ranks of these speeds.

    Its times stay those of ranks of full speed; `paced_makespan` has the others. A plan whose ranks
    meet in waves is kept as it is: `dynapar train`, which alone follows speeds, runs none.

    Args:
        plan: For equal ranks.
        speeds: By rank, in thousandths of the fastest rank's.
        cluster: Of the plan.
        costs: Of the plan.
        config: Of the plan.
    """
    unknown = plan.memory is None and plan.columns.recompute.any()
    if plan.sync != "step" or unknown or all(speed == FULL for speed in speeds):
        return plan
    deal = _Deal(plan, speeds, costs)
    given = deal.swapped() if plan.equal_counts else [*deal.rings(), *deal.singles()]
    if given is None:
        return plan
    dealt = assemble(
        plan.samples,
        microbatches=given,
        step=plan.step,
        cluster=cluster,
        costs=costs,
        config=replace(
            config, memory=None, capacity=plan.capacity, encoder_capacity=plan.encoder_capacity
        ),
        encoders=deal.encoders,
    )
    if plan.memory is not None:
        dealt = relaxed(dealt, memory=plan.memory, costs=costs, bound=plan.lower_bound)
        dealt = replace(dealt, homogeneous_makespan=0)
    if paced_makespan(dealt, costs, speeds) >= paced_makespan(plan, costs, speeds):
        return plan
    return replace(dealt, plan_seconds=plan.plan_seconds)


def paced_makespan(plan: StepPlan, costs: Costs, speeds: Sequence[int]) -> int:
    """Ticks until the last rank ends, where each takes `FULL` / speed times as long.

    Args:
        plan: With sync "step".
        costs: Of the plan.
        speeds: By rank, in thousandths of the fastest rank's.
    """
    layout = plan.layout()
    loads = price_layout(
        layout,
        plan.samples,
        costs,
        ranks_per_node=plan.ranks_per_node,
        recompute=plan.columns.recompute,
        memory=plan.memory,
    )
    fixed = coefficients(costs, ranks_per_node=plan.ranks_per_node).fixed
    own = loads.parts.sum(axis=1) + fixed
    free = [0] * plan.ranks
    for b, (first, width) in enumerate(
        zip(layout.first.tolist(), layout.width.tolist(), strict=True)
    ):
        members = range(first, first + width)
        row = int(loads.starts[b]) - first
        lasts = max(_slowed(int(own[row + rank]), speeds[rank]) for rank in members)
        end = max(free[rank] for rank in members) + lasts
        for rank in members:
            free[rank] = end
    return max(free)


def _slowed(ticks: int, speed: int) -> int:
    """Half up, like every rounding to ticks."""
    return (2 * ticks * FULL + speed) // (2 * speed)


class _Ring(NamedTuple):
    ranks: tuple[int, ...]
    samples: list[GivenSample]
    ticks: int


class _Deal:
    """A step in the middle of being dealt again.

    Attributes:
        encoders: For each sample's row, the rank of each of its encoder units: a ring's keep their
            place in it, which the plan found room for; others are on their sample's rank.
    """

    def __init__(self, plan: StepPlan, speeds: Sequence[int], costs: Costs) -> None:
        self._plan, self._speeds = plan, speeds
        self._free = [0] * plan.ranks
        self._alone = Alone(plan, costs)
        self._pool: list[int] = []
        self.encoders: list[tuple[int, ...]] = [()] * len(plan.samples)
        for micro in plan.microbatches:
            for place in micro.placements:
                self.encoders[place.sample] = place.encoders

    def rings(self) -> list[GivenMicroBatch]:
        """Microbatches of several ranks, dearest first, where each ends first."""
        found = [ring for each in self._plan.microbatches if (ring := self._ring(each))]
        placed: list[GivenMicroBatch] = []
        for ring in sorted(found, key=lambda ring: -ring.ticks):
            shift = min(self._shifts(ring.ranks), key=lambda by: (self._end(ring, by), abs(by), by))
            end = self._end(ring, shift)
            ranks = tuple(rank + shift for rank in ring.ranks)
            for rank in ranks:
                self._free[rank] = end
            samples = [(row, tuple(r + shift for r in own)) for row, own in ring.samples]
            for row, _ in samples:
                self.encoders[row] = tuple(rank + shift for rank in self.encoders[row])
            placed.append((ranks, samples))
        return placed

    def _ring(self, micro: MicroBatch) -> _Ring | None:
        """What must stay together of a microbatch; the rest goes to the pool."""
        kept: list[GivenSample] = []
        for place in micro.placements:
            row = place.sample
            short = (
                len(place.ranks) == 1 or SHORT * int(self._alone.ticks[row]) <= self._plan.makespan
            )
            if short and self._alone.fits(row):
                self._pool.append(row)
            else:
                kept.append((row, place.ranks))
        return _Ring(micro.ranks, kept, micro.ticks) if kept else None

    def _shifts(self, ranks: tuple[int, ...]) -> list[int]:
        """How far a ring may move: not at all, or anywhere in its node."""
        node = self._plan.ranks_per_node
        first, width = ranks[0], len(ranks)
        if width >= node:
            return [0]
        begin = first - first % node
        step = width if self._plan.rings.windows == "aligned" else 1
        return [start - first for start in range(begin, begin + node - width + 1, step)]

    def _end(self, ring: _Ring, shift: int) -> int:
        members = [rank + shift for rank in ring.ranks]
        lasts = max(_slowed(ring.ticks, self._speeds[rank]) for rank in members)
        return max(self._free[rank] for rank in members) + lasts

    def singles(self) -> list[GivenMicroBatch]:
        """Each sample of the pool on the rank that ends first with it, packed."""
        mine: list[list[int]] = [[] for _ in self._free]
        free, speeds = np.array(self._free, np.int64), np.array(self._speeds, np.int64)
        for row in self._dearest_first():
            ends = free + (2 * self._alone.ticks[row] * FULL + speeds) // (2 * speeds)
            rank = int(np.argmin(ends))
            free[rank] = ends[rank]
            mine[rank].append(row)
        return [
            self._on(rank, pack)
            for rank, rows in enumerate(mine)
            for pack in self._alone.packs(rows)
        ]

    def _dearest_first(self) -> list[int]:
        return sorted(self._pool, key=lambda row: (-int(self._alone.ticks[row]), row))

    def _on(self, rank: int, rows: Sequence[int]) -> GivenMicroBatch:
        for row in rows:
            self.encoders[row] = (rank,) * len(self.encoders[row])
        return (rank,), [(row, (rank,)) for row in rows]

    def swapped(self) -> list[GivenMicroBatch] | None:
        """The same microbatches in the same places, those of one rank with other samples.

        Returns:
            None where some sample found no room, so that the plan had better stay as it is.
        """
        micros = self._plan.microbatches
        numbers = [n for n, micro in enumerate(micros) if len(micro.ranks) == 1]
        ranks = np.array([micros[n].ranks[0] for n in numbers], np.int64)
        speeds = np.array(self._speeds, np.int64)[ranks]
        for micro in micros:
            if len(micro.ranks) > 1:
                end = self._end(_Ring(micro.ranks, [], micro.ticks), 0)
                for rank in micro.ranks:
                    self._free[rank] = end
            else:
                self._pool += [place.sample for place in micro.placements]
        free = np.array(self._free, np.int64)
        held = self._alone.bins(len(numbers))
        rows_of: list[list[int]] = [[] for _ in numbers]
        order = self._dearest_first()
        for done, row in enumerate(order):
            room = held.room(row)
            if len(order) - done == np.count_nonzero(held.tokens == 0):
                room &= held.tokens == 0  # no microbatch may stay empty
            if not room.any():
                return None
            ends = free[ranks] + (2 * self._alone.ticks[row] * FULL + speeds) // (2 * speeds)
            first = np.flatnonzero(room & (ends == ends[room].min()))
            place = int(first[np.argmin(held.tokens[first])])
            free[ranks[place]] = ends[place]
            held.put(row, place)
            rows_of[place].append(row)
        given: list[GivenMicroBatch] = [
            (micro.ranks, [(place.sample, place.ranks) for place in micro.placements])
            for micro in micros
        ]
        for number, rank, rows in zip(numbers, ranks.tolist(), rows_of, strict=True):
            given[number] = self._on(rank, rows)
        return given
