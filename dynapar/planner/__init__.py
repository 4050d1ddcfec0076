"""Decide which ranks run which samples of a step, from lengths, costs and memory alone.

A plan is a pure function of its arguments: integers, stable sorts, ties by index. So every rank
computes the same one, and none has to be sent.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import Costs
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan
from dynapar.planner.ahead import plan_ahead as plan_ahead
from dynapar.planner.build import assemble as assemble
from dynapar.planner.build import to_plan
from dynapar.planner.choose import choose
from dynapar.planner.config import PlannerConfig as PlannerConfig
from dynapar.planner.equal import (
    best_equal_homogeneous,
    equal_at_degree,
    equal_candidates,
    no_way,
)
from dynapar.planner.few import search_few
from dynapar.planner.grouping import group_by_prefix as group_by_prefix
from dynapar.planner.homogeneous import (
    at_degree,
    best_homogeneous,
    fits_all,
    homogeneous_degrees,
)
from dynapar.planner.problem import make_problem, steadied
from dynapar.planner.random import random_plan as random_plan
from dynapar.planner.recompute import plan_within
from dynapar.planner.step import best_step
from dynapar.planner.waves import best_waves, evened_single


def plan_step(
    samples: SampleTable, *, step: int, cluster: Cluster, costs: Costs, config: PlannerConfig
) -> StepPlan:
    """Place a step's samples so that all ranks finish early, within memory.

    Long samples are shared by rings of ranks, short ones packed on single ranks or on rings that
    have time left; several such schedules are built, improved and simulated, the best homogeneous
    one among them, and the shortest is taken, or one that is hardly longer and strays less
    (`planner.choose`). Of fewer than `FEWER_THAN` samples on a small cluster
    (`packing.exact`) all plans are tried, within a count; the plan says whether it is `optimal`.

    Args:
        samples: The whole global batch, one sample or more.
        step: Number of the step.
        cluster: The ranks.
        costs: What work costs.
        config: Capacities, `sync`, `gate`, and the rules of rings.

    Raises:
        EmptyStepError: There are no samples.
        PlanError: A sample cannot be placed (the message names it, the limit and the remedies), or
            no way was found to give all ranks equal counts.
    """
    if config.memory is not None:
        one = partial(homogeneous_plan, degree=None)
        return plan_within(
            plan_step, one, samples, step=step, cluster=cluster, costs=costs, config=config
        )
    began = time.perf_counter()
    problem = make_problem(samples, step=step, cluster=cluster, costs=costs, config=config)
    order = problem.order
    bound = problem.bound()
    if config.equal_counts:
        dynamic, degree, homogeneous = equal_candidates(problem, bound)
        others, single = [], [homogeneous] if homogeneous is not None else []
    else:
        find = best_waves if problem.lockstep else best_step
        dynamic, *others = find(problem, order, bound)
        degree, single = best_homogeneous(problem, bound, rival=dynamic.makespan)
        if problem.lockstep and single:
            dynamic = evened_single(problem, dynamic, single[0], bound)
    known = single[0].makespan if single else 0
    dynamic, least = search_few(problem, dynamic, known, bound)
    choice = choose(problem, [dynamic, *others], single)
    return to_plan(
        problem,
        choice.candidate,
        bound=bound,
        homogeneous=(degree, known),
        chosen="homogeneous" if choice.single else "dynamic",
        seconds=time.perf_counter() - began,
        optimal=choice.candidate.makespan <= least,
    )


def homogeneous_plan(
    samples: SampleTable,
    *,
    degree: int | None,
    step: int,
    cluster: Cluster,
    costs: Costs,
    config: PlannerConfig,
) -> StepPlan:
    """Place a step's samples, all at one degree.

    Args:
        samples: The whole global batch.
        degree: Ranks of every sample; None for the degree that ends first.
        step: Number of the step.
        cluster: The ranks.
        costs: What work costs.
        config: Capacities and `sync`.

    Raises:
        EmptyStepError: There are no samples.
        PlanError: The degree is not one of the cluster's, or some sample does not fit at it.
    """
    if config.memory is not None:
        one = partial(homogeneous_plan, degree=degree)
        return plan_within(
            None, one, samples, step=step, cluster=cluster, costs=costs, config=config
        )
    began = time.perf_counter()
    problem = make_problem(samples, step=step, cluster=cluster, costs=costs, config=config)
    allowed = problem.limits.degrees.tolist()
    if degree is not None and degree not in allowed:
        raise PlanError(
            f"degree is {degree}; cluster {cluster} allows {', '.join(map(str, allowed))}"
        )
    equal = config.equal_counts
    if degree is None:
        if equal:
            degree, found = best_equal_homogeneous(problem)
        else:
            degree, all_found = best_homogeneous(problem, problem.bound())
            found = all_found[0] if all_found else None
    elif not fits_all(problem, degree):
        found = None
    else:
        found = equal_at_degree(problem, degree) if equal else at_degree(problem, degree)
    if found is not None and not equal:
        found = steadied(problem, found)
    fitting = fits_all(problem, degree) if degree else bool(homogeneous_degrees(problem))
    if found is None and equal and fitting:
        raise no_way(problem)
    if found is None:
        what = f"degree {degree}" if degree else "any single degree"
        longest = int(np.argmax(problem.jobs.tokens))
        raise PlanError(
            f"the step does not fit at {what}: its longest sample {samples.ids[longest]!r} has "
            f"{int(problem.jobs.tokens[longest]):,} tokens, capacity is {config.capacity:,}. "
            f"Raise capacity or the degree"
        )
    return to_plan(
        problem,
        found,
        bound=problem.bound(),
        homogeneous=(degree, found.makespan),
        chosen="homogeneous",
        seconds=time.perf_counter() - began,
    )
