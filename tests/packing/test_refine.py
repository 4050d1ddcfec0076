"""Evening out finished waves never lengthens a step, and keeps all its rules."""

from __future__ import annotations

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.packing.construct import construct
from dynapar.packing.refine import refine
from dynapar.packing.ticks import Layout
from dynapar.plan.check import validate
from dynapar.planner import PlannerConfig
from dynapar.planner.build import to_plan
from dynapar.planner.problem import Candidate, Problem, arrange, make_problem, price
from dynapar.workloads import draw

COSTS = load_costs(None)


def start(workload: str, width: int) -> tuple[Problem, Candidate]:
    """A step of 2 nodes in two waves or more, built in one pass without any search."""
    problem = make_problem(
        draw(workload, 256, seed=3, longest=16 * 16_384),
        step=0,
        cluster=Cluster(nodes=2, ranks_per_node=8),
        costs=COSTS,
        config=PlannerConfig(capacity=16_384, encoder_capacity=65_536, sync="microbatch"),
    )
    waves = max(2, -(-int(problem.jobs.tokens.sum()) * 10 // (16 * 16_384 * 9)))
    target = problem.bound() // waves * 11 // 10
    done, strip = construct(
        problem.order, target, width, width, False, False, waves,
        problem.jobs, problem.limits, problem.constants,
    )  # fmt: skip
    placed, layout = arrange(problem, strip, waves=waves)
    assert done
    assert placed
    return problem, price(problem, layout)


def refined(problem: Problem, before: Candidate, *, rounds: int, goal: int = 0) -> Candidate:
    layout = Layout(*(column.copy() for column in before.layout))
    refine(
        layout, rounds, goal, problem.jobs, problem.unit_offsets, problem.unit_tokens,
        problem.limits, problem.constants,
    )  # fmt: skip
    return price(problem, layout)


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("workload", ["video", "docs", "wikipedia", "longdoc"])
def test_every_change_keeps_the_rules_and_lengthens_nothing(workload: str, width: int) -> None:
    problem, before = start(workload, width)
    lasted = before.makespan
    for rounds in (1, 2, 5, 200):
        after = refined(problem, before, rounds=rounds)
        assert after.makespan <= lasted
        lasted = after.makespan
        plan = to_plan(problem, after, bound=0, homogeneous=(0, 0), chosen="dynamic", seconds=0.0)
        validate(plan, COSTS)
    assert before.waves[:, 1].max() > problem.constants.llm_floor
    if workload != "longdoc":  # whose waves last as long as their rings
        assert lasted < before.makespan


def test_it_stops_at_the_goal() -> None:
    problem, before = start("wikipedia", 1)
    best = refined(problem, before, rounds=200).makespan
    goal = (best + before.makespan) // 2
    assert best < refined(problem, before, rounds=200, goal=goal).makespan <= goal
    assert refined(problem, before, rounds=200, goal=before.makespan).makespan == before.makespan


def test_waves_do_not_wait_for_one_rank() -> None:
    problem, before = start("docs", 8)
    after = refined(problem, before, rounds=200)
    for part in (0, 1):
        assert after.waves[:, part].sum() <= before.waves[:, part].sum()
    assert np.array_equal(np.sort(after.layout.order), np.arange(len(problem.samples)))
