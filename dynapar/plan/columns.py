"""A plan's microbatches, queues and waves as columns, from which records are made where needed.

A step of a large cluster has thousands of microbatches of which a rank runs ten. Planning, its
digest and its checks work on the columns alone; `MicroBatch` and the others are made of them. Rows
of unequal length lie one after another: row i of `ranks` is
`ranks[rank_offsets[i]:rank_offsets[i + 1]]`, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from typing import Self

import numpy as np

from dynapar.errors import PlanError
from dynapar.memory.policies import POLICIES
from dynapar.meta import IntArray, SampleTable
from dynapar.plan.records import MicroBatch, Parts, Placement, Wave

DUMMY = -1
"""In `PlanColumns.queue`: the rank runs no sample in this wave."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanColumns:
    """B microbatches in global order, P samples in them, R queues, V waves.

    All are int64 and read-only for their users; two are equal when all arrays are. Any content
    can be held, so that `validate` can say what is wrong with it.
    """

    rank_offsets: IntArray
    """(B + 1,) where the ranks of each microbatch begin."""
    ranks: IntArray
    """(S,) the ranks of each microbatch; S is the sum of the microbatches' ranks."""
    tokens: IntArray
    """(S,) LLM tokens on each of `ranks` after the cuts."""
    encoder_tokens: IntArray
    """(S,) encoder tokens that each of `ranks` encodes."""
    sample_offsets: IntArray
    """(B + 1,) where the samples of each microbatch begin."""
    sample_rows: IntArray
    """(P,) rows of `StepPlan.samples`, in packing order."""
    share_offsets: IntArray
    """(P + 1,) where the ranks of each sample begin."""
    share_ranks: IntArray
    """(sum of degrees,) the ranks that share each sample, in order."""
    unit_offsets: IntArray
    """(P + 1,) where the encoder units of each sample begin."""
    unit_ranks: IntArray
    """(units,) the rank that encodes each encoder unit."""
    ticks: IntArray
    """(B,) predicted time of each microbatch."""
    starts: IntArray
    """(B,) predicted start of each microbatch, in ticks from the step's start."""
    parts: IntArray
    """(B, 5) the parts of each microbatch's slowest rank, in ticks, as `Parts` names them."""
    recompute: IntArray
    """(B,) the recompute policy of each microbatch, by its place in `memory.POLICIES`."""
    queue_offsets: IntArray
    """(R + 1,) where the queue of each rank begins."""
    queue: IntArray
    """(entries,) the microbatches of each rank, or `DUMMY`."""
    waves: IntArray
    """(V, 3) start, encoder and LLM ticks of each wave, as `Wave` names them."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanColumns) and same_columns(self, other)

    @classmethod
    def from_records(
        cls,
        *,
        microbatches: Sequence[MicroBatch],
        queues: Sequence[Sequence[int | None]],
        waves: Sequence[Wave] = (),
    ) -> Self:
        """The columns of given records, whatever they hold.

        Args:
            microbatches: In global order.
            queues: For each rank, the indices of its microbatches; None is a dummy.
            waves: Of a plan under sync "microbatch".

        Raises:
            PlanError: A microbatch has not one number of tokens for each of its ranks, or a queue
                holds a negative number.
        """
        for number, micro in enumerate(microbatches):
            for name in ("tokens_per_rank", "encoder_tokens_per_rank"):
                if (count := len(getattr(micro, name))) != len(micro.ranks):
                    raise PlanError(
                        f"microbatch {number} has {count} {name}; expected {len(micro.ranks)}, one "
                        f"for each of its ranks: plan again"
                    )
        for rank, entries in enumerate(queues):
            if wrong := [entry for entry in entries if entry is not None and entry < 0]:
                raise PlanError(
                    f"the queue of rank {rank} holds {wrong[0]}; expected numbers of microbatches, "
                    f"or none for a dummy: plan again"
                )
        placements = [place for micro in microbatches for place in micro.placements]
        rank_offsets, ranks = _ragged([micro.ranks for micro in microbatches])
        share_offsets, share_ranks = _ragged([place.ranks for place in placements])
        unit_offsets, unit_ranks = _ragged([place.encoders for place in placements])
        queue_offsets, queue = _ragged(
            [[DUMMY if entry is None else entry for entry in queue] for queue in queues]
        )
        counts = [len(micro.placements) for micro in microbatches]
        return cls(
            rank_offsets=rank_offsets,
            ranks=ranks,
            tokens=_ragged([micro.tokens_per_rank for micro in microbatches])[1],
            encoder_tokens=_ragged([micro.encoder_tokens_per_rank for micro in microbatches])[1],
            sample_offsets=offsets_of(np.array(counts, np.int64)),
            sample_rows=np.array([place.sample for place in placements], np.int64),
            share_offsets=share_offsets,
            share_ranks=share_ranks,
            unit_offsets=unit_offsets,
            unit_ranks=unit_ranks,
            ticks=np.array([micro.ticks for micro in microbatches], np.int64),
            starts=np.array([micro.start for micro in microbatches], np.int64),
            parts=np.array([micro.parts for micro in microbatches], np.int64).reshape(-1, 5),
            recompute=np.array(
                [POLICIES.index(micro.recompute) for micro in microbatches], np.int64
            ),
            queue_offsets=queue_offsets,
            queue=queue,
            waves=np.array(waves, np.int64).reshape(-1, 3),
        )

    def microbatches(self, begin: int, end: int) -> tuple[MicroBatch, ...]:
        """The records of microbatches `begin` to `end`, both at least 0 and at most B."""
        edges = slice(begin, end + 1)
        rank_at, sample_at = self.rank_offsets[edges], self.sample_offsets[edges]
        held = slice(rank_at[0], rank_at[-1])
        ranks = _rows(self.ranks[held], rank_at)
        tokens = _rows(self.tokens[held], rank_at)
        encoded = _rows(self.encoder_tokens[held], rank_at)
        placements = self._placements(slice(sample_at[0], sample_at[-1]))
        ticks, starts = self.ticks[begin:end].tolist(), self.starts[begin:end].tolist()
        parts, policies = self.parts[begin:end].tolist(), self.recompute[begin:end].tolist()
        return tuple(
            MicroBatch(
                ranks=ranks[row],
                placements=placements[first:last],
                tokens_per_rank=tokens[row],
                encoder_tokens_per_rank=encoded[row],
                ticks=ticks[row],
                start=starts[row],
                parts=Parts._make(parts[row]),
                recompute=POLICIES[policies[row]],
            )
            for row, (first, last) in enumerate(pairwise((sample_at - sample_at[0]).tolist()))
        )

    def _placements(self, placed: slice) -> tuple[Placement, ...]:
        edges = slice(placed.start, placed.stop + 1)
        shares, units = self.share_offsets[edges], self.unit_offsets[edges]
        return tuple(
            map(
                Placement,
                self.sample_rows[placed].tolist(),
                _rows(self.share_ranks[shares[0] : shares[-1]], shares),
                _rows(self.unit_ranks[units[0] : units[-1]], units),
            )
        )

    def queue_of(self, rank: int) -> tuple[int | None, ...]:
        """The queue of one rank; None is a dummy."""
        entries = self.queue[self.queue_offsets[rank] : self.queue_offsets[rank + 1]].tolist()
        return tuple(None if entry == DUMMY else entry for entry in entries)

    @property
    def degrees(self) -> IntArray:
        """(P,) how many ranks share each sample, in the order of `sample_rows`."""
        return np.diff(self.share_offsets)


def same_columns(one: PlanColumns | SampleTable, other: PlanColumns | SampleTable) -> bool:
    """Whether two records of arrays, of one kind, hold the same."""
    pairs = ((getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def offsets_of(counts: IntArray) -> IntArray:
    """(n + 1,) int64: where rows of `counts` entries begin, and the end of the last."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def owners(offsets: IntArray) -> IntArray:
    """For every entry of rows that lie one after another, its row."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def positions(offsets: IntArray) -> IntArray:
    """For every entry of rows that lie one after another, its place in its row."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def queues_in_order(
    rank_offsets: IntArray, ranks: IntArray, count: int
) -> tuple[IntArray, IntArray]:
    """Offsets (R + 1,) and entries of the queues in which `count` ranks follow the global order."""
    number = np.repeat(np.arange(len(rank_offsets) - 1), np.diff(rank_offsets))
    queue = number[np.argsort(ranks, kind="stable")]
    return offsets_of(np.bincount(ranks, minlength=count)), queue


def queues_of_waves(
    rank_offsets: IntArray, ranks: IntArray, wave: IntArray, waves: int, count: int
) -> tuple[IntArray, IntArray]:
    """The same where each microbatch has its wave, (B,), of `waves`; others are dummies."""
    queue = np.full((count, waves), DUMMY, np.int64)
    widths = np.diff(rank_offsets)
    queue[ranks, np.repeat(wave, widths)] = np.repeat(np.arange(len(widths)), widths)
    return np.arange(count + 1, dtype=np.int64) * waves, queue.ravel()


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    offsets = offsets_of(np.array([len(row) for row in rows], np.int64))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, count=int(offsets[-1]))
    return offsets, flat


def _rows(flat: IntArray, offsets: IntArray) -> list[tuple[int, ...]]:
    """Rows of `flat`, which starts at `offsets[0]`."""
    entries = tuple(flat.tolist())
    edges = (offsets - offsets[0]).tolist()
    return [entries[a:b] for a, b in pairwise(edges)]
