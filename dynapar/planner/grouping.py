"""Make one tree of a step's samples that share a prefix, as far as ranks can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynapar.cluster import Cluster
from dynapar.errors import PlanError
from dynapar.meta import IntArray, SampleTable
from dynapar.packing.moldable import dealt_tokens, shared
from dynapar.planner.config import PlannerConfig
from dynapar.prefixes import Prefixes, Trees
from dynapar.rings import allowed_degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What trees leave out: the tokens of prefixes that their members would have repeated."""

    members: int
    """Samples that are part of a tree."""
    trees: int
    llm_tokens: int
    encoder_tokens: int


def group_by_prefix(
    samples: SampleTable, *, cluster: Cluster, config: PlannerConfig
) -> SampleTable:
    """One row for all samples of a prefix: a tree, with the place and the id of its first member.

    A tree that fits at no degree is cut: members, in the order of the step, join it as long as it
    fits at some degree, and the next one begins another tree of the same prefix, which it repeats.
    A prefix of one sample is no tree.

    Args:
        samples: Of a step; with `prefixes`, or nothing changes.
        cluster: The ranks.
        config: Capacities and the rules of rings.

    Raises:
        PlanError: Even a single sample of a prefix fits at no degree.
    """
    prefixes = samples.prefixes
    if prefixes is None:
        return samples
    rooms = _Rooms(samples, prefixes, cluster, config)
    growing: dict[str, tuple[list[int], _Size]] = {}
    order: list[list[int]] = []
    for row, name in enumerate(prefixes.ids):
        alone = rooms.alone(row)
        if name in growing:
            rows, size = growing[name]
            larger = rooms.joined(size, alone, row)
            if rooms.fits(larger):
                rows.append(row)
                growing[name] = rows, larger
                continue
        if name and not rooms.fits(alone):
            raise rooms.too_large(row)
        order.append([row])
        if name:
            growing[name] = order[-1], alone
    return _planted(samples, prefixes, order)


def saved(samples: SampleTable) -> Saved:
    """What the trees of a step leave out."""
    trees = samples.trees
    if trees is None:
        return Saved(members=0, trees=0, llm_tokens=0, encoder_tokens=0)
    encoder = 0
    for row in trees.rows.tolist():
        again = len(trees.member_tokens[trees.members(row)]) - 1
        encoder += again * int(samples.units(row)[: trees.prefix_units[row]].sum())
    rows = trees.rows
    return Saved(
        members=len(trees.member_ids),
        trees=len(rows),
        llm_tokens=int(trees.member_tokens.sum() - samples.llm_tokens[rows].sum()),
        encoder_tokens=encoder,
    )


class _Size(NamedTuple):
    """What a tree, or a sample, asks of its ranks."""

    tokens: int
    encoder_tokens: int
    largest: int
    """Encoder tokens of the largest unit."""
    units: int


