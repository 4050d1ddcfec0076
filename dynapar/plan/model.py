"""The plan of one optimizer step: which ranks run which samples together, and in what order."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from dynapar.memory.limits import MemoryLimits
from dynapar.meta import IntArray, SampleTable
from dynapar.packing.ticks import Layout
from dynapar.plan.columns import DUMMY, PlanColumns, positions, same_columns
from dynapar.plan.records import MicroBatch, Wave
from dynapar.rings import RingRules

Sync = Literal["step", "microbatch"]
"""Where ranks meet: once in the closing pass, or in every module call of every wave."""


@dataclass(slots=True)
class _Made:
    """Records that were asked for, each made once."""

    microbatch: dict[int, MicroBatch] = field(default_factory=dict)
    microbatches: tuple[MicroBatch, ...] | None = None
    queues: tuple[tuple[int | None, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Who computes what in one optimizer step. Every sample is in exactly one microbatch.

    The order of the microbatches is the global order: every queue follows it, so that no cycle of
    ranks waiting for each other can arise. Two plans are equal when they say the same, however
    long planning took. The plan holds columns; records are made of them when first asked for, and
    `queue` and `microbatch` make only what one rank needs.
    """

    step: int
    sync: Sync
    ranks: int
    ranks_per_node: int
    capacity: int
    """LLM tokens that one rank may hold in one microbatch."""
    encoder_capacity: int
    """Encoder tokens that one rank may encode in one microbatch."""
    samples: SampleTable
    columns: PlanColumns
    """Microbatches, queues and waves; `PlanColumns.from_records` makes them of records."""
    makespan: int
    """Ticks from the first microbatch's start to the last one's end."""
    lower_bound: int
    """Ticks; no plan under the same costs is shorter."""
    homogeneous_degree: int
    """The best single degree for this step; 0 when no single degree fits."""
    homogeneous_makespan: int
    """Its makespan, in ticks."""
    chosen: Literal["dynamic", "homogeneous"]
    plan_seconds: float
    """Wall-clock time that planning took; not part of the digest."""
    costs: str = ""
    """Name of the costs that the times were predicted with."""
    rings: RingRules = field(default_factory=RingRules)
    """Which ranks may work together: what the plan keeps to."""
    equal_counts: bool = False
    """Whether every rank runs equally many microbatches, as `PlannerConfig.equal_counts` says."""
    optimal: bool = False
    """Whether the makespan is proven to be the least under these costs."""
    memory: MemoryLimits | None = None
    """The budget of bytes that capacities and recompute policies follow from, where one is given.
    """
    _made: _Made = field(default_factory=_Made, init=False, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepPlan):
            return NotImplemented
        apart = ("samples", "plan_seconds", "_made")
        names = (each.name for each in fields(self) if each.name not in apart)
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and same_columns(self.samples, other.samples)

    @property
    def microbatches(self) -> tuple[MicroBatch, ...]:
        """All microbatches, in global order."""
        made = self._made
        if made.microbatches is None:
            made.microbatches = self.columns.microbatches(0, len(self.columns.ticks))
        return made.microbatches

    def microbatch(self, number: int) -> MicroBatch:
        """One microbatch, by its index in the global order."""
        made = self._made
        if made.microbatches is not None:
            return made.microbatches[number]
        if number not in made.microbatch:
            made.microbatch[number] = self.columns.microbatches(number, number + 1)[0]
        return made.microbatch[number]

    @property
    def queues(self) -> tuple[tuple[int | None, ...], ...]:
        """For each rank, the indices of its microbatches; None is a dummy (sync "microbatch")."""
        made = self._made
        if made.queues is None:
            count = len(self.columns.queue_offsets) - 1
            made.queues = tuple(self.columns.queue_of(rank) for rank in range(count))
        return made.queues

    def queue(self, rank: int) -> tuple[int | None, ...]:
        """The queue of one rank, as in `queues`."""
        return self.columns.queue_of(rank)

    def of_rank(self, rank: int) -> tuple[MicroBatch, ...]:
        """The microbatches of a rank's queue, in order, without dummies."""
        return tuple(self.microbatch(entry) for entry in self.queue(rank) if entry is not None)

    @property
    def waves(self) -> tuple[Wave, ...]:
        """The waves, for sync "microbatch"; empty for sync "step"."""
        return tuple(Wave._make(row) for row in self.columns.waves.tolist())

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound, as a share; 0 without samples."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees in use, ascending."""
        return tuple(np.unique(self.columns.degrees).tolist())

    def wave_of_microbatches(self) -> IntArray:
        """(B,) int64, the wave of each microbatch; all 0 under sync "step"."""
        columns = self.columns
        waves = np.zeros(len(columns.ticks), np.int64)
        if self.sync == "microbatch":
            runs = columns.queue != DUMMY
            waves[columns.queue[runs]] = positions(columns.queue_offsets)[runs]
        return waves

    def layout(self) -> Layout:
        """The arrays that the kernels price, of a plan whose shapes are sound."""
        columns, units = self.columns, self.samples.unit_offsets
        rows = columns.sample_rows
        first, degree = np.zeros(len(self.samples), np.int64), np.ones(len(self.samples), np.int64)
        first[rows] = columns.share_ranks[columns.share_offsets[:-1]]
        degree[rows] = columns.degrees
        counts = np.diff(columns.unit_offsets)
        unit_rank = np.zeros(len(self.samples.unit_tokens), np.int64)
        unit_rank[np.repeat(units[rows], counts) + positions(columns.unit_offsets)] = (
            columns.unit_ranks
        )
        return Layout(
            first=columns.ranks[columns.rank_offsets[:-1]],
            width=np.diff(columns.rank_offsets),
            wave=self.wave_of_microbatches(),
            offsets=columns.sample_offsets,
            order=rows,
            sample_first=first,
            sample_degree=degree,
            unit_rank=unit_rank,
        )
