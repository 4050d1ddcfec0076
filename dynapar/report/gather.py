"""Add up the figures of a report from a file of plans or the folder of a run.

The plans are gone through once for what every step adds up to; the few steps that are compared or
drawn are then read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

import dynapar
from dynapar.costs import TICKS_PER_SECOND, Costs
from dynapar.plan import StepPlan
from dynapar.report.compared import compare_plans
from dynapar.report.gantt import MOST_BOXES, choose_steps, lay_out
from dynapar.report.measured import MeasuredBuilder
from dynapar.report.mix import MixBuilder
from dynapar.report.model import Compared, PlannedStep, Report, Setting
from dynapar.report.source import Source, choose_costs

MOST_COMPARED_SAMPLES = 60_000
"""Of the steps that are compared: what a minute is enough for."""

Advance = Callable[[str, int, int], None]
"""(what is being done, done, total)."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a report has to say."""

    costs: Path | None = None
    """What work costs; None for the run's own, or for shipped costs that the plans name."""
    show: tuple[int, ...] = ()
    """Steps to draw; empty for a choice."""
    compare: int = 100
    """Steps, evenly spread, to compare with static and padded layouts; 0 for none."""


def gather(
    source: Source, question: Question, advance: Advance = lambda what, done, total: None
) -> Report:
    """Read and add up all that a report says.

    Args:
        source: What it is about.
        question: What it has to say.
        advance: Hears how far the work is.

    Raises:
        SourceError: A line is no plan as dynapar wrote it.
        CostsError: The costs cannot be read.
        ConfigError: A step to show is not there.
        PlanError: A plan breaks its contract.
    """
    first = source.plan(next(iter(source.lines)))
    costs, note = choose_costs(source, question.costs, first.costs)
    settings: dict[Setting, int] = {}
    steps: list[PlannedStep] = []
    mix, clock = MixBuilder(), MeasuredBuilder()
    for done, plan in enumerate(source, start=1):
        mix.add(plan, costs)
        if (clocks := source.clocks.get(plan.step)) is not None:
            clock.add(plan, clocks)
        own = _planned(plan, settings.setdefault(_setting(plan), len(settings)))
        speeds = clocks.speeds if clocks is not None else ()
        steps.append(replace(own, dealt=any(speed != 1 for speed in speeds)))
        advance("reading plans", done, len(source.lines))
    ordered, steps = _most_frequent_first(list(settings), steps)
    notes = [note] if note else []
    if len(ordered) > 1:
        notes.append(_several(ordered, steps))
    measured = clock.result()
    shown = choose_steps(steps, measured.steps if measured else (), question.show)
    compared, missing = _compare(source, question, costs, steps, advance)
    gantts = []
    for done, (step, why) in enumerate(shown, start=1):
        clocks = source.clocks.get(step)
        gantts.append(lay_out(source.plan(step), why, clocks, boxes=MOST_BOXES // len(shown)))
        advance("drawing steps", done, len(shown))
    return Report(
        source=_name(source),
        kind="run" if source.run else "plans",
        version=dynapar.__version__,
        settings=ordered,
        steps=tuple(steps),
        mix=mix.result(),
        compared=compared,
        gantts=tuple(gantts),
        measured=measured,
        notes=(*source.notes, *notes, *missing),
    )


def _name(source: Source) -> str:
    """A run's folder often has a name of little meaning: with the one above."""
    parts = source.path.resolve().parts
    return "/".join(parts[-2:]) if source.run else parts[-1]


def _setting(plan: StepPlan) -> Setting:
    return Setting(
        ranks=plan.ranks,
        ranks_per_node=plan.ranks_per_node,
        sync=plan.sync,
        capacity=plan.capacity,
        encoder_capacity=plan.encoder_capacity,
        budget=plan.memory.budget if plan.memory else 0,
        costs=plan.costs,
    )


def _planned(plan: StepPlan, setting: int) -> PlannedStep:
    table, columns = plan.samples, plan.columns
    degrees = columns.degrees
    counts = np.bincount(degrees)
    tokens = np.bincount(degrees, weights=table.llm_tokens[columns.sample_rows])
    used = np.flatnonzero(counts).tolist()
    return PlannedStep(
        step=plan.step,
        setting=setting,
        samples=len(table),
        tokens=int(table.llm_tokens.sum()),
        encoder_tokens=int(table.encoder_tokens.sum()),
        longest=int(table.llm_tokens.max(initial=0)),
        microbatches=len(columns.ticks),
        tokens_by_degree={degree: int(tokens[degree]) for degree in used},
        samples_by_degree={degree: int(counts[degree]) for degree in used},
        makespan=plan.makespan / TICKS_PER_SECOND,
        lower_bound=plan.lower_bound / TICKS_PER_SECOND,
        gap=plan.gap,
        optimal=plan.optimal,
        homogeneous_degree=plan.homogeneous_degree,
        homogeneous=plan.homogeneous_makespan / TICKS_PER_SECOND,
        chosen=plan.chosen,
        plan_seconds=plan.plan_seconds,
    )


def _most_frequent_first(
    settings: list[Setting], steps: list[PlannedStep]
) -> tuple[tuple[Setting, ...], list[PlannedStep]]:
    counts = Counter(step.setting for step in steps)
    order = sorted(counts, key=lambda number: (-counts[number], number))
    place = {number: at for at, number in enumerate(order)}
    moved = [replace(step, setting=place[step.setting]) for step in steps]
    return tuple(settings[number] for number in order), moved


def _several(settings: Sequence[Setting], steps: Sequence[PlannedStep]) -> str:
    most = sum(step.setting == 0 for step in steps)
    first, second = settings[:2]
    names = ("ranks", "ranks_per_node", "sync", "capacity", "encoder_capacity", "budget", "costs")
    differs = ", ".join(
        f"{name} {getattr(first, name)} and {getattr(second, name)}"
        for name in names
        if getattr(first, name) != getattr(second, name)
    )
    return (
        f"The steps were planned under {len(settings)} settings ({differs}): what is compared are "
        f"{most} of {len(steps)} steps, those of the most frequent one."
    )


def _compare(
    source: Source,
    question: Question,
    costs: Costs,
    steps: Sequence[PlannedStep],
    advance: Advance,
) -> tuple[Compared | None, list[str]]:
    alike = [step for step in steps if step.setting == 0 and step.samples]
    if not question.compare or not alike:
        return None, []
    mean = sum(step.samples for step in alike) / len(alike)
    most = max(1, min(question.compare, int(MOST_COMPARED_SAMPLES / mean)))
    chosen = spread([step for step in alike if not step.dealt] or alike, most)
    return compare_plans(
        [source.plan(step.step) for step in chosen],
        costs,
        longest=max(step.longest for step in alike),
        advance=lambda done, total: advance("comparing layouts", done, total),
    )


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[len(items) // 2]]
    return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]
