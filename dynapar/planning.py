"""Make the steps of a source, and plan them: what the commands plan, simulate and inspect share.

A source becomes a table of samples, the sampler says which of them each step takes, the planner
places them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.costs import Costs
from dynapar.data.grouped import make_sampler, no_prefixes
from dynapar.errors import ConfigError, SourceError
from dynapar.meta import SampleTable, read_metadata_jsonl
from dynapar.plan import StepPlan
from dynapar.planner import (
    PlannerConfig,
    group_by_prefix,
    homogeneous_plan,
    plan_step,
    random_plan,
)
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
