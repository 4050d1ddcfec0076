"""The expected makespan of the planner's draws against the simulator's."""

from __future__ import annotations

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.packing.noise import DRAWS, FINER, expected_ticks, stray
from dynapar.plan import Sync
from dynapar.planner import PlannerConfig
from dynapar.planner.problem import Candidate, Problem, make_problem
from dynapar.planner.step import best_step
from dynapar.planner.waves import best_waves
from dynapar.simulate import Noise, expected_makespan
from dynapar.simulate.schedule import from_layout
from dynapar.workloads import draw

COSTS = load_costs("h100_7b")


def layout_of(workload: str, sync: Sync, seed: int) -> tuple[Problem, Candidate]:
    problem = make_problem(
        draw(workload, 64, seed=seed, longest=8 * 16_384),
        step=0,
        cluster=Cluster.parse("2x4"),
        costs=COSTS,
        config=PlannerConfig(capacity=16_384, encoder_capacity=65_536, sync=sync),
    )
    find = best_waves if problem.lockstep else best_step
    return problem, find(problem, problem.order, problem.bound())[0]


def expected(problem: Problem, found: Candidate, rank: float, microbatch: float) -> int:
    return expected_ticks(
        found.layout, found.loads, len(found.waves), problem.limits.ranks,
        stray(rank, microbatch), problem.constants,
    )  # fmt: skip


@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize("workload", ["wikipedia", "video", "docs", "burst"])
@pytest.mark.parametrize(("rank", "microbatch"), [(0.02, 0.05), (0.0, 0.2), (0.1, 0.0)])
def test_expects_what_thousands_of_plain_draws_do(
    workload: str, sync: Sync, rank: float, microbatch: float
) -> None:
    problem, found = layout_of(workload, sync, seed=3)
    schedule = from_layout(
        found.layout,
        found.loads,
        sync=sync,
        ranks=problem.limits.ranks,
        costs=COSTS,
        constants=problem.constants,
        tokens=1,
        computed_tokens=1,
    )
    noise = Noise(rank=rank, microbatch=microbatch, draws=2000, seed=7)
    plain = expected_makespan(schedule, noise, step=0)
    assert plain > found.makespan * 1.005
    assert expected(problem, found, rank, microbatch) == pytest.approx(plain, rel=0.012)


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_without_noise_it_is_the_makespan(sync: Sync) -> None:
    problem, found = layout_of("video", sync, seed=1)
    assert expected(problem, found, 0.0, 0.0) == found.makespan


def test_factors_have_mean_one_and_their_sigma() -> None:
    for values, sigma in zip(stray(0.02, 0.3), (0.02, 0.3), strict=True):
        assert len(values) == DRAWS * FINER
        assert values.mean() == pytest.approx(1.0, abs=1e-6)
        assert np.log(values).std() == pytest.approx(sigma, rel=0.01)
        assert (np.diff(values) >= 0).all()
