"""What most people run: padded, length-grouped batches at one fixed degree.

Given the benefit of the doubt where there is one:

- one degree for the whole run, the least at which the longest sample of the source fits;
- a step's samples sorted by length over the whole global batch, and neighbours put into one batch,
  so that it holds samples of like length (mega-batches of a shuffled sampler pad more);
- rings take a batch in turn, the longest first and every other round from the last ring on: as many
  samples as fit (count x padded length within a token budget, encoder tokens within
  encoder_capacity), chosen anew for each batch, which a batch size fixed for the run could not be;
  but no more than leave as many for each ring that is still to come. One sample always goes, even
  with more encoder tokens than a rank may hold elsewhere;
- a batch is padded to its longest sample, and padding costs what any token costs;
- every rank of a ring encodes all media of its ring's batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynapar.cluster import Cluster
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.packing.moldable import shared
from dynapar.packing.ticks import IntArray, Layout, Loads, microbatch_ticks
from dynapar.planner.problem import Problem
from dynapar.simulate.schedule import Schedule, from_layout


class PaddedBatch(NamedTuple):
    """One batch of one ring."""

    first: int
    """First rank of the ring."""
    degree: int
    """Ranks of the ring."""
    rows: tuple[int, ...]
    """Of the step's samples, the longest first."""
    length: int
    """Tokens to which each sample is padded."""
    round: int
    """Batches of one round run side by side."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ring, in order."""
        return tuple(range(self.first, self.first + self.degree))


def dividing_degrees(cluster: Cluster) -> tuple[int, ...]:
    """Degrees that leave no rank over: those that divide a node, or across nodes the cluster."""
    node = cluster.ranks_per_node
    return tuple(d for d in cluster.degrees() if (node if d <= node else cluster.ranks) % d == 0)


def fixed_degree(longest: int, *, capacity: int, cluster: Cluster) -> int:
    """The least degree that divides the cluster and at which the longest sample fits.

    Args:
        longest: Tokens of the longest sample of the source.
        capacity: LLM tokens that one rank may hold in one microbatch.
        cluster: The ranks.

    Raises:
        PlanError: It does not fit even when all ranks share it.
    """
    for degree in dividing_degrees(cluster):
        if shared(longest, degree) <= capacity:
            return degree
    raise PlanError(
        f"the longest sample has {longest:,} tokens, cluster {cluster} holds "
        f"{cluster.ranks * capacity:,}; expected it to fit at a degree that divides the cluster. "
        f"Raise capacity, add ranks, or leave the sample out"
    )


def padded_batches(
    samples: SampleTable, *, degree: int, ranks: int, budget: int, encoder_capacity: int
) -> tuple[PaddedBatch, ...]:
    """Deal a step's samples to the rings, round by round.

    Args:
        samples: Of the step.
        degree: Of every sample; divides `ranks`.
        ranks: Of the cluster.
        budget: LLM tokens of a rank in a batch, padding included; one sample may have more.
        encoder_capacity: Encoder tokens of a rank in a batch; one sample may have more.

    Returns:
        Every sample in one batch; each ring runs its batches in this order.
    """
    rings = ranks // degree
    order = np.argsort(-samples.llm_tokens, kind="stable")
    lengths = samples.llm_tokens[order].tolist()
    encoded = np.concatenate(([0], np.cumsum(samples.encoder_tokens[order]))).tolist()
    batches: list[PaddedBatch] = []
    done, turn = 0, 0
    while done < len(lengths):
        for place in range(rings):
            if done == len(lengths):
                break
            even = -(-(len(lengths) - done) // (rings - place))
            count = max(1, min(even, budget // shared(lengths[done], degree)))
            while count > 1 and encoded[done + count] - encoded[done] > encoder_capacity:
                count -= 1
            seat = place if turn % 2 == 0 else rings - 1 - place
            rows = tuple(order[done : done + count].tolist())
            batches.append(PaddedBatch(seat * degree, degree, rows, lengths[done], turn))
            done += count
        turn += 1
    return tuple(batches)


def padded_schedule(problem: Problem, *, degree: int, budget: int | None = None) -> Schedule:
    """Price a step's padded batches.

    Args:
        problem: The step.
        degree: As of `fixed_degree`.
        budget: As of `padded_batches`; None for the capacity.
    """
    samples, config = problem.samples, problem.config
    batches = padded_batches(
        samples,
        degree=degree,
        ranks=problem.limits.ranks,
        budget=config.capacity if budget is None else budget,
        encoder_capacity=config.encoder_capacity,
    )
    padded = np.zeros(len(samples), np.int64)
    first = np.zeros(len(samples), np.int64)
    for batch in batches:
        padded[list(batch.rows)], first[list(batch.rows)] = batch.length, batch.first
    # Padding is to a sample as its own tokens are; exact for causal ones, whose reach they are.
    tokens = problem.jobs.tokens
    targets = problem.jobs.reach - samples.reach  # of which padding has none
    reach = padded * (samples.reach / tokens) + targets * tokens / np.maximum(padded, 1)
    layout = _layout(batches, first, degree, problem)
    loads = microbatch_ticks(
        layout, padded, reach, problem.unit_offsets, problem.unit_tokens, problem.constants
    )
    return from_layout(
        layout,
        _encode_everywhere(loads, layout, problem.constants.fixed),
        sync=config.sync,
        ranks=problem.limits.ranks,
        costs=problem.costs,
        constants=problem.constants,
        tokens=int(samples.llm_tokens.sum()),
        computed_tokens=int(padded.sum()),
    )


def _layout(
    batches: Sequence[PaddedBatch], first: IntArray, degree: int, problem: Problem
) -> Layout:
    return Layout(
        first=np.array([batch.first for batch in batches], np.int64),
        width=np.full(len(batches), degree, np.int64),
        wave=np.array([batch.round for batch in batches], np.int64),
        offsets=np.cumsum([0, *(len(batch.rows) for batch in batches)], dtype=np.int64),
        order=np.array([row for batch in batches for row in batch.rows], np.int64),
        sample_first=first,
        sample_degree=np.full(len(first), degree, np.int64),
        unit_rank=np.repeat(first, np.diff(problem.unit_offsets)),
    )


def _encode_everywhere(loads: Loads, layout: Layout, fixed: int) -> Loads:
    """The same loads, but every rank of a microbatch encodes all of its units."""
    if not len(layout.first):
        return loads
    parts = loads.parts.copy()
    parts[:, 3] = np.repeat(np.add.reduceat(loads.parts[:, 3], loads.starts), layout.width)
    encoded = np.repeat(np.add.reduceat(loads.encoder_tokens, loads.starts), layout.width)
    whole = parts.sum(axis=1) + fixed
    ticks = np.maximum.reduceat(whole, loads.starts)
    rows = np.split(whole, loads.starts[1:])
    slowest = np.array([int(np.argmax(row)) for row in rows], np.int64)
    return loads._replace(parts=parts, encoder_tokens=encoded, ticks=ticks, slowest=slowest)
