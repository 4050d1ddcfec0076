from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import Costs, coefficients
from dynapar.meta import SampleTable
from dynapar.packing.bounds import whole_units
from dynapar.packing.ticks import latency_ticks, sample_ticks
from dynapar.plan import Sync, validate
from dynapar.planner import PlannerConfig, plan_step, random_plan
from dynapar.planner.problem import make_problem
from dynapar.workloads import WORKLOADS, draw
from tests.packing import oddcosts
from tests.packing.exact import Exact
from tests.packing.test_exact import CAPACITY, ENCODER_CAPACITY, SYNCS, drawn, search

SHAPES = ["1x2", "1x3", "2x2", "1x4"]


@pytest.mark.parametrize("costs", oddcosts.ALL, ids=lambda costs: costs.name)
@pytest.mark.parametrize("sync", SYNCS)
def test_bound_below_optimum_below_plan(sync: Sync, costs: Costs) -> None:
    over = []
    for seed in range(20, 28):
        shape = SHAPES[seed % 4]
        samples, cluster = drawn(seed, shape), Cluster.parse(shape)
        config = PlannerConfig(capacity=CAPACITY, encoder_capacity=ENCODER_CAPACITY, sync=sync)
        plan = plan_step(samples, step=0, cluster=cluster, costs=costs, config=config)
        validate(plan, costs)
        oracle = Exact(samples, cluster, costs, CAPACITY, ENCODER_CAPACITY)
        optimum = oracle.step() if sync == "step" else oracle.waves()
        other = random_plan(samples, seed=seed, step=0, cluster=cluster, costs=costs, config=config)
        assert plan.lower_bound <= optimum <= plan.makespan, seed
        assert optimum <= other.makespan, seed
        assert not plan.optimal or plan.makespan == optimum, seed
        over.append(plan.makespan / optimum)
    assert np.mean(over) < 1.001, over


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("sync", SYNCS)
def test_bound_below_optimum_at_more_samples(sync: Sync, name: str) -> None:
    """Up to eight samples on four ranks: the search, which the oracle vouches for, is the judge."""
    proven = 0
    for n, shape in ((3, "1x4"), (5, "1x2"), (4, "2x2"), (8, "1x4")):
        samples = draw(name, n, seed=n, longest=16_384)
        cluster = Cluster.parse(shape)
        config = PlannerConfig(capacity=16_384, encoder_capacity=65_536, sync=sync)
        step = make_problem(
            samples, step=0, cluster=cluster, costs=oddcosts.REFERENCE, config=config
        )
        plan = plan_step(samples, step=0, cluster=cluster, costs=oddcosts.REFERENCE, config=config)
        answer = search(step, plan.makespan + 1)
        assert plan.lower_bound <= answer.makespan <= plan.makespan + 1
        if plan.optimal:
            assert answer.makespan >= plan.makespan
            proven += 1
    assert proven


@given(
    st.lists(st.one_of(st.sampled_from([7, 10, 13]), st.integers(1, 30)), max_size=9),
    st.integers(1, 4),
)
def test_whole_units_are_below_the_best_deal(sizes: list[int], ranks: int) -> None:
    loads = {(0,) * ranks}
    for size in sizes:
        loads = {
            tuple(sorted((*load[:r], load[r] + size, *load[r + 1 :])))
            for load in loads
            for r in range(ranks)
        }
    best = min(max(load) for load in loads)
    mean = -(-sum(sizes) // ranks)
    assert mean <= whole_units(np.array(sizes, np.int64), ranks) <= best


def test_equal_units_are_dealt_whole() -> None:
    """29 of them on 8 ranks: some rank encodes 4."""
    assert whole_units(np.full(29, 10, np.int64), 8) == 40
    assert whole_units(np.array([10] * 5 + [7] * 5, np.int64), 4) == 24
    assert whole_units(np.array([9, 8, 7, 6, 5], np.int64), 4) == 11


@pytest.mark.parametrize("longest", [65_536, 49_152])
def test_a_long_wave_cannot_be_filled_beyond_memory(longest: int) -> None:
    """Two ranks share a long sample for long; memory keeps the other two from all other samples.

    The two have no time for others, whether or not they have room.
    """
    capacity, cluster = 32_768, Cluster.parse("1x4")
    lengths = np.array([longest, *[capacity // 4] * 24], np.int64)
    samples = SampleTable(
        ids=tuple(f"s{i}" for i in range(len(lengths))),
        llm_tokens=lengths,
        text_tokens=lengths,
        label_tokens=lengths - 1,
        modalities=np.zeros(len(lengths), np.uint8),
        unit_offsets=np.zeros(len(lengths) + 1, np.int64),
        unit_tokens=np.zeros(0, np.int64),
    )
    config = PlannerConfig(
        capacity=capacity, encoder_capacity=capacity, sync="microbatch", max_degree=2
    )
    costs = oddcosts.REFERENCE
    plan = plan_step(samples, step=0, cluster=cluster, costs=costs, config=config)
    ticks = coefficients(costs, ranks_per_node=4)
    base = ticks.fixed + ticks.linear_rank
    long = sum(sample_ticks(longest, 2, ticks)) + latency_ticks(2, ticks) + base
    short = sum(sample_ticks(capacity // 4, 1, ticks))
    # The long wave has room for 8 of the 24; four ranks share the other 16 in one wave or more.
    wanted = long + 16 * short // 4 + base
    assert wanted - 100 <= plan.lower_bound <= wanted + 100
    assert plan.makespan <= 1.01 * wanted
    assert (2 * long + 24 * short) // 4 + 2 * base < 0.93 * wanted
