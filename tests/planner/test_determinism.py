"""One plan whatever the process, its hash seed and its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def digests() -> list[str]:
    """Of plans of both modes, over workloads with and without media."""
    from dynapar.cluster import Cluster
    from dynapar.costs import load_costs
    from dynapar.plan import Sync, plan_digest
    from dynapar.planner import PlannerConfig, plan_step, random_plan
    from dynapar.workloads import draw

    cluster, costs = Cluster(nodes=2, ranks_per_node=8), load_costs(None)
    syncs: tuple[Sync, Sync] = ("step", "microbatch")
    found = []
    for sync in syncs:
        config = PlannerConfig(capacity=16_384, encoder_capacity=65_536, sync=sync)
        for number, name in enumerate(("video", "longdoc", "burst")):
            samples = draw(name, 90, seed=number, longest=200_000)
            plan = plan_step(samples, step=0, cluster=cluster, costs=costs, config=config)
            other = random_plan(
                samples, seed=number, step=0, cluster=cluster, costs=costs, config=config
            )
            found += [plan_digest(plan), plan_digest(other)]
    return found


@cache
def here() -> list[str]:
    return digests()


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONHASHSEED": "0", "NUMBA_NUM_THREADS": "1"},
        {"PYTHONHASHSEED": "1", "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
        {"PYTHONHASHSEED": "random"},
    ],
    ids=lambda variables: " ".join(variables.values()),
)
def test_plans_are_the_same_in_another_process(variables: dict[str, str]) -> None:
    code = f"from {__name__} import digests; print('\\n'.join(digests()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    assert done.stdout.split() == here()
