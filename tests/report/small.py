"""Small files of plans and folders of runs, written as dynapar writes them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.meta import AUDIO, IMAGE, VIDEO, SampleTable
from dynapar.plan import StepPlan, Sync, plan_digest, plan_to_json
from dynapar.planner import PlannerConfig, plan_step

CLUSTER = Cluster(nodes=2, ranks_per_node=4)


def config(sync: Sync) -> PlannerConfig:
    """What the plans are made with."""
    return PlannerConfig(capacity=4096, encoder_capacity=16384, sync=sync)


def table(seed: int, *, samples: int = 24, ids: Sequence[str] = ()) -> SampleTable:
    """Samples of all kinds; the first has no media and needs several ranks."""
    draw = random.Random(seed)
    kinds = [0] + [draw.choice([0, IMAGE, VIDEO, AUDIO, IMAGE | VIDEO]) for _ in range(samples - 1)]
    units = [[draw.choice([64, 500, 2000])] * draw.randint(1, 3) if kind else [] for kind in kinds]
    lengths = [9000 + seed] + [draw.choice([3, 90, 700, 2500]) for _ in range(samples - 1)]
    return SampleTable(
        ids=tuple(ids) or tuple(f"s{seed}-{row}" for row in range(samples)),
        llm_tokens=np.array(lengths, np.int64),
        text_tokens=np.array(lengths, np.int64),
        label_tokens=np.array([length - 1 for length in lengths], np.int64),
        modalities=np.array(kinds, np.uint8),
        unit_offsets=np.cumsum([0, *map(len, units)], dtype=np.int64),
        unit_tokens=np.array([unit for own in units for unit in own], np.int64),
    )


def plans(steps: int = 4, *, sync: Sync = "step", cluster: Cluster = CLUSTER) -> list[StepPlan]:
    """Plans of different samples."""
    return [
        plan_step(
            table(step),
            step=step,
            cluster=cluster,
            costs=load_costs(None),
            config=config(sync),
        )
        for step in range(steps)
    ]


def write_plans(path: Path, made: Sequence[StepPlan]) -> Path:
    """As `dynapar plan --out`."""
    path.write_text("".join(json.dumps(plan_to_json(plan)) + "\n" for plan in made))
    return path


def row_of(plan: StepPlan, *, slow: Mapping[int, float] | None = None) -> dict[str, Any]:
    """A line of metrics: every microbatch takes twice its prediction, on slow ranks more.

    Ranks of a ring that come early wait for the last one, as they do in a run.
    """
    factors = [(slow or {}).get(rank, 1.0) for rank in range(plan.ranks)]
    free = [0.0] * plan.ranks
    spent: list[list[float]] = [[] for _ in range(plan.ranks)]
    for number, micro in enumerate(plan.microbatches):
        start = max(free[rank] for rank in micro.ranks)
        pace = max(factors[rank] for rank in micro.ranks)
        noise = 1 + 0.02 * random.Random(f"{plan.step}/{number}").uniform(-1, 1)
        end = start + 2e-6 * micro.ticks * pace * noise
        for rank in micro.ranks:
            spent[rank].append(end - free[rank])
            free[rank] = end
    whole = max(free) + 0.05
    return {
        "step": plan.step,
        "loss": 5.0 - plan.step / 10,
        "gradient_norm": 1.0,
        "seconds": whole + 0.02,
        "plan_digest": plan_digest(plan),
        "ranks": [
            {"busy": free[rank], "step": whole, "waited": 0.01, "microbatches": spent[rank]}
            for rank in range(plan.ranks)
        ],
    }


def with_cpu(
    row: dict[str, Any], plan: StepPlan, *, slow: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """The same line of a run that also measured CPU time: three times each rank's own part."""
    for rank, entry in enumerate(row["ranks"]):
        entry["predicted"] = [
            1e-6 * micro.ticks * (1 if rank == micro.ranks[0] else 0.9)
            for micro in plan.of_rank(rank)
        ]
        noise = [1 + 0.01 * (place % 3 - 1) for place in range(len(entry["predicted"]))]
        pace = 3 * (slow or {}).get(rank, 1.0)
        entry["microbatches_busy"] = [
            pace * due * stray for due, stray in zip(entry["predicted"], noise, strict=True)
        ]
    row["paced_makespan"] = 1.5e-6 * plan.makespan
    row["speeds"] = [1 / (slow or {}).get(rank, 1.0) for rank in range(plan.ranks)]
    return row


def write_run(
    folder: Path,
    made: Sequence[StepPlan],
    *,
    slow: Mapping[int, float] | None = None,
    cpu: bool = False,
) -> Path:
    """As `dynapar train` leaves a run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_plans(folder / "plans.jsonl", made)
    rows = [row_of(plan, slow=slow) for plan in made]
    if cpu:
        rows = [with_cpu(row, plan, slow=slow) for row, plan in zip(rows, made, strict=True)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder
