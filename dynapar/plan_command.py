"""Plan the steps of a source without running them: what `dynapar plan` does."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import numpy as np

from dynapar.cluster import Cluster
from dynapar.console import Advance, Cell, progress, show_json, show_table
from dynapar.costs import Costs, load_costs
from dynapar.memory import POLICIES, transfer_price
from dynapar.memory_command import BudgetRequest, limits_rows, room_of
from dynapar.plan import StepPlan, Sync, plan_to_json
from dynapar.planner import PlannerConfig
from dynapar.planner.grouping import saved
from dynapar.planning import PlanRequest, plan_steps
from dynapar.rings import RingRules


def write_plan(plan: StepPlan, file: TextIO) -> None:
    """Write a plan as one line of a plans file."""
    json_text.dump(plan_to_json(plan), file, separators=(",", ":"))
    file.write("\n")


def plan_command(
    source: str,
    *,
    cluster: str,
    capacity: int | None = None,
    encoder_capacity: int | None = None,
    budget: BudgetRequest | None = None,
    sync: Sync = "step",
    global_batch: int,
    steps: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    model: str | None = None,
    costs: Path | None = None,
    scheduler: str = "dynamic",
    gate: float = 0.0,
    rings: RingRules | None = None,
    equal_counts: bool = False,
    group_by: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Plan the steps of a source, print one row a step, and write the plans to a file.

    Args:
        source: As `PlanRequest.source`.
        cluster: NODESxRANKS, as "8x8".
        capacity: LLM tokens of a rank in a microbatch; None with a budget.
        encoder_capacity: Encoder tokens of a rank in a microbatch; may be None with a budget.
        budget: Of bytes, from which capacities follow.
        sync: Where ranks meet.
        global_batch: Samples of a step.
        steps: How many steps.
        seed: Of the order of samples.
        shuffle: False for the source's own order.
        model: As `PlanRequest.model`.
        costs: A cost file; None for the shipped reference.
        scheduler: As `PlanRequest.scheduler`.
        gate: As `PlannerConfig.gate`.
        rings: Which rings may form; None for the defaults.
        equal_counts: As `PlannerConfig.equal_counts`.
        group_by: As `PlanRequest.group_by`.
        out: Where the plans go, one a line; None to write none.
        json: Print JSON instead of a table.
    """
    used, ranks, rules = load_costs(costs), Cluster.parse(cluster), rings or RingRules()
    room = room_of(
        budget,
        model,
        cluster=ranks,
        sync=sync,
        rings=rules,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
    )
    request = PlanRequest(
        source=source,
        cluster=ranks,
        config=PlannerConfig(
            capacity=room.capacity,
            encoder_capacity=room.encoder_capacity,
            sync=sync,
            gate=gate,
            equal_counts=equal_counts,
            memory=room.memory,
            **asdict(rules),
        ),
        costs=used,
        global_batch=global_batch,
        steps=steps,
        seed=seed,
        shuffle=shuffle,
        model=model,
        scheduler=scheduler,
        group_by=group_by,
    )
    rows = list(_run(request, out))
    if json:
        report: dict[str, object] = {"costs": used.name, "measured": used.measured, "steps": rows}
        if room.memory is not None:
            report["memory"] = list(limits_rows(room.memory))
        show_json(report)
    else:
        if budget is not None and room.memory is not None:
            show_table(f"{model} in {budget.memory}", list(limits_rows(room.memory)))
            print()
        show_table(f"{source} on {cluster}", [_for_people(row) for row in rows])
        if group_by:
            print(
                "trees: samples of this step that stand for several members; saved: LLM tokens "
                "of prefixes that the members would have repeated."
            )
        print(f"Times by {_origin(used)}.")
        if room.memory is not None and any(own.policy == "offload" for own in room.memory.policies):
            print(f"Of policies, {transfer_price(used)}.")
        if out is not None:
            print(f"Plans written to {out}; check them with: dynapar plan --check {out}")


def _origin(costs: Costs) -> str:
    if costs.measured:
        return f"measured costs {costs.name}"
    return f"reference costs {costs.name} (not measured here: compare plans, not clocks)"


def _run(request: PlanRequest, out: Path | None) -> Iterator[dict[str, Cell]]:
    with progress(f"planning {request.source}") as advance:
        if out is None:
            yield from _rows(request, advance, None)
            return
        with out.open("w", encoding="utf-8") as file:
            yield from _rows(request, advance, file)


def _rows(request: PlanRequest, advance: Advance, file: TextIO | None) -> Iterator[dict[str, Cell]]:
    for plan in plan_steps(request):
        if file is not None:
            write_plan(plan, file)
        advance(plan.step + 1, request.steps)
        row = summary(plan)
        if request.group_by:
            found = saved(plan.samples)
            row |= {"trees": found.trees, "members": found.members, "saved": found.llm_tokens}
        yield row


def summary(plan: StepPlan) -> dict[str, Cell]:
    """One row of a table about a plan."""
    recompute = {} if plan.memory is None else {"recompute": _policies(plan)}
    return {
        "step": plan.step,
        "samples": len(plan.samples),
        "microbatches": len(plan.microbatches),
        "degrees": _ranges(plan.degrees),
        "makespan s": round(plan.makespan / 1e6, 6),
        "gap %": round(100 * plan.gap, 3),
        "optimal": plan.optimal,
        "homogeneous s": round(plan.homogeneous_makespan / 1e6, 6),
        "at degree": plan.homogeneous_degree,
        "chosen": plan.chosen,
        "plan ms": round(1e3 * plan.plan_seconds, 1),
        **recompute,
    }


def _policies(plan: StepPlan) -> str:
    """How many microbatches have which recompute policy: 12 none, 3 full."""
    counts = np.bincount(plan.columns.recompute, minlength=len(POLICIES)).tolist()
    return ", ".join(f"{n} {policy}" for n, policy in zip(counts, POLICIES, strict=True) if n)


def _for_people(row: dict[str, Cell]) -> dict[str, Cell]:
    """A row without what a table shows otherwise: a proven plan's gap says nothing."""
    gap = "optimal" if row["optimal"] else row["gap %"]
    return {
        name: gap if name == "gap %" else cell for name, cell in row.items() if name != "optimal"
    }


def _ranges(degrees: Sequence[int]) -> str:
    """Degrees as text, runs joined: 1-3 8."""
    parts: list[list[int]] = []
    for degree in degrees:
        if parts and degree == parts[-1][-1] + 1:
            parts[-1].append(degree)
        else:
            parts.append([degree])
    return " ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
