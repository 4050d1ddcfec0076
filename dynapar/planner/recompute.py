"""Choose each microbatch's recompute policy together with the layout, inside a budget of bytes.

A policy that keeps less makes a microbatch longer and lets a rank hold more tokens, so that long
samples need fewer ranks. Which of the two ends a step sooner depends on the step. So the step is
planned with the capacities of every policy that the budget allows, once under that policy's costs
and once under those of keeping everything, as if all microbatches had them; then each microbatch
takes the cheapest policy under which its ranks' bytes fit, those that recompute only because they
hold too much at once are split where that saves time (`recompute_split`), and the step is timed
anew. The shortest plan is taken.

That no layout is lost by the last part: in a fixed global order a microbatch that becomes shorter
delays no other (starts are maxima of sums), so a relaxed plan is never longer than the plan that it
was made of, and the best one never longer than the best plan of a single policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import Costs, coefficients
from dynapar.errors import PlanError
from dynapar.memory.budget import shown
from dynapar.memory.limits import MemoryLimits, PolicyLimits
from dynapar.memory.policies import POLICIES
from dynapar.meta import IntArray, SampleTable
from dynapar.packing.ticks import Layout, Loads, queue_starts, wave_parts
from dynapar.plan import StepPlan
from dynapar.plan.columns import PlanColumns, offsets_of, owners, positions, queues_in_order
from dynapar.plan.pricing import policy_costs, price_layout
from dynapar.planner.config import PlannerConfig
from dynapar.planner.problem import make_problem
from dynapar.planner.recompute_bound import work_bound
from dynapar.planner.recompute_split import split


class PlanUnder(Protocol):
    """Plans a step under one policy."""

    def __call__(
        self,
        samples: SampleTable,
        *,
        step: int,
        cluster: Cluster,
        costs: Costs,
        config: PlannerConfig,
    ) -> StepPlan:
        """The plan of `samples`, the whole global batch; as `plan_step`."""


def plan_within(
    dynamic: PlanUnder | None,
    homogeneous: PlanUnder | None,
    samples: SampleTable,
    *,
    step: int,
    cluster: Cluster,
    costs: Costs,
    config: PlannerConfig,
) -> StepPlan:
    """The shortest plan over all policies of a budget, each microbatch under its cheapest one.

    The bound is the larger of two. One is that of the relaxed problem in which every microbatch
    costs what it costs under "none" and holds what the widest policy holds: every plan within the
    budget is one of that problem's, at no less time, since no cost falls from a policy to the next
    (`costs_under`) and no capacity is above the widest. The other is `work_bound`.

    Args:
        dynamic: Plans a step; None to choose among `homogeneous` alone.
        homogeneous: Plans it at a single degree; None where that is not asked for.
        samples: The whole global batch.
        step: Number of the step.
        cluster: The ranks.
        costs: Of microbatches that keep everything.
        config: With a budget, whose capacities replace the configuration's own.

    Raises:
        EmptyStepError: There are no samples.
        PlanError: A sample fits under no policy; the message names it, the limit and the budget.
    """
    began = time.perf_counter()
    memory = config.memory
    assert memory is not None
    if costs.host is not None:
        memory = replace(memory, host_bytes_per_s=costs.host.bytes_per_s)
    if not len(samples.unit_tokens):
        memory = memory.without_media()
    widest = replace(
        config, memory=None, capacity=memory.capacity, encoder_capacity=memory.encoder_capacity
    )
    try:
        problem = make_problem(samples, step=step, cluster=cluster, costs=costs, config=widest)
    except PlanError as error:
        raise _explained(error, memory) from error
    bound = max(problem.bound(), work_bound(problem, memory))
    found = _Best(memory, costs, bound)
    for planner, single in ((dynamic, False), (homogeneous, True)):
        if planner is not None:
            for plan in found.under_each(planner, samples, step, cluster, widest):
                found.offer(plan, single=single)
    return replace(found.chosen(config.gate), plan_seconds=time.perf_counter() - began)


class _Best:
    """The shortest dynamic and the shortest homogeneous plan so far."""

    def __init__(self, memory: MemoryLimits, costs: Costs, bound: int) -> None:
        self.memory, self.costs, self.bound = memory, costs, bound
        self.dynamic: StepPlan | None = None
        self.homogeneous: StepPlan | None = None
        self.failure: PlanError | None = None

    def under_each(
        self,
        planner: PlanUnder,
        samples: SampleTable,
        step: int,
        cluster: Cluster,
        config: PlannerConfig,
    ) -> Iterator[StepPlan]:
        """Relaxed plans: with the capacities of each policy, by its costs and by the lowest."""
        for limits, priced in self._pairs():
            own = replace(
                config,
                capacity=limits.capacity,
                encoder_capacity=limits.encoder_capacity,
                gate=0.0,
                noise=0.0,
            )
            try:
                plan = planner(samples, step=step, cluster=cluster, costs=priced, config=own)
            except PlanError as error:
                self.failure = error
                continue
            yield relaxed(plan, memory=self.memory, costs=self.costs, bound=self.bound)

    def _pairs(self) -> Iterator[tuple[PolicyLimits, Costs]]:
        first = self.memory.policies[0]
        lowest = policy_costs(self.costs, first.policy, self.memory)
        for limits in self.memory.policies:
            yield limits, policy_costs(self.costs, limits.policy, self.memory)
            if limits is not first:
                yield limits, lowest

    def offer(self, plan: StepPlan, *, single: bool) -> None:
        """Keep a plan that is shorter; equal ones stay with the policy that keeps more."""
        best = self.homogeneous if single else self.dynamic
        if best is None or plan.makespan < best.makespan:
            if single:
                self.homogeneous = plan
            else:
                self.dynamic = plan

    def chosen(self, gate: float) -> StepPlan:
        """The shorter one, or within the gate the homogeneous one."""
        dynamic, homogeneous = self.dynamic, self.homogeneous
        if dynamic is None and homogeneous is None:
            assert self.failure is not None
            raise _explained(self.failure, self.memory) from self.failure
        degree, ticks = 0, 0
        if homogeneous is not None:
            degree, ticks = homogeneous.homogeneous_degree, homogeneous.makespan
        single = dynamic is None or (
            homogeneous is not None
            and (
                homogeneous.makespan <= dynamic.makespan
                or dynamic.makespan >= homogeneous.makespan * (1.0 - gate) > 0
            )
        )
        best = homogeneous if single else dynamic
        assert best is not None
        return replace(
            best,
            homogeneous_degree=degree,
            homogeneous_makespan=ticks,
            chosen="homogeneous" if single else "dynamic",
        )


def relaxed(plan: StepPlan, *, memory: MemoryLimits, costs: Costs, bound: int) -> StepPlan:
    """A plan whose microbatches each have the cheapest policy that holds them, timed anew.

    Args:
        plan: Made with the capacities of one of the budget's policies.
        memory: The budget.
        costs: Of microbatches that keep everything.
        bound: Of the makespan of all plans within the budget, in ticks.
    """
    columns, node = plan.columns, plan.ranks_per_node
    policies = cheapest(columns.rank_offsets, columns.tokens, columns.encoder_tokens, memory)
    layout = plan.layout()
    loads = _priced(layout, plan, costs, policies, memory)
    constants = coefficients(costs, ranks_per_node=node)
    waves = columns.waves
    if plan.sync == "microbatch":
        parts = wave_parts(layout, loads, len(waves), constants)
        ends = offsets_of(parts.sum(axis=1))
        waves = np.column_stack((ends[:-1], parts))
        starts, makespan = ends[:-1][layout.wave], int(ends[-1])
    else:
        if not plan.equal_counts:
            split_up, policies = split(
                layout, policies, loads, samples=plan.samples, memory=memory, costs=costs,
                ranks_per_node=node,
            )  # fmt: skip
            if split_up is not layout:
                layout, columns = split_up, _regrouped(columns, split_up, plan)
                loads = _priced(layout, plan, costs, policies, memory)
                columns = replace(columns, tokens=loads.tokens, encoder_tokens=loads.encoder_tokens)
        starts, makespan = queue_starts(layout, loads.ticks, plan.ranks)
    return replace(
        plan,
        columns=replace(
            columns,
            ticks=loads.ticks,
            starts=starts,
            parts=_slowest(loads, constants.fixed),
            recompute=policies,
            waves=waves,
        ),
        capacity=memory.capacity,
        encoder_capacity=memory.encoder_capacity,
        memory=memory,
        makespan=int(makespan),
        lower_bound=bound,
        homogeneous_makespan=max(int(makespan), plan.homogeneous_makespan),
        optimal=int(makespan) <= bound,
    )


def _priced(
    layout: Layout, plan: StepPlan, costs: Costs, policies: IntArray, memory: MemoryLimits
) -> Loads:
    return price_layout(
        layout,
        plan.samples,
        costs,
        ranks_per_node=plan.ranks_per_node,
        recompute=policies,
        memory=memory,
    )


def _regrouped(columns: PlanColumns, layout: Layout, plan: StepPlan) -> PlanColumns:
    """Columns of the same samples on the same ranks, in the microbatches of a split layout."""
    rank_offsets = offsets_of(layout.width)
    ranks = np.repeat(layout.first, layout.width) + positions(rank_offsets)
    share_offsets = offsets_of(layout.sample_degree[layout.order])
    share_first = np.repeat(layout.sample_first[layout.order], np.diff(share_offsets))
    units = plan.samples.unit_offsets
    unit_offsets = offsets_of(np.diff(units)[layout.order])
    unit_first = np.repeat(units[layout.order], np.diff(unit_offsets))
    queue_offsets, queue = queues_in_order(rank_offsets, ranks, plan.ranks)
    return replace(
        columns,
        rank_offsets=rank_offsets,
        ranks=ranks,
        sample_offsets=layout.offsets,
        sample_rows=layout.order,
        share_offsets=share_offsets,
        share_ranks=share_first + positions(share_offsets),
        unit_offsets=unit_offsets,
        unit_ranks=layout.unit_rank[unit_first + positions(unit_offsets)],
        queue_offsets=queue_offsets,
        queue=queue,
    )


def cheapest(
    rank_offsets: IntArray, tokens: IntArray, encoder_tokens: IntArray, memory: MemoryLimits
) -> IntArray:
    """(B,) the first policy of `POLICIES` whose bytes fit on all ranks of each microbatch.

    Args:
        rank_offsets: (B + 1,) where the ranks of each microbatch begin.
        tokens: (S,) LLM tokens of each rank.
        encoder_tokens: (S,) encoder tokens of each rank.
        memory: The budget.

    Raises:
        PlanError: Some microbatch fits under none of the budget's policies.
    """
    count, owner = len(rank_offsets) - 1, owners(rank_offsets)
    found = np.full(count, len(POLICIES), np.int64)
    for limits in reversed(memory.policies):
        over = limits.peak(tokens, encoder_tokens) > memory.budget
        full = np.bincount(owner[over], minlength=count) > 0
        found[~full] = POLICIES.index(limits.policy)
    for number in np.flatnonzero(found == len(POLICIES)).tolist():
        rows = slice(rank_offsets[number], rank_offsets[number + 1])
        raise PlanError(
            f"microbatch {number} has up to {int(tokens[rows].max()):,} tokens and "
            f"{int(encoder_tokens[rows].max()):,} encoder tokens on a rank, which fit under no "
            f"recompute policy into {memory.budget:,} bytes: plan again with this budget"
        )
    return found


def _slowest(loads: Loads, fixed: int) -> IntArray:
    """(B, 5) the parts of each microbatch's slowest rank."""
    parts = loads.parts[loads.starts + loads.slowest]
    return np.column_stack((parts, np.full(len(parts), fixed, np.int64)))


def _explained(error: PlanError, memory: MemoryLimits) -> PlanError:
    last = memory.policies[-1]
    return type(error)(
        f"{error} (capacities follow from a budget of {shown(memory.budget)} a rank: at most "
        f"{last.capacity:,} tokens and {last.encoder_capacity:,} encoder tokens under recompute "
        f"{last.policy!r})"
    )
