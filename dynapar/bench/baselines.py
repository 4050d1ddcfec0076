"""Lay a step out the way most people run it: padded, length-grouped batches at one fixed degree.

What it does, so that a reader can judge whether it is fair:

- one degree for the whole run, the smallest that divides the ranks and at which the longest sample
  of the source fits (`fixed_degree`); consecutive ranks form rings of that size;
- the step's samples sorted by length, the longest first, so that a batch holds samples of like
  length (length grouping over the whole global batch, which leaves less padding than the
  mega-batches of a shuffled sampler);
- in each round every ring takes equally many samples, dealt in turn, so that rings of one round
  have batches of nearly the same shape; the last round may leave rings without a sample, where
  trainers repeat or drop some;
- as many samples a batch as fit: count x padded length <= capacity x degree, and their encoder
  tokens <= encoder_capacity, since each rank encodes all of them (one sample always goes). It is
  chosen anew each round, which a batch size fixed for the run could not do;
- a batch is padded to its longest sample. Padding passes embedding, attention and feed-forward
  layers like any other token; it never reaches the head. (Most trainers also compute the logits of
  padding and of prompts; that is left out here);
- every rank of a ring encodes all media of its ring's batch and keeps the rows of its own tokens.

It runs through the same model, kernels, zigzag shards, staged exchange and closing pass as dynapar
does, and its gradient is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from dynapar.attention.shards import cut_tokens
from dynapar.data.samples import IGNORE, TEXT_KIND, LoadedSample
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.plan import MicroBatch, Parts, Placement
from dynapar.runtime.layout import MaskBands, Route, ShardLayout, lay_out


class PaddedBatch(NamedTuple):
    """One batch of one ring."""

    ranks: tuple[int, ...]
    """The ring."""
    rows: tuple[int, ...]
    """Of the step's sample table, the longest sample first."""
    length: int
    """Tokens to which each sample is padded."""


def fixed_degree(longest: int, *, capacity: int, ranks: int) -> int:
    """The smallest degree that divides the ranks and at which the longest sample fits.

    Args:
        longest: Tokens of the longest sample of the source.
        capacity: LLM tokens that one rank may hold in one microbatch.
        ranks: Of the run.

    Raises:
        PlanError: It does not fit even when all ranks share it.
    """
    for degree in range(1, ranks + 1):
        if ranks % degree == 0 and longest <= capacity * degree:
            return degree
    raise PlanError(
        f"the longest sample has {longest:,} tokens, {ranks} ranks hold {ranks * capacity:,}; "
        "expected it to fit. Raise capacity, add ranks, or leave the sample out"
    )


def padded_batches(
    samples: SampleTable, *, degree: int, ranks: int, capacity: int, encoder_capacity: int
) -> tuple[PaddedBatch, ...]:
    """Deal a step's samples to the rings, round by round.

    Args:
        samples: Of the step, each at most capacity x degree tokens.
        degree: Of every sample; divides `ranks`.
        ranks: Of the run.
        capacity: LLM tokens that one rank may hold in one microbatch, padding included.
        encoder_capacity: Encoder tokens that one rank may encode in one microbatch.

    Returns:
        Every sample in one batch; each ring runs its batches in this order.
    """
    rings = [tuple(range(first, first + degree)) for first in range(0, ranks, degree)]
    order = np.argsort(-samples.llm_tokens, kind="stable").tolist()
    batches = []
    while order:
        count = max(capacity * degree // int(samples.llm_tokens[order[0]]), 1)
        while True:
            taken = order[: count * len(rings)]
            deals = [taken[number :: len(rings)] for number in range(len(rings))]
            fullest = max(int(samples.encoder_tokens[rows].sum()) for rows in deals)
            if count == 1 or fullest <= encoder_capacity:
                break
            count -= 1
        order = order[len(taken) :]
        batches += [
            PaddedBatch(ring, tuple(rows), int(samples.llm_tokens[rows[0]]))
            for ring, rows in zip(rings, deals, strict=True)
            if rows
        ]
    return tuple(batches)


def pad_sample(sample: LoadedSample, *, length: int) -> LoadedSample:
    """A sample with text tokens without a target behind it, up to `length` tokens."""
    missing = length - len(sample.input_ids)
    last = sample.positions.amax() + 1
    padding = (last + torch.arange(missing)).expand(len(sample.positions), -1)
    return replace(
        sample,
        input_ids=functional.pad(sample.input_ids, (0, missing)),
        targets=functional.pad(sample.targets, (0, missing), value=IGNORE),
        kinds=functional.pad(sample.kinds, (0, missing), value=TEXT_KIND),
        positions=torch.cat([sample.positions, padding], -1),
    )


def lay_out_padded(
    batch: PaddedBatch,
    samples: Mapping[int, LoadedSample],
    *,
    rank: int,
    windows: Sequence[int | None],
    bands: MaskBands,
) -> ShardLayout:
    """One rank's part of a padded batch; the rank encodes all its media.

    Args:
        batch: `rank` is in its ring.
        samples: By row, with all their encoder units.
        rank: The rank that asks.
        windows: As of `dynapar.runtime.layout.lay_out`.
        bands: As of `dynapar.runtime.layout.lay_out`.
    """
    padded = {row: pad_sample(samples[row], length=batch.length) for row in batch.rows}
    layout = lay_out(
        _microbatch(batch, padded, rank), padded, rank=rank, windows=windows, bands=bands
    )
    if layout.route is None:
        return layout
    return replace(layout, route=_only_own(layout.route, layout.position))


def _microbatch(batch: PaddedBatch, samples: Mapping[int, LoadedSample], rank: int) -> MicroBatch:
    """As `rank` sees it: it encodes every unit itself. No planner made it, so it has no times."""
    share = cut_tokens(batch.length, len(batch.ranks)) * len(batch.rows)
    units = {row: range(sum(item.units for item in samples[row].media)) for row in batch.rows}
    tokens = sum(len(samples[row].units[unit]) for row in batch.rows for unit in units[row])
    return MicroBatch(
        ranks=batch.ranks,
        placements=tuple(
            Placement(row, batch.ranks, tuple(rank for _ in units[row])) for row in batch.rows
        ),
        tokens_per_rank=tuple(int(count) for count in share),
        encoder_tokens_per_rank=(tokens,) * len(batch.ranks),
        ticks=0,
        start=0,
        parts=Parts(0, 0, 0, 0, 0),
    )


def _only_own(route: Route, here: int) -> Route:
    """Rows of other ranks' tokens are not sent: those ranks have encoded them, too."""
    nothing = route.sends[here][:0]
    sends = [rows if position == here else nothing for position, rows in enumerate(route.sends)]
    return replace(route, sends=tuple(sends))
