"""Write plans and runs in Chrome's trace format, which Perfetto and chrome://tracing open.

Two processes, "planned" and "measured", have a thread a rank and one for the steps. Steps follow
each other: planned ones by their makespans (the closing pass is no part of a plan), measured ones
by the wall clock. Times are whole microseconds, and the slices of a thread never overlap but for
the parts inside a microbatch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import dynapar
from dynapar.costs import TICKS_PER_SECOND
from dynapar.plan import StepPlan
from dynapar.plan.schema import Json
from dynapar.report.clocks import Clocks
from dynapar.report.gantt import measured_boxes, planned_boxes
from dynapar.report.source import Source

PLANNED, MEASURED = 1, 2
"""Process numbers."""
STEPS = 100
"""The thread of the steps; rank r is thread `STEPS` + r + 1. Perfetto takes thread 0, and one with
the number of its process, for the process's main thread, and would draw both on one track."""
MOST_EVENTS = 400_000
"""Beyond it viewers stall; later steps are then left out."""

Event = dict[str, Json]


class Written(NamedTuple):
    """What went into a trace."""

    events: int
    steps: int
    left_out: int
    """Steps for which there was no room."""


def write_trace(source: Source, path: Path, *, most: int = MOST_EVENTS) -> Written:
    """Write the trace of plans, and of a run's measurements.

    Args:
        source: The plans or the run.
        path: The file to write.
        most: Events for which there is room; the first step always has some.

    Raises:
        SourceError: A line is no plan as dynapar wrote it.
    """
    events = steps = ranks = 0
    planned = measured = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents":[\n')
        for plan in source:
            clocks = source.clocks.get(plan.step)
            own = [*_planned(plan, planned)]
            planned += plan.makespan
            if clocks:
                own += _measured(plan, clocks, measured)
                measured += _length(clocks)
            if steps and events + len(own) > most:
                break
            file.writelines(json.dumps(event) + ",\n" for event in own)
            events, steps, ranks = events + len(own), steps + 1, max(ranks, plan.ranks)
        names = [*_names(PLANNED, "planned", ranks)]
        if source.clocks:
            names += _names(MEASURED, "measured", ranks)
        file.write(",\n".join(json.dumps(name) for name in names))
        other = {"made_by": f"dynapar {dynapar.__version__}", "source": source.path.name}
        file.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(other)}}}\n')
    return Written(events=events, steps=steps, left_out=len(source.lines) - steps)


def _names(process: int, name: str, ranks: int) -> Iterator[Event]:
    yield _meta(process, STEPS, "process_name", {"name": name})
    threads = [(STEPS, "steps"), *((_thread(rank), f"rank {rank}") for rank in range(ranks))]
    for thread, text in threads:
        yield _meta(process, thread, "thread_name", {"name": text})
        yield _meta(process, thread, "thread_sort_index", {"sort_index": thread})


def _thread(rank: int) -> int:
    return STEPS + rank + 1


def _meta(process: int, thread: int, name: str, values: Json) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": values}


def _slice(
    process: int, thread: int, name: str, begin: int, end: int, values: dict[str, Json]
) -> Event:
    return {
        "ph": "X",
        "cat": "dynapar",
        "pid": process,
        "tid": thread,
        "name": name,
        "ts": begin,
        "dur": max(0, end - begin),
        "args": values,
    }


def _micros(seconds: float) -> int:
    return round(seconds * TICKS_PER_SECOND)


def _planned(plan: StepPlan, offset: int) -> Iterator[Event]:
    """The step, and for each rank its microbatches with their parts inside."""
    yield _slice(PLANNED, STEPS, f"step {plan.step}", offset, offset + plan.makespan, {
        "samples": len(plan.samples),
        "tokens": int(plan.samples.llm_tokens.sum()),
        "gap": plan.gap,
        "chosen": plan.chosen,
    })  # fmt: skip
    for number, boxes in groupby(planned_boxes(plan), key=lambda box: box.microbatch):
        parts = [(box.part, _micros(box.start), _micros(box.start + box.seconds)) for box in boxes]
        micro = plan.microbatch(number)
        values = _values(plan, number)
        for rank in micro.ranks:
            begin, end = offset + parts[0][1], offset + parts[-1][2]
            yield _slice(PLANNED, _thread(rank), _name(plan, number), begin, end, values)
            if len(parts) > 1:
                for part, start, stop in parts:
                    yield _slice(PLANNED, _thread(rank), part, offset + start, offset + stop, {})


def _name(plan: StepPlan, number: int) -> str:
    width = len(plan.microbatch(number).ranks)
    return f"microbatch {number}" + (f" (ring of {width})" if width > 1 else "")


def _values(plan: StepPlan, number: int) -> dict[str, Json]:
    micro = plan.microbatch(number)
    return {
        "step": plan.step,
        "microbatch": number,
        "ranks": f"{micro.ranks[0]}-{micro.ranks[-1]}",
        "samples": len(micro.placements),
        "degree": max((len(place.ranks) for place in micro.placements), default=1),
        "tokens_per_rank": max(micro.tokens_per_rank, default=0),
        "predicted_us": micro.ticks,
    }


def _length(clocks: Clocks) -> int:
    """Microseconds until every rank is done: a slice of the next step overlaps none of this."""
    ends = [wait + step for wait, step in zip(clocks.waited, clocks.steps, strict=True)]
    inside = [
        wait + sum(times) for wait, times in zip(clocks.waited, clocks.microbatches, strict=True)
    ]
    return _micros(max(clocks.seconds, *ends, *inside)) + 1


def _measured(plan: StepPlan, clocks: Clocks, offset: int) -> Iterator[Event]:
    """The step, and for each rank its wait for the loader, microbatches and closing pass."""
    end = offset + _micros(clocks.seconds)
    yield _slice(MEASURED, STEPS, f"step {plan.step}", offset, end, {
        "loss": clocks.loss,
        "predicted_us": plan.makespan,
    })  # fmt: skip
    for rank, waited in enumerate(clocks.waited):
        if waited > 0:
            begin = offset + _micros(waited)
            yield _slice(MEASURED, _thread(rank), "waiting for the loader", offset, begin, {})
    done = list(clocks.waited)
    for box in measured_boxes(plan, clocks):
        rank, start = box.first, clocks.waited[box.first] + box.start
        done[rank] = start + box.seconds
        begin, end = offset + _micros(start), offset + _micros(done[rank])
        name, values = _name(plan, box.microbatch), _values(plan, box.microbatch)
        yield _slice(MEASURED, _thread(rank), name, begin, end, values)
    for rank, step in enumerate(clocks.steps):
        begin = offset + _micros(done[rank])
        end = offset + _micros(clocks.waited[rank] + step)
        if end > begin:
            yield _slice(MEASURED, _thread(rank), "closing pass", begin, end, {})
