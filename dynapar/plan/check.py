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
from dynapar.memory.policies import POLICIES
from dynapar.meta import IntArray
from dynapar.packing.ticks import wave_parts
from dynapar.plan.columns import DUMMY, offsets_of, owners, positions, queues_in_order
from dynapar.plan.holdings import (
    column_problems,
    coverage_problems,
    memory_problems,
    shape_problems,
)
from dynapar.plan.model import StepPlan, Sync
from dynapar.plan.pricing import price_layout
from dynapar.plan.rules import rule_problems
from dynapar.plan.treeform import tree_problems

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
    problems = [*_table_problems(plan), *column_problems(plan)]
    if not problems:
        problems += tree_problems(plan.samples)
        problems += coverage_problems(plan)
        problems += shape_problems(plan)
    if not problems:
        problems += memory_problems(plan)
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
        if table.trees is not None:
            wrong[table.trees.rows] = False  # members count their common targets each
        for row in np.flatnonzero(wrong):
            yield (
                f"sample {table.ids[row]!r} has {table.label_tokens[row]} label_tokens; expected "
                f"0..{table.llm_tokens[row] - 1}, below its llm_tokens"
            )
    if plan.sync not in get_args(Sync):
        yield f"sync is {plan.sync!r}; expected 'step' or 'microbatch'"
    policies = plan.columns.recompute
    if ((policies < 0) | (policies >= len(POLICIES))).any():
        yield f"columns.recompute holds {policies.tolist()}; expected 0..{len(POLICIES) - 1}"
    if plan.chosen not in ("dynamic", "homogeneous"):
        yield f"chosen is {plan.chosen!r}; expected 'dynamic' or 'homogeneous'"


def _queue_problems(plan: StepPlan) -> Iterator[str]:
    columns = plan.columns
    if len(columns.queue_offsets) - 1 != plan.ranks:
        yield f"there are {len(columns.queue_offsets) - 1} queues for {plan.ranks} ranks"
        return
    offsets, expected = queues_in_order(columns.rank_offsets, columns.ranks, plan.ranks)
    runs = columns.queue != DUMMY
    found = columns.queue[runs]
    rank = owners(columns.queue_offsets)
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
    rank = owners(columns.queue_offsets)[runs]
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
    loads = price_layout(
        layout,
        table,
        costs,
        ranks_per_node=plan.ranks_per_node,
        recompute=columns.recompute,
        memory=plan.memory,
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
