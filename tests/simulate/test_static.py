from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import coefficients
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.packing.differencing import largest_differencing
from dynapar.packing.ticks import latency_ticks, sample_columns
from dynapar.plan import Sync, validate
from dynapar.planner import PlannerConfig
from dynapar.planner.build import to_plan
from dynapar.planner.homogeneous import at_degree, homogeneous_degrees
from dynapar.planner.problem import Problem, make_problem
from dynapar.simulate.static import static_layout, static_layouts
from tests.samples import table
from tests.simulate.scenes import COSTS, config, random_table


def problem_of(samples: SampleTable, cluster: str, planner: PlannerConfig) -> Problem:
    return make_problem(
        samples, step=0, cluster=Cluster.parse(cluster), costs=COSTS, config=planner
    )


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000), st.sampled_from(["step", "microbatch"]), st.sampled_from(["1x4", "2x4"])
)
def test_every_static_layout_is_a_valid_plan_of_one_degree(
    seed: int, sync: Sync, cluster: str
) -> None:
    samples = random_table(seed, seed % 40 + 1)
    problem = problem_of(samples, cluster, config(sync, encoder_capacity=16_384))
    found = static_layouts([problem], every=True)
    assert found.degree in found.layouts
    for degree, (layout,) in found.layouts.items():
        plan = to_plan(problem, layout, bound=0, homogeneous=(0, 0), chosen="dynamic", seconds=0.0)
        validate(plan, COSTS)
        assert plan.degrees == (degree,)
        known = at_degree(problem, degree)
        assert known is None or layout.makespan <= known.makespan
        assert layout.makespan >= found.layouts[found.degree][0].makespan


@pytest.mark.parametrize("seed", range(6))
def test_few_samples_are_balanced_as_well_as_can_be(seed: int) -> None:
    """Every deal of 7 text samples to 3 ranks; they fit one microbatch each."""
    rng = np.random.default_rng(seed)
    samples = table(rng.integers(100, 2300, 7).tolist())
    problem = problem_of(samples, "1x3", config("step"))
    constants = coefficients(COSTS, ranks_per_node=3)
    ticks = sample_columns(samples.llm_tokens, 1, constants).sum(axis=1)
    once = constants.fixed + constants.linear_rank
    best = min(
        max(int(ticks[np.array(deal) == rank].sum()) for rank in range(3)) + once
        for deal in itertools.product(range(3), repeat=7)
    )
    found = static_layout(problem, 1)
    assert found is not None
    assert best <= found.makespan <= best * 1.01


@pytest.mark.parametrize("seed", range(12))
def test_a_wave_is_balanced_at_least_by_largest_differencing(seed: int) -> None:
    """Two rings of 4 that share 24 samples; one wave holds them all."""
    sizes = np.random.default_rng(seed).lognormal(7.8, 0.8, 24).astype(int)
    samples = table(np.clip(sizes, 64, 9_000).tolist())
    problem = problem_of(samples, "2x4", config("microbatch"))
    ticks = sample_columns(samples.llm_tokens, 4, problem.constants).sum(axis=1)
    deal = largest_differencing(ticks, 2)
    fullest = max(int(ticks[deal == ring].sum()) for ring in range(2))
    found = static_layout(problem, 4)
    assert found is not None
    once = problem.constants.fixed + problem.constants.linear_rank
    expected = fullest + once + latency_ticks(4, problem.constants)
    assert found.makespan <= max(expected, problem.constants.llm_floor)


def test_the_degree_holds_for_the_whole_run() -> None:
    """Step 1 alone would run at degree 1; the long sample of step 0 forbids it."""
    short, long = table([500] * 16), table([20_000, *[500] * 15])
    planner = config("step")
    alone = static_layouts([problem_of(short, "1x4", planner)])
    assert alone.degree == 1
    both = static_layouts([problem_of(long, "1x4", planner), problem_of(short, "1x4", planner)])
    assert both.degree >= 2
    assert min(homogeneous_degrees(problem_of(long, "1x4", planner))) == 2
    assert [len(steps) for steps in both.layouts.values()] == [2] * len(both.layouts)


def test_the_degree_with_the_least_total_wins() -> None:
    problems = [
        problem_of(random_table(s, 12, longest=9_000), "2x4", config("step")) for s in (1, 2)
    ]
    found = static_layouts(problems, every=True)
    totals = {d: sum(c.makespan for c in steps) for d, steps in found.layouts.items()}
    assert set(totals) == {1, 2, 4, 8}
    assert totals[found.degree] == min(totals.values())
    quick = static_layouts(problems)
    assert (quick.degree, quick.layouts[quick.degree]) == (
        found.degree,
        quick.layouts[found.degree],
    )


def test_latency_is_that_of_the_degree() -> None:
    problem = problem_of(table([4000, 4000]), "1x2", config("step"))
    found = static_layout(problem, 2)
    assert found is not None
    linear, attention, exchange = sample_columns(np.array([4000]), 2, problem.constants)[0]
    whole = 2 * (linear + attention + exchange) + latency_ticks(2, problem.constants)
    assert found.makespan == whole + problem.constants.fixed + problem.constants.linear_rank


def test_no_degree_is_said_so() -> None:
    long = problem_of(table([40_000]), "1x5", config("step"))
    assert homogeneous_degrees(long) == (5,)
    with pytest.raises(PlanError, match="no single degree holds every sample of these steps"):
        static_layouts([long, _narrow()])


def _narrow() -> Problem:
    """A step that fits at degree 1 alone, since nothing else is allowed."""
    planner = PlannerConfig(capacity=16_384, encoder_capacity=65_536, max_degree=1)
    return problem_of(table([500]), "1x5", planner)
