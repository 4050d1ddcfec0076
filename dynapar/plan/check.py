"""Check a plan as if the planner were not to be trusted.

Coverage, ring shapes, memory after the real cuts, queues, the global order and the times are
derived anew from the samples and compared with what the plan says. All that is wrong is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import numpy as np

from dynapar.costs import Costs, coefficients
from dynapar.errors import PlanError
from dynapar.meta import IntArray
from dynapar.packing.ticks import Loads, microbatch_ticks, wave_parts
from dynapar.plan.columns import DUMMY, offsets_of, positions, queues_in_order
from dynapar.plan.model import StepPlan, Sync
from dynapar.plan.rules import rule_problems

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
        problems += _shape_problems(plan)
    if not problems:
        problems += _memory_problems(plan)
        problems += _queue_problems(plan)
    if not problems:
        problems += rule_problems(plan)
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
    columns, names, count = plan.columns, plan.samples.ids, len(plan.samples)
    rows, owner = columns.sample_rows, _owners(columns.sample_offsets)
    for number in np.flatnonzero(np.diff(columns.sample_offsets) == 0):
        yield f"microbatch {number} has no sample"
    known = (rows >= 0) & (rows < count)
    for entry in np.flatnonzero(~known):
        yield f"microbatch {owner[entry]} runs row {rows[entry]} of {count} samples"
    order = np.flatnonzero(known)[np.argsort(rows[known], kind="stable")]
    for entry in np.flatnonzero(np.diff(rows[order]) == 0):
        one, other = order[entry], order[entry + 1]
        yield f"sample {names[rows[one]]!r} is in microbatches {owner[one]} and {owner[other]}"
    for row in np.flatnonzero(np.bincount(rows[known], minlength=count) == 0):
        yield f"sample {names[row]!r} is in no microbatch"


def _owners(offsets: IntArray) -> IntArray:
    """For every entry of rows that lie one after another, its row."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _ring_problems(plan: StepPlan, offsets: IntArray, ranks: IntArray) -> dict[int, str]:
    """Of rows of ranks that are to work together, those that may not, and why."""
    node, width = plan.ranks_per_node, np.diff(offsets)
    half = node if node % 2 else node // 2
    first = np.full(len(width), -1, np.int64)
    first[width > 0] = ranks[offsets[:-1][width > 0]]
    last = first + width - 1
    gaps = ranks != np.repeat(first, width) + positions(offsets)
    broken = (np.bincount(_owners(offsets)[gaps], minlength=len(width)) > 0) | (width == 0)
    outside = (first < 0) | (last >= plan.ranks)
    split = (width <= node) & (first // node != last // node)
    ragged = (width > node) & ((first % half > 0) | (width % half > 0))
    faults = {}
    for row in np.flatnonzero(broken | outside | split | ragged).tolist():
        span = f"ranks {first[row]}..{last[row]}"
        if broken[row]:
            own = ranks[offsets[row] : offsets[row + 1]].tolist()
            faults[row] = f"ranks {own} are not consecutive and ascending"
        elif outside[row]:
            faults[row] = f"{span} are not all among 0..{plan.ranks - 1}"
        elif split[row]:
            faults[row] = f"{span} span nodes of {node}, yet would fit in one"
        else:
            faults[row] = f"{span} are not whole half nodes of {half}"
    return faults


def _shape_problems(plan: StepPlan) -> Iterator[str]:
    columns, names = plan.columns, plan.samples.ids
    rings = _ring_problems(plan, columns.rank_offsets, columns.ranks)
    yield from (f"microbatch {number}: {what}" for number, what in rings.items())
    # What is inside a microbatch is judged where its own ranks and rows are sound.
    owner, rows = _owners(columns.sample_offsets), columns.sample_rows
    judged = (rows >= 0) & (rows < len(plan.samples)) & ~np.isin(owner, list(rings))

    def where(entry: int) -> tuple[str, str]:
        return f"microbatch {owner[entry]}", repr(names[rows[entry]])

    foreign = _foreign(plan, columns.share_offsets, columns.share_ranks)
    shares = _ring_problems(plan, columns.share_offsets, columns.share_ranks)
    for entry in sorted(foreign.keys() | shares.keys()):
        if judged[entry]:
            number, name = where(entry)
            if entry in foreign:
                yield f"{number}: sample {name} is on rank {foreign[entry]}, which is not in it"
            else:
                yield f"{number}: sample {name}: {shares[entry]}"
    placed = np.diff(columns.unit_offsets)
    units = np.diff(plan.samples.unit_offsets)[np.where(judged, rows, 0)]
    for entry in np.flatnonzero(judged & (placed != units)).tolist():
        number, name = where(entry)
        yield (
            f"{number}: sample {name} has {units[entry]} encoder units, {placed[entry]} are placed"
        )
    for entry, rank in _foreign(plan, columns.unit_offsets, columns.unit_ranks).items():
        if judged[entry]:
            number, name = where(entry)
            yield (
                f"{number}: an encoder unit of sample {name} is on rank {rank}, which is not in it"
            )


def _foreign(plan: StepPlan, offsets: IntArray, ranks: IntArray) -> dict[int, int]:
    """Of rows of ranks, one a sample, those with a rank outside their microbatch, and the first."""
    columns = plan.columns
    owner = _owners(columns.sample_offsets)
    width = np.diff(columns.rank_offsets)
    first = np.zeros(len(width), np.int64)
    first[width > 0] = columns.ranks[columns.rank_offsets[:-1][width > 0]]
    row = _owners(offsets)
    place = ranks - first[owner[row]]
    outside = np.flatnonzero((place < 0) | (place >= width[owner[row]]))
    return dict(zip(row[outside][::-1].tolist(), ranks[outside][::-1].tolist(), strict=True))


def _cut(tokens: IntArray, degree: IntArray, position: IntArray) -> IntArray:
    """Tokens on a position of a ring: zigzag chunks j and 2 * degree - 1 - j."""

    def edge(chunk: IntArray) -> IntArray:
        return chunk * tokens // (2 * degree)

    mirror = 2 * degree - 1 - position
    return edge(position + 1) - edge(position) + edge(mirror + 1) - edge(mirror)


def _memory_problems(plan: StepPlan) -> Iterator[str]:
    columns, table = plan.columns, plan.samples
    rows, owner = columns.sample_rows, _owners(columns.sample_offsets)
    # Where the row of a rank of the sample's microbatch lies, but for the rank itself.
    base = (columns.rank_offsets[:-1] - columns.ranks[columns.rank_offsets[:-1]])[owner]
    share, unit = _owners(columns.share_offsets), _owners(columns.unit_offsets)
    tokens, encoder = np.zeros((2, len(columns.ranks)), np.int64)
    cut = _cut(
        table.llm_tokens[rows][share], columns.degrees[share], positions(columns.share_offsets)
    )
    np.add.at(tokens, base[share] + columns.share_ranks, cut)
    own = table.unit_offsets[rows][unit] + positions(columns.unit_offsets)
    np.add.at(encoder, base[unit] + columns.unit_ranks, table.unit_tokens[own])
    held = _owners(columns.rank_offsets)
    for what, derived, stated, most, key in (
        ("tokens", tokens, columns.tokens, plan.capacity, "capacity"),
        (
            "encoder tokens",
            encoder,
            columns.encoder_tokens,
            plan.encoder_capacity,
            "encoder_capacity",
        ),
    ):
        for number in np.unique(held[derived != stated]):
            span = slice(columns.rank_offsets[number], columns.rank_offsets[number + 1])
            yield (
                f"microbatch {number}: {what} per rank are {derived[span].tolist()}; the plan says "
                f"{stated[span].tolist()}"
            )
        for entry in np.flatnonzero(derived > most):
            yield (
                f"microbatch {held[entry]}: rank {columns.ranks[entry]} holds {derived[entry]:,} "
                f"{what}; {key} is {most:,}"
            )


def _queue_problems(plan: StepPlan) -> Iterator[str]:
    columns = plan.columns
    if len(columns.queue_offsets) - 1 != plan.ranks:
        yield f"there are {len(columns.queue_offsets) - 1} queues for {plan.ranks} ranks"
        return
    offsets, expected = queues_in_order(columns.rank_offsets, columns.ranks, plan.ranks)
    runs = columns.queue != DUMMY
    found = columns.queue[runs]
    rank = _owners(columns.queue_offsets)
    own = offsets_of(np.bincount(rank[runs], minlength=plan.ranks))
    wrong = not (np.array_equal(own, offsets) and np.array_equal(found, expected))
    for each in range(plan.ranks) if wrong else ():
        has = found[own[each] : own[each + 1]].tolist()
        should = expected[offsets[each] : offsets[each + 1]].tolist()
        if has != should:
            yield (
                f"the queue of rank {each} runs {has}; its microbatches in global order are "
                f"{should}"
            )
    if plan.sync == "step":
        for each in np.unique(rank[~runs]):
            yield f"the queue of rank {each} has a dummy, which only sync 'microbatch' knows"
    elif not wrong:
        yield from _wave_problems(plan)


def _wave_problems(plan: StepPlan) -> Iterator[str]:
    columns, waves = plan.columns, len(plan.columns.waves)
    lengths = np.unique(np.diff(columns.queue_offsets)).tolist()
    if lengths != [waves]:
        yield f"queues have lengths {lengths}; expected {waves}, one a wave"
        return
    runs = columns.queue != DUMMY
    number, index = columns.queue[runs], positions(columns.queue_offsets)[runs]
    rank = _owners(columns.queue_offsets)[runs]
    place = np.zeros(len(columns.ticks), np.int64)
    place[number[::-1]] = index[::-1]  # of its first rank: what is written last stays
    for entry in np.flatnonzero(index != place[number]):
        yield (
            f"microbatch {number[entry]} is in waves {place[number[entry]]} and (rank "
            f"{rank[entry]}) {index[entry]}"
        )
    for wave in np.flatnonzero(np.bincount(index, minlength=waves) == 0):
        yield f"wave {wave} runs nothing but dummies"
    if (np.diff(place) < 0).any():
        yield "the global order does not follow the waves"


def _time_problems(plan: StepPlan) -> Iterator[str]:
    columns = plan.columns
    ends = offsets_of(columns.waves[:, 1:].sum(axis=1))
    for wave in np.flatnonzero(columns.waves[:, 0] != ends[:-1]):
        yield (
            f"wave {wave} starts at tick {columns.waves[wave, 0]}; the ones before it end at "
            f"{ends[wave]}"
        )
    whole = columns.parts.sum(axis=1)
    for number in np.flatnonzero(whole != columns.ticks):
        yield (
            f"microbatch {number}: parts add up to {whole[number]} of {columns.ticks[number]} ticks"
        )
    if plan.sync == "microbatch":
        starts, end = columns.waves[plan.wave_of_microbatches(), 0], int(ends[-1])
    else:
        starts, end = _queue_starts(plan)
    for number in np.flatnonzero(columns.starts != starts):
        yield (
            f"microbatch {number} starts at tick {columns.starts[number]}; its ranks are free at "
            f"{starts[number]}"
        )
    if plan.makespan != end:
        yield f"makespan is {plan.makespan} ticks; the queues end at {end}"


def _queue_starts(plan: StepPlan) -> tuple[IntArray, int]:
    """When each microbatch starts, its ranks being free, and when the last one ends."""
    columns = plan.columns
    ranks, offsets = columns.ranks.tolist(), columns.rank_offsets.tolist()
    free, starts = [0] * plan.ranks, []
    for number, ticks in enumerate(columns.ticks.tolist()):
        members = ranks[offsets[number] : offsets[number + 1]]
        starts.append(max(free[rank] for rank in members))
        for rank in members:
            free[rank] = starts[-1] + ticks
    return np.array(starts, np.int64), max(free)


def _price_problems(plan: StepPlan, costs: Costs) -> Iterator[str]:
    if plan.costs and plan.costs != costs.name:
        yield f"it was made with costs {plan.costs!r}, not with {costs.name!r}"
        return
    table, layout, columns = plan.samples, plan.layout(), plan.columns
    constants = coefficients(costs, ranks_per_node=plan.ranks_per_node)
    loads: Loads = microbatch_ticks(
        layout,
        np.array(table.llm_tokens, np.int64),
        np.array(table.unit_offsets, np.int64),
        np.array(table.unit_tokens, np.int64),
        constants,
    )
    parts = np.full(columns.parts.shape, constants.fixed, np.int64)
    parts[:, :-1] = loads.parts[loads.starts + loads.slowest]
    differs = (loads.ticks != columns.ticks) | (parts != columns.parts).any(axis=1)
    for number in np.flatnonzero(differs):
        yield (
            f"microbatch {number} takes {loads.ticks[number]} ticks "
            f"{tuple(parts[number].tolist())}; the plan says {columns.ticks[number]} "
            f"{tuple(columns.parts[number].tolist())}"
        )
    if plan.sync == "microbatch":
        priced = wave_parts(layout, loads, len(columns.waves), constants)
        for index in np.flatnonzero((priced != columns.waves[:, 1:]).any(axis=1)):
            encoder, llm = columns.waves[index, 1:]
            yield (
                f"wave {index} takes {priced[index, 0]} + {priced[index, 1]} ticks; the plan says "
                f"{encoder} + {llm}"
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
