"""What most people run: padded, length-grouped batches at one fixed degree.

Given the benefit of the doubt where there is one:

- one degree for the whole run, the least at which the longest sample of the source fits;
- a step's samples sorted by length over the whole global batch, so that a batch holds samples of
  like length (mega-batches of a shuffled sampler pad more);
- in each round every ring takes equally many samples, dealt in turn, the longest first, and as
  many as fit: count x padded length within capacity, their encoder tokens within
  encoder_capacity, chosen anew each round (a batch size fixed for the run could not be). One
  sample always goes, even with more encoder tokens than a rank may hold elsewhere. Every other
  round is dealt from the last ring on, so that no ring has the longest of every round;
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
from dynapar.packing.moldable import share_tokens
from dynapar.packing.ticks import IntArray, Layout, Loads, microbatch_ticks
from dynapar.planner.problem import Problem
from dynapar.simulate.schedule import Schedule, from_layout


class PaddedBatch(NamedTuple):
    """One batch of one ring."""

    first: int
    """First rank of the ring."""
    rows: tuple[int, ...]
    """Of the step's samples, the longest first."""
    length: int
    """Tokens to which each sample is padded."""
    round: int
    """Batches of one round run side by side."""


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
        if share_tokens(longest, degree) <= capacity:
            return degree
    raise PlanError(
        f"the longest sample has {longest:,} tokens, cluster {cluster} holds "
        f"{cluster.ranks * capacity:,}; expected it to fit at a degree that divides the cluster. "
        f"Raise capacity, add ranks, or leave the sample out"
    )


def padded_batches(
    samples: SampleTable, *, degree: int, ranks: int, capacity: int, encoder_capacity: int
) -> tuple[PaddedBatch, ...]:
    """Deal a step's samples to the rings, round by round.

    Args:
        samples: Of the step, each within capacity at `degree`.
        degree: Of every sample; divides `ranks`.
        ranks: Of the cluster.
        capacity: LLM tokens of a rank in a microbatch, padding included.
        encoder_capacity: Encoder tokens of a rank in a microbatch.

    Returns:
        Every sample in one batch; each ring runs its batches in this order.
    """
    rings = ranks // degree
    left = np.argsort(-samples.llm_tokens, kind="stable")
    encoder = samples.encoder_tokens
    batches: list[PaddedBatch] = []
    turn = 0
    while len(left):
        longest = int(samples.llm_tokens[left[0]])
        count = max(1, capacity // share_tokens(longest, degree))
        while count > 1 and _fullest(encoder[left[: count * rings]], rings) > encoder_capacity:
            count -= 1
        taken, left = left[: count * rings], left[count * rings :]
        for ring in range(min(rings, len(taken))):
            rows = taken[ring::rings]
            length = int(samples.llm_tokens[rows[0]])
            seat = ring if turn % 2 == 0 else rings - 1 - ring
            batches.append(PaddedBatch(seat * degree, tuple(rows.tolist()), length, turn))
        turn += 1
    return tuple(batches)


def _fullest(encoder_tokens: IntArray, rings: int) -> int:
    """Encoder tokens of the fullest ring when samples are dealt in turn."""
    filled = np.zeros(-(-len(encoder_tokens) // rings) * rings, np.int64)
    filled[: len(encoder_tokens)] = encoder_tokens
    return int(filled.reshape(-1, rings).sum(axis=0).max())


def padded_schedule(problem: Problem, *, degree: int) -> Schedule:
    """Price a step's padded batches.

    Args:
        problem: The step.
        degree: As of `fixed_degree`.
    """
    samples, config = problem.samples, problem.config
    batches = padded_batches(
        samples,
        degree=degree,
        ranks=problem.limits.ranks,
        capacity=config.capacity,
        encoder_capacity=config.encoder_capacity,
    )
    padded = np.zeros(len(samples), np.int64)
    first = np.zeros(len(samples), np.int64)
    for batch in batches:
        padded[list(batch.rows)], first[list(batch.rows)] = batch.length, batch.first
    layout = _layout(batches, first, degree, problem)
    loads = microbatch_ticks(
        layout, padded, problem.unit_offsets, problem.unit_tokens, problem.constants
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
