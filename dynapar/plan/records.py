"""The records of a plan: a microbatch, its samples and a wave as one rank reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dynapar.memory.policies import Policy


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
    recompute: Policy = "none"
    """What its layers keep for backward, on all its ranks."""
