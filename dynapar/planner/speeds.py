"""Deal a planned step again where ranks are not equally fast.

The planner lays a step out for equal ranks. Here its samples that fit one rank are dealt anew, the
dearest first, each to the rank that would end first with it; rings keep their degrees and move, in
their node, to where they end first. The result is taken where it ends sooner at these speeds than
the plan as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.cluster import Cluster
from dynapar.costs import Costs, coefficients
from dynapar.packing.ticks import sample_columns, unit_columns
from dynapar.plan import MicroBatch, StepPlan
from dynapar.plan.pricing import price_layout
from dynapar.planner.build import GivenMicroBatch, GivenSample, assemble
from dynapar.planner.config import PlannerConfig
from dynapar.speeds import FULL

IntArray = npt.NDArray[np.int64]

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
    meet in waves, whose counts are equal, or that follows from a budget of bytes is kept as it is.

    Args:
        plan: For equal ranks.
        speeds: By rank, in thousandths of the fastest rank's.
        cluster: Of the plan.
        costs: Of the plan.
        config: Of the plan.
    """
    fixed = plan.sync != "step" or plan.equal_counts or plan.memory is not None
    if fixed or plan.columns.recompute.any() or all(speed == FULL for speed in speeds):
        return plan
    deal = _Deal(plan, speeds, costs, config)
    dealt = assemble(
        plan.samples,
        microbatches=[*deal.rings(), *deal.singles()],
        step=plan.step,
        cluster=cluster,
        costs=costs,
        config=config,
    )
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
    """A step in the middle of being dealt again."""

    def __init__(
        self, plan: StepPlan, speeds: Sequence[int], costs: Costs, config: PlannerConfig
    ) -> None:
        self._plan, self._speeds, self._config = plan, speeds, config
        self._free = [0] * plan.ranks
        constants = coefficients(costs, ranks_per_node=plan.ranks_per_node)
        table = plan.samples
        self._tokens = np.array(table.llm_tokens, np.int64)
        self._encoder = np.array(table.encoder_tokens, np.int64)
        units = unit_columns(np.array(table.unit_tokens, np.int64), constants)
        ends = np.concatenate(([0], np.cumsum(units)))
        encode = ends[table.unit_offsets[1:]] - ends[table.unit_offsets[:-1]]
        columns = sample_columns(self._tokens, 1, constants, reach=table.reach_under(costs))
        alone = columns.sum(axis=1) + encode
        # A microbatch's fixed time, shared by what fills it.
        fill = np.maximum(self._tokens / config.capacity, self._encoder / config.encoder_capacity)
        self._ticks: IntArray = alone + (fill * constants.fixed).astype(np.int64)
        self._pool: list[int] = []

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
            placed.append((ranks, samples))
        return placed

    def _ring(self, micro: MicroBatch) -> _Ring | None:
        """What must stay together of a microbatch; the rest goes to the pool."""
        kept: list[GivenSample] = []
        for place in micro.placements:
            row = place.sample
            fits = (
                self._tokens[row] <= self._config.capacity
                and self._encoder[row] <= self._config.encoder_capacity
            )
            short = len(place.ranks) == 1 or SHORT * self._ticks[row] <= self._plan.makespan
            if short and fits:
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
        free = np.array(self._free, np.int64)
        speeds = np.array(self._speeds, np.int64)
        for row in sorted(self._pool, key=lambda row: (-int(self._ticks[row]), row)):
            ends = free + (2 * self._ticks[row] * FULL + speeds) // (2 * speeds)
            rank = int(np.argmin(ends))
            free[rank] = ends[rank]
            mine[rank].append(row)
        return [
            ((rank,), [(row, (rank,)) for row in pack])
            for rank, rows in enumerate(mine)
            for pack in self._packs(rows)
        ]

    def _packs(self, rows: list[int]) -> list[list[int]]:
        """First fit, most tokens first, within both capacities."""
        packs: list[list[int]] = []
        room: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (-int(self._tokens[row]), row)):
            tokens, encoder = int(self._tokens[row]), int(self._encoder[row])
            fits = (n for n, left in enumerate(room) if tokens <= left[0] and encoder <= left[1])
            number = next(fits, len(packs))
            if number == len(packs):
                packs.append([])
                room.append([self._config.capacity, self._config.encoder_capacity])
            packs[number].append(row)
            room[number][0] -= tokens
            room[number][1] -= encoder
        return packs
