"""Price plans beside static and padded layouts of the same samples, under one set of costs.

All three go through the same replay, as in `dynapar simulate`. Under other costs than those of the
plans the comparison still holds all alike, but dynapar's plans were not made for those costs; the
difference is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Literal

from dynapar.cluster import Cluster
from dynapar.costs import TICKS_PER_SECOND, Costs
from dynapar.errors import PlanError
from dynapar.plan import StepPlan, validate
from dynapar.planner import PlannerConfig
from dynapar.planner.problem import Problem, make_problem
from dynapar.report.model import Compared, LayoutFigures
from dynapar.simulate.compare import Run, gains, shares
from dynapar.simulate.padded import fixed_degree, padded_schedule
from dynapar.simulate.replay import replay
from dynapar.simulate.schedule import Schedule, from_layout, from_plan
from dynapar.simulate.static import static_layouts

Name = Literal["dynapar", "static", "padded"]


def compare_plans(
    plans: Sequence[StepPlan],
    costs: Costs,
    *,
    longest: int,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Compared, list[str]]:
    """Set plans beside the best static degree and beside padded, length-grouped batches.

    Args:
        plans: One or more, of one setting.
        costs: What work costs.
        longest: Tokens of the longest sample of the whole run; padded batches run at the degree
            that it needs.
        advance: Hears how many of the three layouts are done.

    Returns:
        The comparison, and why a layout is missing from it.

    Raises:
        PlanError: A plan breaks its contract, or a sample cannot be placed.
    """
    for plan in plans:
        validate(plan)
    problems = [problem_of(plan, costs) for plan in plans]
    notes: list[str] = []
    ours = _run("dynapar", [from_plan(plan, costs) for plan in plans])
    runs: list[tuple[Name, Run]] = [("dynapar", ours)]
    advance(1, 3)
    makers: tuple[tuple[Name, Callable[[], list[Schedule]]], ...] = (
        ("static", lambda: _static(problems)),
        ("padded", lambda: _padded(problems, longest)),
    )
    for done, (name, make) in enumerate(makers, start=2):
        try:
            runs.append((name, _run(name, make())))
        except PlanError as error:
            notes.append(f"There is no {name} layout to compare with: {error}.")
        advance(done, 3)
    return (
        Compared(
            steps=tuple(plan.step for plan in plans),
            costs=costs.name,
            measured=costs.measured,
            difference=max(
                abs(priced / plan.makespan - 1) if plan.makespan else 0.0
                for priced, plan in zip(ours.makespans, plans, strict=True)
            ),
            layouts=tuple(_figures(name, run, ours) for name, run in runs),
        ),
        notes,
    )


def problem_of(plan: StepPlan, costs: Costs) -> Problem:
    """The planning problem that a plan solves."""
    node = plan.ranks_per_node
    return make_problem(
        plan.samples,
        step=plan.step,
        cluster=Cluster(nodes=plan.ranks // node, ranks_per_node=node),
        costs=costs,
        config=PlannerConfig(
            capacity=plan.capacity,
            encoder_capacity=plan.encoder_capacity,
            sync=plan.sync,
            equal_counts=plan.equal_counts,
            **asdict(plan.rings),
        ),
    )


def _run(label: str, schedules: list[Schedule]) -> Run:
    return Run(
        label=label,
        steps=tuple(range(len(schedules))),
        schedules=tuple(schedules),
        timelines=tuple(replay(schedule) for schedule in schedules),
        expected=(),
    )


def _static(problems: Sequence[Problem]) -> list[Schedule]:
    found = static_layouts(problems)
    schedules = []
    for problem, best in zip(problems, found.layouts[found.degree], strict=True):
        tokens = int(problem.samples.llm_tokens.sum())
        schedules.append(
            from_layout(
                best.layout,
                best.loads,
                sync=problem.config.sync,
                ranks=problem.limits.ranks,
                costs=problem.costs,
                constants=problem.constants,
                tokens=tokens,
                computed_tokens=tokens,
            )
        )
    return schedules


def _padded(problems: Sequence[Problem], longest: int) -> list[Schedule]:
    first = problems[0]
    degree = fixed_degree(longest, capacity=first.config.capacity, cluster=first.cluster)
    return [padded_schedule(problem, degree=degree) for problem in problems]


def _figures(name: Name, run: Run, ours: Run) -> LayoutFigures:
    found = gains(run, ours)
    tokens = sum(schedule.tokens for schedule in run.schedules)
    computed = sum(schedule.computed_tokens for schedule in run.schedules)
    whole, own = _whole_steps(run), _whole_steps(ours)
    return LayoutFigures(
        name=name,
        degrees=tuple(sorted({d for schedule in run.schedules for d in schedule.degrees})),
        makespans=tuple(ticks / TICKS_PER_SECOND for ticks in run.makespans),
        gain=median(found),
        worst_gain=min(found),
        total_gain=whole / own if own else 1.0,
        padding=1 - tokens / computed if computed else 0.0,
        tokens_per_second=tokens * TICKS_PER_SECOND / whole if whole else 0.0,
        shares={key: value / 100 for key, value in _named(shares(run)).items()},
    )


def _named(found: dict[str, float]) -> dict[str, float]:
    """Without the percent sign that `shares` puts behind each name."""
    return {name.removesuffix(" %"): value for name, value in found.items()}


def _whole_steps(run: Run) -> int:
    """Ticks of all steps, closing passes included."""
    pairs = zip(run.timelines, run.schedules, strict=True)
    return sum(timeline.makespan + schedule.closing for timeline, schedule in pairs)


def mean_makespan(layout: LayoutFigures) -> float:
    """Seconds, over the compared steps."""
    return fmean(layout.makespans)
