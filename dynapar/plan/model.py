"""The plan of one optimizer step: which ranks run which samples together, and in what order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dynapar.meta import SampleTable

Sync = Literal["step", "microbatch"]
"""Where ranks meet: once in the closing pass, or in every module call of every wave."""


class Placement(NamedTuple):
    """A sample inside a microbatch."""

    sample: int
    """Row of `StepPlan.samples`."""
    ranks: tuple[int, ...]
    """The ranks that share its tokens, in order: an ordered subset of the microbatch's ranks."""
    encoders: tuple[int, ...]
    """For each encoder unit of the sample, the rank (of the microbatch) that encodes it."""


class Parts(NamedTuple):
    """Where the slowest rank of a microbatch spends its ticks; they add up to the whole."""

    linear: int
    attention: int
    exchange: int
    encoder: int
    fixed: int


class Wave(NamedTuple):
    """A wave's time (sync "microbatch"): all ranks wait for each other after each part."""

    start: int
    """Ticks from the step's start."""
    encoder: int
    """Ticks of the encoder part; 0 where no rank encodes."""
    llm: int
    """Ticks of the LLM part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples that an ordered set of ranks runs in one forward and backward."""

    ranks: tuple[int, ...]
    """The ranks, ascending and consecutive; two or more of them are a ring."""
    placements: tuple[Placement, ...]
    """The samples, in packing order."""
    tokens_per_rank: tuple[int, ...]
    """LLM tokens on each of `ranks` after the cuts."""
    encoder_tokens_per_rank: tuple[int, ...]
    """Encoder tokens that each of `ranks` encodes."""
    ticks: int
    """Predicted time, forward and backward, in ticks."""
    start: int
    """Predicted start, in ticks from the step's start."""
    parts: Parts
    """Of the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Who computes what in one optimizer step. Every sample is in exactly one microbatch.

    The order of `microbatches` is the global order: every queue follows it, so that no cycle of
    ranks waiting for each other can arise.
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
    microbatches: tuple[MicroBatch, ...]
    queues: tuple[tuple[int | None, ...], ...]
    """For each rank, the indices of its microbatches; None is a dummy (sync "microbatch" only)."""
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
    waves: tuple[Wave, ...] = ()
    """The waves, for sync "microbatch"; empty for sync "step"."""

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound, as a share; 0 without samples."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees in use, ascending."""
        used = {len(place.ranks) for micro in self.microbatches for place in micro.placements}
        return tuple(sorted(used))
