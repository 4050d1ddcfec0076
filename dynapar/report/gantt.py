"""Choose steps worth a look, and lay them out rank by rank: as planned and as measured.

Ranks measure how long each microbatch of their queue took, waiting for peers included, and run
their queue without a pause; so a measured microbatch starts where the one before it ended, and the
first one at the start of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynapar.costs import TICKS_PER_SECOND
from dynapar.errors import ConfigError
from dynapar.plan import StepPlan
from dynapar.report.clocks import Clocks
from dynapar.report.model import (
    Box,
    Gantt,
    MeasuredStep,
    MicrobatchFigures,
    Part,
    PlannedStep,
)

MOST_STEPS = 6
"""Steps that are shown where none are asked for."""
MOST_BOXES = 14_000
"""In all of a page: beyond it a page grows heavy."""


def choose_steps(
    planned: Sequence[PlannedStep], measured: Sequence[MeasuredStep], asked: Sequence[int]
) -> list[tuple[int, str]]:
    """Steps to show, each with the reason, ascending.

    Args:
        planned: All steps.
        measured: Those with measurements.
        asked: Steps that the user wants; empty for a choice.

    Raises:
        ConfigError: A step that is asked for is not there.
    """
    numbers = [step.step for step in planned]
    if missing := [step for step in asked if step not in set(numbers)]:
        raise ConfigError(
            f"step {missing[0]} is not there; expected steps from {min(numbers)} to {max(numbers)}"
        )
    if asked:
        return [(step, "asked for") for step in sorted(set(asked))]
    reasons: dict[int, list[str]] = {}
    by_time = sorted(planned, key=lambda step: (step.makespan, step.step))
    picked = [
        (by_time[len(by_time) // 2].step, "median makespan"),
        (by_time[-1].step, "longest makespan"),
        (max(planned, key=lambda step: (step.gap, -step.step)).step, "largest gap"),
        (max(planned, key=lambda s: (len(s.samples_by_degree), -s.step)).step, "most degrees"),
        (planned[0].step, "first"),
    ]
    if len(measured) > 1:
        slowest = max(measured[1:], key=lambda step: (step.error, -step.step))
        picked.insert(1, (slowest.step, "furthest above its prediction"))
    for step, why in picked:
        reasons.setdefault(step, []).append(why)
    return [(step, ", ".join(why)) for step, why in sorted(reasons.items())][:MOST_STEPS]


def lay_out(plan: StepPlan, why: str, clocks: Clocks | None, *, boxes: int) -> Gantt:
    """One step, rank by rank.

    Args:
        plan: The step.
        why: It is shown.
        clocks: What was measured, where it fits the plan.
        boxes: That may be drawn, planned and measured together; beyond that only the first nodes
            are.
    """
    shown = plan.ranks
    first = plan.columns.ranks[plan.columns.rank_offsets[:-1]]
    counts = 2 * np.bincount(first, minlength=plan.ranks)
    if clocks:
        counts += np.diff(plan.columns.queue_offsets)
    while shown > plan.ranks_per_node and int(counts[:shown].sum()) > boxes:
        shown -= plan.ranks_per_node
    numbers = np.flatnonzero(first < shown).tolist()
    return Gantt(
        step=plan.step,
        why=why,
        ranks=plan.ranks,
        shown_ranks=shown,
        ranks_per_node=plan.ranks_per_node,
        microbatches={number: _figures(plan, number) for number in numbers},
        planned=tuple(
            box._replace(width=min(box.width, shown - box.first))
            for box in planned_boxes(plan)
            if box.first < shown
        ),
        waves=tuple(
            (wave.start + wave.encoder + wave.llm) / TICKS_PER_SECOND for wave in plan.waves
        ),
        lower_bound=plan.lower_bound / TICKS_PER_SECOND,
        makespan=plan.makespan / TICKS_PER_SECOND,
        measured=tuple(box for box in measured_boxes(plan, clocks) if box.first < shown),
        measured_steps=clocks.steps[:shown] if clocks else (),
    )


def planned_boxes(plan: StepPlan) -> list[Box]:
    """Where a plan puts the encoder and the LLM part of each microbatch, in global order.

    Parts are those of the slowest rank. Under sync "microbatch" all LLM parts of a wave begin
    together, when its last encoder part has ended.
    """
    columns = plan.columns
    encoders = columns.parts[:, 3]
    pause = columns.waves[plan.wave_of_microbatches(), 1] if plan.waves else encoders
    values = zip(
        columns.ranks[columns.rank_offsets[:-1]].tolist(),
        np.diff(columns.rank_offsets).tolist(),
        columns.starts.tolist(),
        encoders.tolist(),
        (columns.starts + pause).tolist(),
        (columns.ticks - encoders).tolist(),
        strict=True,
    )
    boxes = []
    for number, (first, width, begin, encoder, start, llm) in enumerate(values):
        parts: tuple[tuple[int, int, Part], ...] = (
            (begin, encoder, "encoder"),
            (start, llm, "llm"),
        )
        boxes += [
            Box(first, width, at / TICKS_PER_SECOND, ticks / TICKS_PER_SECOND, number, part)
            for at, ticks, part in parts
            if ticks
        ]
    return boxes


def measured_boxes(plan: StepPlan, clocks: Clocks | None) -> list[Box]:
    """When each rank was in each microbatch of its queue; none without measurements."""
    boxes = []
    for rank, times in enumerate(clocks.microbatches if clocks else ()):
        clock = 0.0
        entries = [entry for entry in plan.queue(rank) if entry is not None]
        for entry, seconds in zip(entries, times, strict=True):
            boxes.append(Box(rank, 1, clock, seconds, entry, "all"))
            clock += seconds
    return boxes


def _figures(plan: StepPlan, number: int) -> MicrobatchFigures:
    micro, table = plan.microbatch(number), plan.samples
    lengths = [int(table.llm_tokens[place.sample]) for place in micro.placements]
    longest = int(np.argmax(lengths)) if lengths else -1
    return MicrobatchFigures(
        first=micro.ranks[0],
        width=len(micro.ranks),
        samples=len(micro.placements),
        tokens=sum(lengths),
        encoder_tokens=sum(micro.encoder_tokens_per_rank),
        degree=max((len(place.ranks) for place in micro.placements), default=1),
        recompute=micro.recompute,
        longest_id=table.ids[micro.placements[longest].sample] if lengths else "",
        longest_tokens=max(lengths, default=0),
        seconds=micro.ticks / TICKS_PER_SECOND,
        encoder_seconds=micro.parts.encoder / TICKS_PER_SECOND,
    )


def shown_degrees(gantts: Sequence[Gantt]) -> tuple[int, ...]:
    """The largest degrees of the microbatches that are shown, ascending."""
    shown = {micro.degree for gantt in gantts for micro in gantt.microbatches.values()}
    return tuple(sorted(shown))
