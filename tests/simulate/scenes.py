"""Small steps for tests of the simulator."""

from __future__ import annotations

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan, Sync
from dynapar.planner import PlannerConfig, random_plan
from tests.samples import table

COSTS = load_costs(None)


def random_table(seed: int, samples: int, *, longest: int = 16_384) -> SampleTable:
    """Half of the samples with media; lengths log-normal."""
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(7.5, 1.2, samples).astype(int), 16, longest)
    units = [
        tuple(int(u) for u in rng.integers(100, 3000, rng.integers(0, 6))) if flip else ()
        for flip in rng.random(samples) < 0.5
    ]
    return table(sizes.tolist(), units)


def config(sync: Sync, *, capacity: int = 16_384, encoder_capacity: int = 65_536) -> PlannerConfig:
    return PlannerConfig(capacity=capacity, encoder_capacity=encoder_capacity, sync=sync)


def some_plan(seed: int, sync: Sync, *, samples: int = 24, cluster: str = "2x4") -> StepPlan:
    """A random valid plan."""
    return random_plan(
        random_table(seed, samples),
        seed=seed,
        step=0,
        cluster=Cluster.parse(cluster),
        costs=COSTS,
        config=config(sync),
    )
