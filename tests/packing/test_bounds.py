from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import Costs, load_costs
from dynapar.plan import Sync, validate
from dynapar.planner import PlannerConfig, plan_step, random_plan
from tests.packing.exact import Exact
from tests.samples import table

REFERENCE = load_costs(None)
FREE = dataclasses.replace(
    REFERENCE, name="free", sharded=dataclasses.replace(REFERENCE.sharded, llm_bytes=0.0)
)
"""Without the traffic floor, which would hide all else of so small a step."""
HARD = dataclasses.replace(
    FREE,
    name="hard",
    fixed=dataclasses.replace(FREE.fixed, microbatch=0.08),
    exchange=dataclasses.replace(
        FREE.exchange, latency=3e-5, bytes_per_s_in_node=1e11, bytes_per_s_across=1.2e10
    ),
)
ATTENTION = dataclasses.replace(
    FREE,
    name="attention",
    linear=dataclasses.replace(FREE.linear, flops=1e18),
    attention=dataclasses.replace(FREE.attention, half_rate_tokens=0.0),
)
"""Rounding is not covered by growth here."""


@pytest.mark.parametrize("costs", [REFERENCE, FREE, HARD, ATTENTION], ids=lambda costs: costs.name)
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_bound_below_optimum_below_plan(sync: Sync, costs: Costs) -> None:
    over = []
    for seed in range(9):
        rng = np.random.default_rng(seed)
        cluster = [
            Cluster(nodes=1, ranks_per_node=2),
            Cluster(nodes=1, ranks_per_node=3),
            Cluster(nodes=2, ranks_per_node=2),
        ][seed % 3]
        n = int(rng.integers(1, 4 if cluster.ranks == 4 else 5))
        capacity, encoder = 4000, 3000
        lengths = np.minimum(rng.lognormal(7.3, 1.0, n).astype(int) + 1, cluster.ranks * capacity)
        units = [
            rng.integers(200, 1500, int(rng.integers(0, 3))).tolist() if i < 2 else []
            for i in range(n)
        ]
        samples = table(lengths.tolist(), units)
        config = PlannerConfig(capacity=capacity, encoder_capacity=encoder, sync=sync)
        plan = plan_step(samples, step=0, cluster=cluster, costs=costs, config=config)
        validate(plan, costs)
        exact = Exact(samples, cluster, costs, capacity, encoder)
        optimum = exact.step() if sync == "step" else exact.waves()
        other = random_plan(samples, seed=seed, step=0, cluster=cluster, costs=costs, config=config)
        assert plan.lower_bound <= optimum <= plan.makespan, seed
        assert optimum <= other.makespan, seed
        over.append(plan.makespan / optimum)
    assert np.mean(over) < 1.1, over
