"""Check a plan as if the planner were not to be trusted.

Coverage, ring shapes, memory after the real cuts, queues, the global order and the times are
derived anew from the samples and compared with what the plan says. All that is wrong is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import get_args

import numpy as np

from dynapar.costs import Costs, coefficients
from dynapar.errors import PlanError
from dynapar.packing.ticks import Layout, Loads, microbatch_ticks, wave_parts
from dynapar.plan.model import MicroBatch, StepPlan, Sync

SHOWN = 20
"""Problems that a message names; it counts the others."""


def validate(plan: StepPlan, costs: Costs | None = None) -> None:
    """Raise unless a plan keeps its contract.

    Args:
        plan: The plan.
        costs: The costs that it was made with: then each microbatch's time is predicted anew.
            Without them, times must still agree with each other.

    Raises:
        PlanError: Something is wrong; the message names all of it.
    """
    problems = list(_table_problems(plan))
    if not problems:
        problems += _coverage_problems(plan)
        for number, micro in enumerate(plan.microbatches):
            problems += (f"microbatch {number}: {what}" for what in _shape_problems(plan, micro))
    if not problems:
        for number, micro in enumerate(plan.microbatches):
            problems += (f"microbatch {number}: {what}" for what in _memory_problems(plan, micro))
        problems += _queue_problems(plan)
    if not problems:
        problems += _time_problems(plan)
        problems += _price_problems(plan, costs) if costs else ()
        problems += _value_problems(plan)
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise PlanError(
            f"step {plan.step}: the plan is not valid: {'; '.join(problems[:SHOWN])}{more}. "
            f"Plan again, and report this if the planner made it"
        )


def _table_problems(plan: StepPlan) -> Iterator[str]:
    table = plan.samples
    if plan.ranks < 1 or plan.ranks_per_node < 1 or plan.ranks % plan.ranks_per_node:
        yield f"{plan.ranks} ranks are not whole nodes of {plan.ranks_per_node}"
    if len(set(table.ids)) != len(table):
        yield "sample ids are not unique"
    for name in ("llm_tokens", "text_tokens", "label_tokens", "modalities"):
        if len(getattr(table, name)) != len(table):
            yield f"samples.{name} has {len(getattr(table, name))} rows; expected {len(table)}"
    if len(table.unit_offsets) != len(table) + 1 or (np.diff(table.unit_offsets) < 0).any():
        yield "samples.unit_offsets is not an ascending row a sample and one"
    elif table.unit_offsets[0] != 0 or table.unit_offsets[-1] != len(table.unit_tokens):
        yield "samples.unit_offsets does not span unit_tokens"
    if (table.llm_tokens < 1).any() or (table.unit_tokens < 1).any():
        yield "a sample or an encoder unit has no tokens"
    elif len(table.label_tokens) == len(table.llm_tokens) == len(table):
        wrong = (table.label_tokens < 0) | (table.label_tokens >= table.llm_tokens)
        for row in np.flatnonzero(wrong):
            yield (
                f"sample {table.ids[row]!r} has {table.label_tokens[row]} label_tokens; expected "
                f"0..{table.llm_tokens[row] - 1}, below its llm_tokens"
            )
    if plan.sync not in get_args(Sync):
        yield f"sync is {plan.sync!r}; expected 'step' or 'microbatch'"
    if plan.chosen not in ("dynamic", "homogeneous"):
        yield f"chosen is {plan.chosen!r}; expected 'dynamic' or 'homogeneous'"


def _coverage_problems(plan: StepPlan) -> Iterator[str]:
    seen: dict[int, int] = {}
    for number, micro in enumerate(plan.microbatches):
        if not micro.placements:
            yield f"microbatch {number} has no sample"
        for place in micro.placements:
            if not 0 <= place.sample < len(plan.samples):
                yield f"microbatch {number} runs row {place.sample} of {len(plan.samples)} samples"
            elif place.sample in seen:
                name = plan.samples.ids[place.sample]
                yield f"sample {name!r} is in microbatches {seen[place.sample]} and {number}"
            seen[place.sample] = number
    for row, name in enumerate(plan.samples.ids):
        if row not in seen:
            yield f"sample {name!r} is in no microbatch"


def _ring_problem(ranks: Sequence[int], plan: StepPlan) -> str:
    """Why these ranks may not work together; empty when they may."""
    node, width = plan.ranks_per_node, len(ranks)
    if not ranks or list(ranks) != list(range(ranks[0], ranks[0] + width)):
        return f"ranks {list(ranks)} are not consecutive and ascending"
    if ranks[0] < 0 or ranks[-1] >= plan.ranks:
        return f"ranks {ranks[0]}..{ranks[-1]} are not all among 0..{plan.ranks - 1}"
    if width <= node:
        if ranks[0] // node != ranks[-1] // node:
            return f"ranks {ranks[0]}..{ranks[-1]} span nodes of {node}, yet would fit in one"
        return ""
    half = node if node % 2 else node // 2
    if ranks[0] % half or width % half:
        return f"ranks {ranks[0]}..{ranks[-1]} are not whole half nodes of {half}"
    return ""


def _shape_problems(plan: StepPlan, micro: MicroBatch) -> Iterator[str]:
    if problem := _ring_problem(micro.ranks, plan):
        yield problem
    members = set(micro.ranks)
    for place in micro.placements:
        if not 0 <= place.sample < len(plan.samples):
            continue
        name = plan.samples.ids[place.sample]
        if foreign := [rank for rank in place.ranks if rank not in members]:
            yield f"sample {name!r} is on rank {foreign[0]}, which is not in it"
        elif problem := _ring_problem(place.ranks, plan):
            yield f"sample {name!r}: {problem}"
        units = len(plan.samples.units(place.sample))
        if len(place.encoders) != units:
            yield f"sample {name!r} has {units} encoder units, {len(place.encoders)} are placed"
        if foreign := [rank for rank in place.encoders if rank not in members]:
            yield f"an encoder unit of sample {name!r} is on rank {foreign[0]}, which is not in it"


def _cut(tokens: int, degree: int) -> list[int]:
    """Tokens on each position: zigzag chunks j and 2 * degree - 1 - j."""
    edges = [i * tokens // (2 * degree) for i in range(2 * degree + 1)]
    chunk = [b - a for a, b in pairwise(edges)]
    return [chunk[j] + chunk[2 * degree - 1 - j] for j in range(degree)]


def _memory_problems(plan: StepPlan, micro: MicroBatch) -> Iterator[str]:
    tokens = dict.fromkeys(micro.ranks, 0)
    encoder = dict.fromkeys(micro.ranks, 0)
    for place in micro.placements:
        cut = _cut(int(plan.samples.llm_tokens[place.sample]), len(place.ranks))
        for rank, share in zip(place.ranks, cut, strict=True):
            tokens[rank] += share
        for rank, unit in zip(place.encoders, plan.samples.units(place.sample), strict=True):
            encoder[rank] += int(unit)
    for what, derived, stated, most, key in (
        ("tokens", tokens, micro.tokens_per_rank, plan.capacity, "capacity"),
        (
            "encoder tokens",
            encoder,
            micro.encoder_tokens_per_rank,
            plan.encoder_capacity,
            "encoder_capacity",
        ),
    ):
        if list(derived.values()) != list(stated):
            yield f"{what} per rank are {list(derived.values())}; the plan says {list(stated)}"
        for rank, amount in derived.items():
            if amount > most:
                yield f"rank {rank} holds {amount:,} {what}; {key} is {most:,}"


def _queue_problems(plan: StepPlan) -> Iterator[str]:
    if len(plan.queues) != plan.ranks:
        yield f"there are {len(plan.queues)} queues for {plan.ranks} ranks"
        return
    expected: list[list[int]] = [[] for _ in range(plan.ranks)]
    for number, micro in enumerate(plan.microbatches):
        for rank in micro.ranks:
            expected[rank].append(number)
    for rank, queue in enumerate(plan.queues):
        found = [entry for entry in queue if entry is not None]
        if found != expected[rank]:
            yield (
                f"the queue of rank {rank} runs {found}; its microbatches in global order are "
                f"{expected[rank]}"
            )
        if plan.sync == "step" and len(found) != len(queue):
            yield f"the queue of rank {rank} has a dummy, which only sync 'microbatch' knows"
    if plan.sync == "microbatch":
        yield from _wave_problems(plan)


def _wave_problems(plan: StepPlan) -> Iterator[str]:
    lengths = {len(queue) for queue in plan.queues}
    if lengths != {len(plan.waves)}:
        yield f"queues have lengths {sorted(lengths)}; expected {len(plan.waves)}, one a wave"
        return
    place: dict[int, int] = {}
    for rank, queue in enumerate(plan.queues):
        for index, entry in enumerate(queue):
            if entry is not None and place.setdefault(entry, index) != index:
                yield f"microbatch {entry} is in waves {place[entry]} and (rank {rank}) {index}"
    for index in range(len(plan.waves)):
        if index not in place.values():
            yield f"wave {index} runs nothing but dummies"
    order = [place[number] for number in range(len(plan.microbatches)) if number in place]
    if order != sorted(order):
        yield "the global order does not follow the waves"


def _waves_of(plan: StepPlan) -> list[int]:
    """The wave of each microbatch; all 0 under sync "step"."""
    waves = [0] * len(plan.microbatches)
    if plan.sync == "microbatch":
        for queue in plan.queues:
            for index, entry in enumerate(queue):
                if entry is not None:
                    waves[entry] = index
    return waves


def _time_problems(plan: StepPlan) -> Iterator[str]:
    free = [0] * plan.ranks
    waves = _waves_of(plan)
    clock = 0
    for index, wave in enumerate(plan.waves):
        if wave.start != clock:
            yield f"wave {index} starts at tick {wave.start}; the ones before it end at {clock}"
        clock += wave.encoder + wave.llm
    for number, micro in enumerate(plan.microbatches):
        if sum(micro.parts) != micro.ticks:
            yield f"microbatch {number}: parts add up to {sum(micro.parts)} of {micro.ticks} ticks"
        start = max(free[rank] for rank in micro.ranks)
        if plan.sync == "microbatch":
            start = plan.waves[waves[number]].start
        if micro.start != start:
            yield f"microbatch {number} starts at tick {micro.start}; its ranks are free at {start}"
        for rank in micro.ranks:
            free[rank] = start + micro.ticks
    end = clock if plan.sync == "microbatch" else max(free)
    if plan.makespan != end:
        yield f"makespan is {plan.makespan} ticks; the queues end at {end}"


def to_layout(plan: StepPlan) -> Layout:
    """The arrays of a plan whose shapes are sound."""
    table = plan.samples
    n = len(table)
    first, degree = np.zeros(n, np.int64), np.ones(n, np.int64)
    units = np.zeros(len(table.unit_tokens), np.int64)
    offsets, order = [0], []
    for micro in plan.microbatches:
        for place in micro.placements:
            row = place.sample
            first[row], degree[row] = place.ranks[0], len(place.ranks)
            units[table.unit_offsets[row] : table.unit_offsets[row + 1]] = place.encoders
            order.append(row)
        offsets.append(len(order))
    return Layout(
        first=np.array([micro.ranks[0] for micro in plan.microbatches], np.int64),
        width=np.array([len(micro.ranks) for micro in plan.microbatches], np.int64),
        wave=np.array(_waves_of(plan), np.int64),
        offsets=np.array(offsets, np.int64),
        order=np.array(order, np.int64),
        sample_first=first,
        sample_degree=degree,
        unit_rank=units,
    )


def _price_problems(plan: StepPlan, costs: Costs) -> Iterator[str]:
    if plan.costs and plan.costs != costs.name:
        yield f"it was made with costs {plan.costs!r}, not with {costs.name!r}"
        return
    table, layout = plan.samples, to_layout(plan)
    constants = coefficients(costs, ranks_per_node=plan.ranks_per_node)
    loads: Loads = microbatch_ticks(
        layout,
        np.array(table.llm_tokens, np.int64),
        np.array(table.unit_offsets, np.int64),
        np.array(table.unit_tokens, np.int64),
        constants,
    )
    for number, micro in enumerate(plan.microbatches):
        row = loads.parts[loads.starts[number] + loads.slowest[number]]
        parts = (*(int(value) for value in row), constants.fixed)
        if micro.ticks != loads.ticks[number] or tuple(micro.parts) != parts:
            yield (
                f"microbatch {number} takes {int(loads.ticks[number])} ticks {parts}; the plan "
                f"says {micro.ticks} {tuple(micro.parts)}"
            )
    if plan.sync == "microbatch":
        for index, row in enumerate(wave_parts(layout, loads, len(plan.waves), constants)):
            wave = plan.waves[index]
            if (wave.encoder, wave.llm) != (int(row[0]), int(row[1])):
                yield (
                    f"wave {index} takes {int(row[0])} + {int(row[1])} ticks; the plan says "
                    f"{wave.encoder} + {wave.llm}"
                )


def _value_problems(plan: StepPlan) -> Iterator[str]:
    for name in ("lower_bound", "homogeneous_makespan"):
        if (value := getattr(plan, name)) < 0:
            yield f"{name} is {value} ticks; expected 0 or more"
    if not 0 <= plan.homogeneous_degree <= plan.ranks:
        yield f"homogeneous_degree is {plan.homogeneous_degree}; expected 0..{plan.ranks}"
    if plan.lower_bound > plan.makespan:
        yield f"lower_bound {plan.lower_bound} is above the makespan {plan.makespan}"
    if plan.homogeneous_degree and plan.makespan > plan.homogeneous_makespan:
        yield f"makespan {plan.makespan} is above homogeneous {plan.homogeneous_makespan}"
    if plan.homogeneous_degree and plan.lower_bound > plan.homogeneous_makespan:
        yield f"lower_bound {plan.lower_bound} is above homogeneous {plan.homogeneous_makespan}"
