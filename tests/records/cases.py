"""The plans that are kept on file: small steps that use every feature of the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.plan import Sync, plan_to_json
from dynapar.planner import PlannerConfig, plan_step, random_plan
from dynapar.workloads import draw

FOLDER = Path(__file__).parent


class Case(NamedTuple):
    """One step to plan."""

    workload: str
    samples: int
    cluster: str
    sync: Sync
    scheduler: str = "dynamic"
    capacity: int = 16_384


CASES = {
    "video_step": Case("video", 24, "1x4", "step"),
    "video_microbatch": Case("video", 24, "1x4", "microbatch"),
    "wikipedia_step": Case("wikipedia", 40, "2x4", "step"),
    "longdoc_microbatch": Case("longdoc", 40, "2x4", "microbatch"),
    "burst_step": Case("burst", 70, "3x4", "step"),
    "random_step": Case("video", 24, "1x4", "step", "random"),
    "random_microbatch": Case("docs", 16, "2x3", "microbatch", "random"),
}


def record(name: str) -> str:
    """The plan of a case, as it stands on file."""
    case = CASES[name]
    cluster = Cluster.parse(case.cluster)
    samples = draw(case.workload, case.samples, seed=1, longest=cluster.ranks * case.capacity)
    config = PlannerConfig(capacity=case.capacity, encoder_capacity=65_536, sync=case.sync)
    costs = load_costs(None)
    if case.scheduler == "random":
        plan = random_plan(samples, seed=1, step=0, cluster=cluster, costs=costs, config=config)
    else:
        plan = plan_step(samples, step=0, cluster=cluster, costs=costs, config=config)
    values = plan_to_json(plan)
    values["plan_seconds"] = 0.0
    rows = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return "{" + rows + "}\n"
