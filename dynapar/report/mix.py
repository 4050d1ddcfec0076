"""Sum up what the steps are made of: lengths, kinds of samples, encoder against LLM work.

Figures are added step by step, so that a long run needs no more memory than a short one.
"""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np

from dynapar.costs import TICKS_PER_SECOND, Costs, coefficients
from dynapar.meta import KINDS, IntArray, SampleTable
from dynapar.packing.ticks import sample_columns, unit_columns
from dynapar.plan import StepPlan
from dynapar.report.model import (
    MODALITIES,
    Cell,
    DataMix,
    LengthBin,
    LongSample,
    ModalityFigures,
)

MOST_LONG = 10
"""Longest samples that are named."""
CELLS_PER_DECADE = 4
"""Of the grid of encoder against LLM work."""
_EDGES = np.array([int(np.ceil(2.0 ** (k / 2))) for k in range(2, 81)], np.int64)
"""Two bins an octave from 2 tokens on; shorter samples are in the first one."""


class MixBuilder:
    """Adds up the samples of one step after another."""

    def __init__(self) -> None:
        shape = (len(_EDGES), len(MODALITIES))
        self._samples = np.zeros(shape, np.int64)
        self._tokens = np.zeros(shape, np.int64)
        self._encoder_tokens = np.zeros(len(MODALITIES), np.int64)
        self._longest = np.zeros(len(MODALITIES), np.int64)
        self._work = np.zeros((len(MODALITIES), 2), np.int64)
        self._cells: Counter[tuple[int, int, int]] = Counter()
        self._lengths: Counter[int] = Counter()
        self._targets = 0
        self._long: list[tuple[int, int, int, LongSample]] = []

    def add(self, plan: StepPlan, costs: Costs) -> None:
        """Add the samples of a step.

        Args:
            plan: The step.
            costs: What work costs.
        """
        table = plan.samples
        if not len(table):
            return
        kinds = modality_of(table)
        lengths = table.llm_tokens
        place = (np.maximum(np.searchsorted(_EDGES, lengths, side="right") - 1, 0), kinds)
        np.add.at(self._samples, place, 1)
        np.add.at(self._tokens, place, lengths)
        np.add.at(self._encoder_tokens, kinds, table.encoder_tokens)
        np.maximum.at(self._longest, kinds, lengths)
        self._targets += int(table.label_tokens.sum())
        values, counts = np.unique(lengths, return_counts=True)
        self._lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        work = work_of(table, costs, plan.ranks_per_node)
        np.add.at(self._work, kinds, work)
        rows, counts = np.unique(
            np.column_stack([kinds, _squares(work[:, 0]), _squares(work[:, 1])]),
            axis=0,
            return_counts=True,
        )
        self._cells.update(dict(zip(map(tuple, rows.tolist()), counts.tolist(), strict=True)))
        self._remember(plan, kinds)

    def _remember(self, plan: StepPlan, kinds: IntArray) -> None:
        table, columns = plan.samples, plan.columns
        degrees = np.ones(len(table), np.int64)
        degrees[columns.sample_rows] = columns.degrees
        for row in np.argsort(-table.llm_tokens, kind="stable")[:MOST_LONG].tolist():
            sample = LongSample(
                id=table.ids[row],
                step=plan.step,
                tokens=int(table.llm_tokens[row]),
                encoder_tokens=int(table.encoder_tokens[row]),
                modality=MODALITIES[kinds[row]],
                degree=int(degrees[row]),
            )
            heapq.heappush(self._long, (sample.tokens, -plan.step, -row, sample))
            if len(self._long) > MOST_LONG:
                heapq.heappop(self._long)

    def result(self) -> DataMix:
        """The mix of all steps added."""
        occurs = np.flatnonzero(self._samples.sum(axis=0))
        filled = np.flatnonzero(self._samples.sum(axis=1))
        bins = range(filled[0], filled[-1] + 1) if len(filled) else range(0)
        median, top = _median_and_top(self._lengths)
        return DataMix(
            samples=int(self._samples.sum()),
            tokens=int(self._tokens.sum()),
            targets=self._targets,
            median=median,
            top_share=top,
            modalities=tuple(self._modality(kind) for kind in occurs.tolist()),
            bins=tuple(
                LengthBin(
                    low=int(_EDGES[row]) if row else 1,
                    high=int(_EDGES[row + 1]),
                    samples=tuple(self._samples[row].tolist()),
                    tokens=tuple(self._tokens[row].tolist()),
                )
                for row in bins
            ),
            work=tuple(
                Cell(MODALITIES[kind], middle(x), middle(y), count)
                for (kind, x, y), count in sorted(self._cells.items())
            ),
            longest=tuple(entry[-1] for entry in sorted(self._long, reverse=True)),
        )

    def _modality(self, kind: int) -> ModalityFigures:
        return ModalityFigures(
            name=MODALITIES[kind],
            samples=int(self._samples[:, kind].sum()),
            tokens=int(self._tokens[:, kind].sum()),
            longest=int(self._longest[kind]),
            encoder_tokens=int(self._encoder_tokens[kind]),
            llm_seconds=int(self._work[kind, 0]) / TICKS_PER_SECOND,
            encoder_seconds=int(self._work[kind, 1]) / TICKS_PER_SECOND,
        )


def modality_of(table: SampleTable) -> IntArray:
    """(n,) index into `MODALITIES` of each sample."""
    several = len(MODALITIES) - 1
    by_bits = np.full(sum(KINDS.values()) + 1, several, np.int64)
    by_bits[0] = MODALITIES.index("text")
    for name, bit in KINDS.items():
        by_bits[bit] = MODALITIES.index(name)
    found: IntArray = by_bits[table.modalities]
    return found


def work_of(table: SampleTable, costs: Costs, ranks_per_node: int) -> IntArray:
    """(n, 2) ticks of each sample in the LLM (on one rank) and in the encoders."""
    constants, reach = coefficients(costs, ranks_per_node=ranks_per_node), table.reach_under(costs)
    llm = sample_columns(table.llm_tokens, 1, constants, reach=reach).sum(axis=1)
    units = unit_columns(np.array(table.unit_tokens, np.int64), constants)
    sums = np.concatenate(([0], np.cumsum(units)))
    encoder = sums[table.unit_offsets[1:]] - sums[table.unit_offsets[:-1]]
    return np.column_stack([llm, encoder]).astype(np.int64)


def _squares(ticks: IntArray) -> IntArray:
    """The square of a logarithmic grid that each number of ticks is in; -1 for 0."""
    logs = np.floor(np.log10(np.maximum(ticks, 1)) * CELLS_PER_DECADE).astype(np.int64)
    return np.where(ticks > 0, logs, -1)


def middle(square: int) -> float:
    """Seconds in the geometric middle of a square; 0 for the one of no ticks."""
    if square < 0:
        return 0.0
    return float(10.0 ** ((square + 0.5) / CELLS_PER_DECADE) / TICKS_PER_SECOND)


def _median_and_top(lengths: Counter[int]) -> tuple[int, float]:
    """The (upper) median length, and the share of tokens in the longest 1 % of the samples."""
    count = sum(lengths.values())
    if not count:
        return 0, 0.0
    left, median = count // 2, 0
    for length in sorted(lengths):
        left -= lengths[length]
        if left < 0:
            median = length
            break
    top, held = max(1, count // 100), 0
    for length in sorted(lengths, reverse=True):
        taken = min(top, lengths[length])
        held += taken * length
        top -= taken
        if not top:
            break
    return median, held / sum(length * amount for length, amount in lengths.items())
