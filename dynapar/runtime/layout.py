"""Decide what one rank of a microbatch holds: its tokens, its encoder units, the rows it routes.

All of it is arithmetic on the plan and on the samples' token ids, so the loader's thread prepares
it ahead of the step. One index map, `AttentionPlan.index`, cuts token ids, kinds, targets and
position ids alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynapar.attention.bands import Bands
from dynapar.attention.evenly import cut_evenly
from dynapar.attention.plan import AttentionPlan, BoundPlan, plan_attention
from dynapar.attention.shards import Spans
from dynapar.attention.tiles import moved_rows
from dynapar.attention.tokens import shard
from dynapar.data.samples import IGNORE, LoadedSample, MediaShape
from dynapar.errors import SampleError
from dynapar.memory.policies import Policy
from dynapar.plan import MicroBatch, Placement
from dynapar.runtime.masks import MaskClass
from dynapar.schemes import Schemes, name_all

IntArray = npt.NDArray[np.int64]

MaskBands = Callable[[LoadedSample, MaskClass], Bands]
"""(sample, mask class) -> what sees what in that sample."""


STAGED = Schemes()
"""Every ring is staged."""


class Unit(NamedTuple):
    """One encoder unit that this rank encodes."""

    grid: tuple[int, int, int]
    """Patches: temporal groups (1), rows, columns."""
    patches: Tensor
    """(encoder tokens, patch width) float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How encoded rows come from the ranks that encode them to the ranks that own their tokens.

    Rows are numbered in the order in which a rank encodes them.
    """

    sends: tuple[Tensor, ...]
    """For each position of the ring, (rows,) int64: which of this rank's rows go there."""
    counts: tuple[int, ...]
    """For each position, how many rows arrive from there."""
    order: Tensor
    """(arriving,) int64: sorts what arrives, positions in order, by place in the shard."""
    places: Tensor
    """(arriving,) int64, ascending: the rows of the shard that they replace."""

    def to(self, device: torch.device) -> Route:
        """The same route with its tensors on `device`."""
        return Route(
            sends=tuple(rows.to(device) for rows in self.sends),
            counts=self.counts,
            order=self.order.to(device),
            places=self.places.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """One rank's part of a microbatch. n is the tokens of its shard, or 1 where it has none."""

    ranks: tuple[int, ...]
    position: int
    """Of this rank in `ranks`."""
    tokens: int
    """Rows of the shard that are real: n, or 0 where n is one row of padding."""
    input_ids: Tensor
    """(n,) int64."""
    kinds: Tensor
    """(n,) int64, text, image or video."""
    targets: Tensor
    """(n,) int64, IGNORE where there is no loss; (k, n) where a sample is a tree."""
    positions: Tensor
    """(1 or 3, n) int64."""
    plans: Mapping[MaskClass, AttentionPlan]
    """By the class of the attention layer that asks; all cut alike."""
    units: tuple[Unit, ...]
    """What this rank encodes, in order."""
    route: Route | None
    """None when no sample of the microbatch has media."""
    recompute: Policy = "none"
    """What the layers keep for backward; the same on all ranks."""

    @property
    def scheme(self) -> str:
        """How the ranks share attention: one name, or one for each mask class."""
        return name_all(len(self.ranks), [plan.scheme.share for plan in self.plans.values()])

    def to(self, device: torch.device) -> ShardLayout:
        """The same layout with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            kinds=self.kinds.to(device),
            targets=self.targets.to(device),
            positions=self.positions.to(device),
            units=tuple(Unit(unit.grid, unit.patches.to(device)) for unit in self.units),
            route=self.route and self.route.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLayout:
    """A layout whose attention plans know the ranks and the transport; what the model is given."""

    shard: ShardLayout
    plans: Mapping[MaskClass, BoundPlan]


def lay_out(
    microbatch: MicroBatch,
    samples: Mapping[int, LoadedSample],
    *,
    rank: int,
    masks: Sequence[MaskClass],
    bands: MaskBands,
    schemes: Schemes = STAGED,
) -> ShardLayout:
    """This rank's part of a microbatch.

    Args:
        microbatch: Of the plan; `rank` is one of its ranks.
        samples: By row of the plan's sample table; every sample of the microbatch, with the
            patches of the units that this rank encodes.
        rank: The rank that asks.
        masks: The mask classes of the attention layers.
        bands: The mask of one sample in the layers of a class.
        schemes: How rings share attention.

    Raises:
        SampleError: A sample's placeholders, media and encoder units do not fit each other.
    """
    ranks, here = microbatch.ranks, microbatch.ranks.index(rank)
    degree = len(ranks)
    at = {member: position for position, member in enumerate(ranks)}
    placements = microbatch.placements
    batch = [samples[placement.sample] for placement in placements]
    lengths = [len(sample.input_ids) for sample in batch]
    shares = [[at[member] for member in placement.ranks] for placement in placements]
    seen = {mask: [bands(sample, mask) for sample in batch] for mask in masks}
    spans = cut_evenly(lengths, degree=degree, masks=list(seen.values()), positions=shares)
    plans = {
        mask: _plan(lengths, spans, bands, ranks=ranks, schemes=schemes)
        for mask, bands in seen.items()
    }
    for plan in plans.values():
        plan.prepare(here)  # now, in the loader's thread, rather than when it is bound
    plan = plans[masks[0]]
    starts = list(itertools.accumulate(lengths, initial=0))
    tokens = plan.tokens[here]

    def cut(parts: list[Tensor], padding: int) -> Tensor:
        part = shard(torch.cat(parts, -1), plan, here)
        # Models of transformers cannot reshape an empty sequence: one row takes no part instead.
        return part if tokens else torch.nn.functional.pad(part, (0, 1), value=padding)

    return ShardLayout(
        ranks=ranks,
        position=here,
        tokens=tokens,
        input_ids=cut([sample.input_ids for sample in batch], 0),
        kinds=cut([sample.kinds for sample in batch], 0),
        targets=cut(_in_rows([sample.targets for sample in batch]), IGNORE),
        positions=cut([sample.positions for sample in batch], 0),
        plans=plans,
        units=tuple(_units(placements, batch, rank)),
        route=_route(placements, batch, starts, plan, at, here),
        recompute=microbatch.recompute,
    )


def _plan(
    lengths: Sequence[int],
    spans: Spans,
    bands: Sequence[Bands],
    *,
    ranks: Sequence[int],
    schemes: Schemes,
) -> AttentionPlan:
    """The plan of a mask class, under the scheme that its ring takes.

    Where prices decide, they are of what the staged plan of these very masks computes and moves.
    """
    degree = len(ranks)
    first = schemes.at(degree)
    plan = plan_attention(lengths, degree=degree, bands=bands, spans=spans, scheme=first)
    if degree == 1 or not schemes.priced:
        return plan
    chosen = schemes.of(
        ranks,
        tokens=sum(lengths) / degree,
        pairs=sum(plan.work) / degree,
        needed=moved_rows(plan.table) / ((degree - 1) * sum(lengths)),
    )
    if chosen == first:
        return plan
    return plan_attention(lengths, degree=degree, bands=bands, spans=spans, scheme=chosen)


def _in_rows(targets: list[Tensor]) -> list[Tensor]:
    """Targets of samples in equally many rows, those of a tree having several."""
    rows = max(len(each) if each.ndim > 1 else 0 for each in targets)
    if rows == 0:
        return targets
    whole = [each.reshape(-1, each.shape[-1]) for each in targets]
    return [
        torch.nn.functional.pad(each, (0, 0, 0, rows - len(each)), value=IGNORE) for each in whole
    ]


def _units(
    placements: Sequence[Placement], batch: Sequence[LoadedSample], rank: int
) -> Iterator[Unit]:
    for placement, sample in zip(placements, batch, strict=True):
        grids = [_unit_grid(item) for item in sample.media for _ in range(item.units)]
        if len(grids) != len(placement.encoders):
            raise SampleError(
                f"sample {sample.id!r} has {len(grids)} encoder units and the plan places "
                f"{len(placement.encoders)}; index the source again with this model's settings"
            )
        for number, (grid, encoder) in enumerate(zip(grids, placement.encoders, strict=True)):
            if encoder == rank:
                yield Unit(grid, sample.units[number])


def _unit_grid(item: MediaShape) -> tuple[int, int, int]:
    groups, rows, columns = item.grid
    return groups // item.units, rows, columns


def unit_places(sample: LoadedSample) -> list[IntArray]:
    """For each encoder unit of a sample, the positions in it that the unit's rows fill, ascending.

    An item fills the next `llm_tokens` placeholders of its kind, which need not be one run, and
    its units share them evenly, in order.

    Raises:
        SampleError: The placeholders of a kind are not as many as its media need.
    """
    places: list[IntArray] = []
    free = {
        kind: (sample.kinds == kind).nonzero()[:, 0].numpy()
        for kind in {item.kind for item in sample.media}
    }
    used = dict.fromkeys(free, 0)
    for item in sample.media:
        start = used[item.kind]
        used[item.kind] = start + item.llm_tokens
        mine = free[item.kind][start : start + item.llm_tokens]
        places.extend(np.array_split(mine, item.units))
    for kind, count in used.items():
        if count != len(free[kind]):
            raise SampleError(
                f"sample {sample.id!r} has {len(free[kind])} placeholders of kind {kind} and its "
                f"media fill {count}; expected as many. Check the index against the processor"
            )
    return places


def _route(
    placements: Sequence[Placement],
    batch: Sequence[LoadedSample],
    starts: Sequence[int],
    plan: AttentionPlan,
    at: Mapping[int, int],
    here: int,
) -> Route | None:
    degree = plan.degree
    # For each position, the packed places that the rows which it encodes will fill, in order.
    fills: list[list[IntArray]] = [[] for _ in range(degree)]
    for placement, sample, start in zip(placements, batch, starts[:-1], strict=True):
        if sample.media:
            places = unit_places(sample)
            for encoder, place in zip(placement.encoders, places, strict=True):
                fills[at[encoder]].append(place + start)
    if not any(fills):
        return None
    owner = np.empty(starts[-1], np.int64)
    place = np.empty(starts[-1], np.int64)
    for position in range(degree):
        index = plan.index(position)
        owner[index] = position
        place[index] = np.arange(len(index))
    empty = np.empty(0, np.int64)
    packed = [np.concatenate([empty, *rows]) for rows in fills]
    arriving = [rows[owner[rows] == here] for rows in packed]
    local = place[np.concatenate(arriving)]
    order = np.argsort(local, kind="stable")
    mine = owner[packed[here]]
    return Route(
        sends=tuple(torch.from_numpy(np.flatnonzero(mine == p)) for p in range(degree)),
        counts=tuple(len(rows) for rows in arriving),
        order=torch.from_numpy(order),
        places=torch.from_numpy(local[order]),
    )
