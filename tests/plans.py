"""Plans written by hand, for tests of what runs them; nothing is priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.meta import SampleTable
from dynapar.plan import MicroBatch, Parts, Placement, PlanColumns, StepPlan

Written = tuple[Sequence[int], Mapping[int, Sequence[int]]]
"""The ranks of a microbatch, and for each of its samples (a row) the ranks that share it."""


def hand_plan(
    samples: Sequence[LoadedSample], ranks: int, microbatches: Sequence[Written]
) -> StepPlan:
    """Units go to the ranks of their microbatch in turn, from its last rank down."""
    made, queues = [], [[] for _ in range(ranks)]  # type: ignore[var-annotated]
    for number, (members, shares) in enumerate(microbatches):
        unit, placements = 0, []
        for row, owners in shares.items():
            encoders = []
            for _ in range(sum(item.units for item in samples[row].media)):
                encoders.append(members[-1 - unit % len(members)])
                unit += 1
            placements.append(Placement(row, tuple(owners), tuple(encoders)))
        made.append(
            MicroBatch(
                ranks=tuple(members),
                placements=tuple(placements),
                tokens_per_rank=(0,) * len(members),
                encoder_tokens_per_rank=(0,) * len(members),
                ticks=1,
                start=0,
                parts=Parts(1, 0, 0, 0, 0),
            )
        )
        for rank in members:
            queues[rank].append(number)
    return StepPlan(
        step=0,
        sync="step",
        ranks=ranks,
        ranks_per_node=ranks,
        capacity=1 << 20,
        encoder_capacity=1 << 20,
        samples=table_of(samples),
        columns=PlanColumns.from_records(microbatches=made, queues=queues),
        makespan=1,
        lower_bound=1,
        homogeneous_degree=0,
        homogeneous_makespan=0,
        chosen="dynamic",
        plan_seconds=0.0,
    )


def table_of(samples: Sequence[LoadedSample]) -> SampleTable:
    """The metadata of samples whose units are all at hand."""
    units = [[len(sample.units[n]) for n in range(len(sample.units))] for sample in samples]
    tokens = np.array([len(sample.input_ids) for sample in samples], np.int64)
    return SampleTable(
        ids=tuple(sample.id for sample in samples),
        llm_tokens=tokens,
        text_tokens=np.array([int((s.kinds == 0).sum()) for s in samples], np.int64),
        label_tokens=np.array([int((s.targets != IGNORE).sum()) for s in samples], np.int64),
        modalities=np.array(
            [sum({item.kind for item in sample.media}) for sample in samples], np.uint8
        ),
        unit_offsets=np.cumsum([0, *map(len, units)], dtype=np.int64),
        unit_tokens=np.array([n for row in units for n in row], np.int64),
    )
