"""Run the batches that most people train on, as real microbatches: padded, at one fixed degree.

Which samples share a batch is decided in `dynapar.simulate.padded`, which says what it does and
where it is flattered. What is measured here beside its price there:

- padding passes embedding, attention and feed-forward layers like any other token; it never reaches
  the head. (Most trainers also compute the logits of padding and of prompts; that is left out);
- every rank of a ring encodes all media of its ring's batch and keeps the rows of its own tokens;
- it runs through the same model, kernels, shards, staged exchange and closing pass as dynapar
  does, and its gradient is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from dynapar.attention.shards import cut_tokens
from dynapar.data.samples import IGNORE, TEXT_KIND, LoadedSample
from dynapar.plan import MicroBatch, Parts, Placement
from dynapar.runtime.layout import MaskBands, Route, ShardLayout, lay_out
from dynapar.runtime.masks import MaskClass
from dynapar.simulate.padded import PaddedBatch


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
    masks: Sequence[MaskClass],
    bands: MaskBands,
) -> ShardLayout:
    """One rank's part of a padded batch; the rank encodes all its media.

    Args:
        batch: `rank` is in its ring.
        samples: By row, with all their encoder units.
        rank: The rank that asks.
        masks: As of `dynapar.runtime.layout.lay_out`.
        bands: As of `dynapar.runtime.layout.lay_out`.
    """
    padded = {row: pad_sample(samples[row], length=batch.length) for row in batch.rows}
    layout = lay_out(_microbatch(batch, padded, rank), padded, rank=rank, masks=masks, bands=bands)
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
