"""Predict blocks by the planner's own pricing, and compare with what was timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.calibrate.blocks import Block
from dynapar.costs import TICKS_PER_SECOND, Costs, coefficients
from dynapar.memory.policies import POLICIES
from dynapar.meta import SampleTable
from dynapar.packing.ticks import Layout
from dynapar.plan.pricing import price_layout

FloatArray = npt.NDArray[np.float64]

TERMS = {
    "text": "text, one rank",
    "encoder": "text and encoder",
    "ring": "ring of two",
    "again": "recomputed",
    "packs": "held out: packs of samples",
}


class TermError(NamedTuple):
    """Blocks of one kind; all figures are shares."""

    kind: str
    blocks: int
    median: float
    """Of |predicted / measured - 1|."""
    worst: float
    spread: float
    """Median over the blocks of how far runs of the same block stray."""


def predict(table: SampleTable, block: Block, costs: Costs) -> float:
    """Seconds that the planner counts for a block on its first rank.

    Args:
        table: All samples of the index.
        block: The block.
        costs: What work costs.
    """
    tokens, units = block.tokens(table), block.units(table)
    counts = [len(table.units(row)) for row in block.rows] or [0] * len(tokens)
    n = len(tokens)
    whole = np.array(tokens, np.int64)
    samples = SampleTable(
        ids=tuple(map(str, range(n))),
        llm_tokens=whole,
        text_tokens=whole,
        label_tokens=np.array(block.targets(table), np.int64),
        modalities=np.zeros(n, np.uint8),
        unit_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        unit_tokens=np.array(units, np.int64),
    )
    layout = Layout(
        first=np.zeros(1, np.int64),
        width=np.full(1, block.degree, np.int64),
        wave=np.zeros(1, np.int64),
        offsets=np.array([0, n], np.int64),
        order=np.arange(n, dtype=np.int64),
        sample_first=np.zeros(n, np.int64),
        sample_degree=np.full(n, block.degree, np.int64),
        unit_rank=np.zeros(len(units), np.int64),
    )
    policy = np.array([POLICIES.index(block.recompute)], np.int64)
    loads = price_layout(layout, samples, costs, ranks_per_node=block.degree, recompute=policy)
    fixed = coefficients(costs, ranks_per_node=block.degree).fixed
    return float(loads.parts[0].sum() + fixed) / TICKS_PER_SECOND


def errors_by_term(
    blocks: Sequence[Block], seconds: FloatArray, spreads: FloatArray, predicted: FloatArray
) -> list[TermError]:
    """How far the costs are from what was timed, by kind of block.

    Args:
        blocks: What was timed.
        seconds: (blocks,) measured.
        spreads: (blocks,) of runs of the same block.
        predicted: (blocks,) seconds.
    """
    error = np.abs(predicted / seconds - 1)
    found = []
    for kind in TERMS:
        here = [number for number, block in enumerate(blocks) if block.kind == kind]
        if here:
            found.append(
                TermError(
                    kind=kind,
                    blocks=len(here),
                    median=float(np.median(error[here])),
                    worst=float(error[here].max()),
                    spread=float(np.median(spreads[here])),
                )
            )
    return found
