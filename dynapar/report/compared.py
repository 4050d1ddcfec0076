"""Price plans beside static and padded layouts of the same samples, under one set of costs.

All three go through the same replay, as in `dynapar simulate`. Where the plans follow from a budget
of bytes, static and padded layouts keep to it as well: by the one recompute policy for all their
microbatches with which they are shortest. Under other costs than those of the
plans the comparison still holds all alike, but dynapar's plans were not made for those costs; the
difference is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Literal

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import TICKS_PER_SECOND, Costs
from dynapar.errors import PlanError
from dynapar.memory.policies import POLICIES, Policy
from dynapar.plan import StepPlan, validate
from dynapar.plan.pricing import policy_costs
from dynapar.planner import PlannerConfig
from dynapar.planner.problem import Problem, make_problem
from dynapar.report.model import Compared, LayoutFigures
from dynapar.simulate.compare import Run, gains, shares
from dynapar.simulate.padded import fixed_degree, padded_schedule
from dynapar.simulate.replay import replay
from dynapar.simulate.schedule import Schedule, from_layout, from_plan
from dynapar.simulate.static import static_layouts

Name = Literal["dynapar", "static", "padded"]
Maker = Callable[[Sequence[Problem]], list[Schedule]]
"""Makes one schedule a step."""


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
    notes: list[str] = []
    ours = _run("dynapar", [from_plan(plan, costs) for plan in plans])
    used = np.unique(np.concatenate([plan.columns.recompute for plan in plans])).tolist()
    policies = {"dynapar": ", ".join(POLICIES[policy] for policy in used) or "none"}
    runs: list[tuple[Name, Run]] = [("dynapar", ours)]
    advance(1, 3)
    makers: tuple[tuple[Name, Maker], ...] = (
        ("static", _static),
        ("padded", lambda problems: _padded(problems, longest)),
    )
    for done, (name, make) in enumerate(makers, start=2):
        try:
            policies[name], run = _shortest(name, make, plans, costs)
            runs.append((name, run))
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
            layouts=tuple(_figures(name, run, ours, policies[name]) for name, run in runs),
        ),
        notes,
    )


def _shortest(
    name: Name, make: Maker, plans: Sequence[StepPlan], costs: Costs
) -> tuple[Policy, Run]:
    """What a maker gives under the recompute policy with which it is shortest, and which that is.

    Raises:
        PlanError: It gives nothing under any.
    """
    found: list[tuple[int, Policy, Run]] = []
    failure: PlanError | None = None
    for policy in _policies(plans):
        try:
            run = _run(name, make([problem_of(plan, costs, policy) for plan in plans]))
        except PlanError as error:
            failure = error
            continue
        found.append((sum(run.makespans), policy, run))
    if not found:
        assert failure is not None
        raise failure
    _, policy, run = min(found, key=lambda each: each[0])
    return policy, run


def _policies(plans: Sequence[StepPlan]) -> list[Policy]:
    """Those that the budget of every plan allows; "none" alone without budgets."""
    if any(plan.memory is None for plan in plans):
        return ["none"]
    allowed = [{limits.policy for limits in plan.memory.policies} for plan in plans if plan.memory]
    return [policy for policy in POLICIES if all(policy in each for each in allowed)]


def problem_of(plan: StepPlan, costs: Costs, policy: Policy = "none") -> Problem:
    """The planning problem that a plan solves, with one recompute policy for all microbatches.

    Args:
        plan: The plan.
        costs: Of microbatches that keep everything.
        policy: One that the plan's budget allows; "none" without a budget.

    Raises:
        PlanError: A sample cannot be placed.
    """
    node, memory = plan.ranks_per_node, plan.memory
    capacity, encoder_capacity = plan.capacity, plan.encoder_capacity
    if memory is not None:
        limits = next(each for each in memory.policies if each.policy == policy)
        capacity, encoder_capacity = limits.capacity, limits.encoder_capacity
    return make_problem(
        plan.samples,
        step=plan.step,
        cluster=Cluster(nodes=plan.ranks // node, ranks_per_node=node),
        costs=policy_costs(costs, policy, memory),
        config=PlannerConfig(
            capacity=capacity,
            encoder_capacity=encoder_capacity,
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


def _figures(name: Name, run: Run, ours: Run, recompute: str) -> LayoutFigures:
    found = gains(run, ours)
    tokens = sum(schedule.tokens for schedule in run.schedules)
    computed = sum(schedule.computed_tokens for schedule in run.schedules)
    whole, own = _whole_steps(run), _whole_steps(ours)
    return LayoutFigures(
        name=name,
        recompute=recompute,
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