class _Rooms:
    """How large samples of one prefix are together, and whether that fits."""

    def __init__(
        self, samples: SampleTable, prefixes: Prefixes, cluster: Cluster, config: PlannerConfig
    ) -> None:
        self.samples, self.prefixes, self.config = samples, prefixes, config
        self.degrees = allowed_degrees(cluster, config.rings)
        offsets = samples.unit_offsets
        ends = np.concatenate([[0], np.cumsum(samples.unit_tokens)]).astype(np.int64)
        commons = ends[offsets[:-1] + prefixes.units] - ends[offsets[:-1]]
        self.tokens, self.shared = samples.llm_tokens.tolist(), prefixes.tokens.tolist()
        self.encoded, self.common = samples.encoder_tokens.tolist(), commons.tolist()
        self.units, self.common_units = np.diff(offsets).tolist(), prefixes.units.tolist()
        largest = np.zeros(len(samples), np.int64)
        owners = np.repeat(np.arange(len(samples)), np.diff(offsets))
        np.maximum.at(largest, owners, samples.unit_tokens)
        self.largest = largest.tolist()

    def alone(self, row: int) -> _Size:
        return _Size(self.tokens[row], self.encoded[row], self.largest[row], self.units[row])

    def joined(self, tree: _Size, alone: _Size, row: int) -> _Size:
        """The tree with the branch of one more sample."""
        return _Size(
            tree.tokens + alone.tokens - self.shared[row],
            tree.encoder_tokens + alone.encoder_tokens - self.common[row],
            max(tree.largest, alone.largest),
            tree.units + alone.units - self.common_units[row],
        )

    def fits(self, size: _Size) -> bool:
        """At some degree, by the cuts that the planner counts with."""
        config, (tokens, encoder_tokens, largest, units) = self.config, size
        if tokens <= config.capacity and encoder_tokens <= config.encoder_capacity:
            return True
        return any(
            shared(tokens, degree) <= config.capacity
            and dealt_tokens(encoder_tokens, largest, units, degree) <= config.encoder_capacity
            for degree in self.degrees
        )

    def too_large(self, row: int) -> PlanError:
        config, largest = self.config, self.degrees[-1]
        ranks = f"{largest} rank{'s' if largest > 1 else ''}"
        return PlanError(
            f"sample {self.samples.ids[row]!r} of prefix {self.prefixes.ids[row]!r} has "
            f"{self.tokens[row]:,} tokens, {self.shared[row]:,} of "
            f"them in the prefix, and {self.encoded[row]:,} encoder tokens; alone it "
            f"does not fit on up to {ranks} of capacity {config.capacity:,} and encoder_capacity "
            f"{config.encoder_capacity:,}. Raise them, allow more ranks a sample, or leave it out"
        )


def _planted(
    samples: SampleTable, prefixes: Prefixes, order: Sequence[Sequence[int]]
) -> SampleTable:
    """The table whose rows are these groups of rows."""
    first = np.array([rows[0] for rows in order], np.int64)
    counts = np.array([len(rows) for rows in order], np.int64)
    if (counts == 1).all():
        return samples
    begins = np.cumsum(counts) - counts
    flat = np.array([row for rows in order for row in rows], np.int64)
    again = counts - 1

    def whole(column: IntArray, common: IntArray) -> IntArray:
        """Sums over members, of which all but the first leave the prefix out."""
        return np.asarray(np.add.reduceat(column[flat], begins) - again * common[first])

    units = [_units(samples, prefixes, rows) for rows in order]
    return SampleTable(
        ids=tuple(samples.ids[row] for row in first),
        llm_tokens=whole(samples.llm_tokens, prefixes.tokens),
        text_tokens=whole(samples.text_tokens, prefixes.text_tokens),
        label_tokens=np.add.reduceat(samples.label_tokens[flat], begins),
        modalities=np.bitwise_or.reduceat(samples.modalities[flat], begins),
        unit_offsets=np.cumsum([0, *map(len, units)]).astype(np.int64),
        unit_tokens=np.concatenate([np.zeros(0, np.int64), *units]),
        trees=_trees(samples, prefixes, order),
    )


def _units(samples: SampleTable, prefixes: Prefixes, rows: Sequence[int]) -> IntArray:
    """Encoder tokens of the prefix's units, then those of each branch."""
    common = int(prefixes.units[rows[0]]) if len(rows) > 1 else 0
    parts = [samples.units(row)[common:] for row in rows]
    return np.concatenate([samples.units(rows[0])[:common], *parts])


def _trees(samples: SampleTable, prefixes: Prefixes, order: Sequence[Sequence[int]]) -> Trees:
    tall = [rows if len(rows) > 1 else () for rows in order]
    leads = np.array([rows[0] for rows in order], np.int64)
    is_tree = np.array([bool(rows) for rows in tall])
    flat = np.array([row for rows in tall for row in rows], np.int64)
    units = np.diff(samples.unit_offsets)[flat] - prefixes.units[flat]
    return Trees(
        prefix_ids=tuple(prefixes.ids[rows[0]] if rows else "" for rows in tall),
        prefix_tokens=np.where(is_tree, prefixes.tokens[leads], 0),
        prefix_units=np.where(is_tree, prefixes.units[leads], 0),
        offsets=np.cumsum([0, *map(len, tall)]).astype(np.int64),
        member_ids=tuple(samples.ids[row] for row in flat),
        member_tokens=samples.llm_tokens[flat],
        member_labels=samples.label_tokens[flat],
        member_units=units,
    )
