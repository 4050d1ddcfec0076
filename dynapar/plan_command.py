"""Plan the steps of a source without running them, and check files of plans.

What `dynapar plan` does, free of the command line's library: a source becomes a table of samples,
the sampler says which of them each step takes, the planner places them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.console import Advance, Cell, progress, show_json, show_table
from dynapar.costs import Costs, load_costs
from dynapar.data.grouped import make_sampler, no_prefixes
from dynapar.errors import CheckFailedError, ConfigError, PlanError, SourceError
from dynapar.memory import POLICIES, transfer_price
from dynapar.memory_command import BudgetRequest, limits_rows, room_of
from dynapar.meta import SampleTable, read_metadata_jsonl
from dynapar.plan import PlanFormError, StepPlan, Sync, plan_from_json, plan_to_json, validate
from dynapar.plan.schema import Json
from dynapar.planner import (
    PlannerConfig,
    group_by_prefix,
    homogeneous_plan,
    plan_step,
    random_plan,
)
from dynapar.planner.grouping import saved
from dynapar.rings import RingRules
from dynapar.workloads import WORKLOADS, draw

SCHEDULERS = ("dynamic", "homogeneous", "random")
"""Who may plan; "homogeneous:4" fixes the degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan."""

    source: str
    """A workload's name, an index (.parquet) or a metadata file (.jsonl)."""
    cluster: Cluster
    config: PlannerConfig
    costs: Costs
    global_batch: int
    """Samples of a step."""
    steps: int
    """Steps, 1 or more."""
    seed: int = 0
    """Of the order of samples."""
    shuffle: bool = True
    """False for the source's own order."""
    model: str | None = None
    """Turns the sizes of media in a metadata file into tokens."""
    scheduler: str = "dynamic"
    """One of `SCHEDULERS`, or "homogeneous:DEGREE"."""
    group_by: str | None = None
    """"prefix": samples of one prefix go into one step, as one tree. None: all stay apart."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "steps"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; expected 1 or more")
        if self.group_by not in (None, "prefix"):
            raise ConfigError(f"group_by is {self.group_by!r}; expected 'prefix', or none")
        kind, _, degree = self.scheduler.partition(":")
        if kind not in SCHEDULERS or (degree and not degree.isdecimal()):
            raise ConfigError(
                f"scheduler is {self.scheduler!r}; expected {', '.join(SCHEDULERS)} or "
                f"homogeneous:DEGREE"
            )


def read_source(source: str, *, model: str | None = None) -> SampleTable:
    """The samples of an index or of a metadata file.

    Args:
        source: Path of a .parquet or .jsonl file.
        model: Turns the sizes of media in a metadata file into tokens.

    Raises:
        SourceError: It is of another kind, missing, or empty.
        SampleError: A line of a metadata file is malformed.
    """
    path = Path(source)
    if path.suffix == ".parquet":
        # Here, since only an index needs pyarrow.
        from dynapar.data.indexfile import read_index

        return read_index(path).table
    if path.suffix == ".jsonl":
        return read_metadata_jsonl(path, load_model_shape(model) if model else None)
    raise SourceError(
        f"source {source!r} cannot be planned; expected an index (.parquet), a metadata file "
        f"(.jsonl), or a workload ({', '.join(WORKLOADS)}). Index conversations and shards first: "
        f"dynapar index"
    )


def batches(request: PlanRequest) -> Iterator[SampleTable]:
    """The samples of each step, in order; where they are grouped, with trees.

    Raises:
        ConfigError: They are to be grouped, and the source says nothing of prefixes.
        PlanError: They are to be grouped, and a sample of a prefix fits on no number of ranks.
    """
    if request.source in WORKLOADS:
        if request.group_by:
            raise no_prefixes(f"workload {request.source!r}")
        longest = request.cluster.ranks * request.config.capacity
        for step in range(request.steps):
            seed = request.seed + step
            yield draw(request.source, request.global_batch, seed=seed, longest=longest)
        return
    table = read_source(request.source, model=request.model)
    sampler = make_sampler(
        table,
        group_by=request.group_by,
        global_batch=request.global_batch,
        seed=request.seed,
        shuffle=request.shuffle,
    )
    for step in range(request.steps):
        samples = table.draw(sampler.rows(step))
        if request.group_by:
            samples = group_by_prefix(samples, cluster=request.cluster, config=request.config)
        yield samples


def plan_steps(request: PlanRequest) -> Iterator[StepPlan]:
    """Plan the steps of a source, one after another.

    Raises:
        PlanError: A sample of a step cannot be placed.
    """
    kind, _, degree = request.scheduler.partition(":")
    for step, samples in enumerate(batches(request)):
        cluster, costs, config = request.cluster, request.costs, request.config
        if kind == "homogeneous":
            yield homogeneous_plan(
                samples,
                degree=int(degree) if degree else None,
                step=step,
                cluster=cluster,
                costs=costs,
                config=config,
            )
        elif kind == "random":
            yield random_plan(
                samples, seed=request.seed, step=step, cluster=cluster, costs=costs, config=config
            )
        else:
            yield plan_step(samples, step=step, cluster=cluster, costs=costs, config=config)


def write_plan(plan: StepPlan, file: TextIO) -> None:
    """Write a plan as one line of a plans file."""
    json.dump(plan_to_json(plan), file, separators=(",", ":"))
    file.write("\n")


def _lines(path: str | Path) -> Iterator[tuple[int, dict[str, Json]]]:
    """The objects of a file of JSON lines, each with the number of its line.

    Raises:
        SourceError: The file is missing or no text, or a line is no object; the line is named.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; give a file of plans") from None
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 ({error}); give a file of plans") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{path}, line {number} is not JSON ({error}); expected one plan a line, as "
                f"`dynapar plan --out` writes"
            ) from None
        if not isinstance(values, dict):
            raise SourceError(
                f"{path}, line {number} is not a JSON object; expected one plan a line, as "
                f"`dynapar plan --out` writes"
            )
        yield number, values


def check_plans(path: str | Path, costs: Costs | None = None) -> int:
    """Validate a file of plans.

    Args:
        path: The file.
        costs: What the plans were made with; then each microbatch is priced anew. Without them
            the shipped costs are used for the plans that name them, and the others' times must
            only agree among themselves.

    Returns:
        How many plans it holds.

    Raises:
        SourceError: The file is missing or has no plans, or a line is no plan; the line and the
            key are named.
        CheckFailedError: Some plans are not valid; each is named, with its faults.
    """
    reference = load_costs(None)
    faults, count = [], 0
    for number, values in _lines(path):
        count += 1
        try:
            plan = plan_from_json(values)
            validate(plan, costs or (reference if plan.costs == reference.name else None))
        except PlanFormError as error:
            raise SourceError(f"{path}, line {number}: {error}") from None
        except PlanError as error:
            faults.append(f"{path}, line {number}: {error}")
    if not count:
        raise SourceError(f"{path} has no plans; expected one a line: dynapar plan --out writes it")
    if faults:
        raise CheckFailedError("\n".join(faults))
    return count


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


def check_command(path: Path, *, costs: Path | None = None, json: bool = False) -> None:
    """Validate a file of plans, and say so.

    Raises:
        SourceError: As `check_plans`.
        CheckFailedError: As `check_plans`.
    """
    count = check_plans(path, None if costs is None else load_costs(costs))
    if json:
        show_json({"plans": count, "valid": True})
    else:
        print(f"{path}: {count} plan{'s' if count != 1 else ''}, all valid")


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
