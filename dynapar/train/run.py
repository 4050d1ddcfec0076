"""A run's parts, made ready on all ranks: where it starts, and what it says before it does."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from dynapar.catalog import load_model_shape
from dynapar.costs import Costs, check_origin, load_costs
from dynapar.data.grouped import GroupSampler, make_sampler
from dynapar.data.index import Index, read_index
from dynapar.data.materialize import Materializer
from dynapar.data.sampler import Sampler
from dynapar.data.sources import open_source
from dynapar.errors import ConfigError, PlanError
from dynapar.memory import transfer_price
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan
from dynapar.planner.problem import make_problem
from dynapar.planner.speeds import deal_by_speed
from dynapar.runtime.executor import StepExecutor
from dynapar.train import checkpoint
from dynapar.train.config import RunConfig
from dynapar.train.origin import measured_on
from dynapar.train.setup import (
    Planner,
    Ranks,
    describe_attention,
    join_ranks,
    load_model,
    make_cluster,
    make_executor,
    make_optimizer,
    make_planner,
    planner_config,
    pool_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a rank needs to train."""

    config: RunConfig
    ranks: Ranks
    costs: Costs
    planner: Planner
    index: Index
    materializer: Materializer
    sampler: Sampler | GroupSampler
    executor: StepExecutor
    optimizer: torch.optim.Optimizer

    @property
    def model(self) -> PreTrainedModel:
        """Whole on every rank."""
        return self.executor.adapter.model

    def deal(self, plan: StepPlan, speeds: Sequence[int]) -> StepPlan:
        """The plan for ranks of these speeds, in thousandths of the fastest one's."""
        if self.speeds_unused:
            return plan
        return deal_by_speed(
            plan,
            speeds=speeds,
            cluster=make_cluster(self.config, self.ranks.ranks),
            costs=self.costs,
            config=planner_config(self.config),
        )

    @property
    def speeds_unused(self) -> str:
        """Why plans do not follow the ranks' speeds; empty where they do."""
        scheduler = self.config.planner.scheduler
        if scheduler == "dynamic":
            return ""
        return f"planner.scheduler is {scheduler!r}, whose layouts are not dealt again"

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What a checkpoint of this run must agree with, by the configuration's key."""
        config = self.config
        settings = json.loads((config.model / "config.json").read_text(encoding="utf-8"))
        settings.pop("transformers_version", None)
        text = json.dumps(settings, sort_keys=True)
        return {
            "model": hashlib.sha256(text.encode()).hexdigest()[:16],
            "seed": config.seed,
            "batch.samples": config.batch.samples,
            "batch.block": config.batch.block,
            "index": self.index.fingerprint,
            "precision": "float64" if config.precision == "float64" else "float32",
        }

    def progress(self, step: int, loader: Mapping[str, object]) -> checkpoint.Progress:
        """What a checkpoint after `step` steps says; `loader` is the loader's state there."""
        return checkpoint.Progress(step=step, loader=loader, identity=self.identity)


def prepare(config: RunConfig) -> Run:
    """Make a run ready; a collective call of all ranks.

    What can be wrong with the configuration's files is found before the ranks meet.

    Raises:
        ConfigError: `checkpoint.folder` can be no folder.
        ModelError: The model cannot be built or run.
        CostsError: The costs file is not one.
        SourceError: Source and index cannot be read, or do not fit each other or the model.
        PlanError: A sample of the index fits no number of these ranks.
    """
    shape = load_model_shape(str(config.model))
    costs = load_costs(config.costs)
    if not config.force_costs:
        check_origin(costs, measured_on(config))
    source = open_source(config.source)
    index = read_index(config.index)
    quarantine = config.checkpoint.folder / "quarantine.jsonl"
    materializer = Materializer(shape, source, index, quarantine=quarantine)
    sampler = make_sampler(
        index.table,
        group_by=config.batch.group_by,
        global_batch=config.batch.samples,
        seed=config.seed,
        block=config.batch.block,
    )
    _make_folder(config.checkpoint.folder)
    ranks = join_ranks(timeout=timedelta(seconds=config.timeout_seconds), pool=pool_of(config))
    planner = make_planner(config, costs=costs, ranks=ranks.ranks)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _compile(planner, index.table, config.batch.samples)
    dist.barrier()
    check_samples(config, index=index, costs=costs, ranks=ranks.ranks)
    model = load_model(
        config.model,
        seed=config.seed,
        precision=config.precision,
        recompute=config.recompute,
        device=ranks.device,
    )
    return Run(
        config=config,
        ranks=ranks,
        costs=costs,
        planner=planner,
        index=index,
        materializer=materializer,
        sampler=sampler,
        executor=make_executor(model, ranks, config, costs=costs),
        optimizer=make_optimizer(model, config.optimizer),
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"checkpoint.folder is {str(folder)!r}, where no folder can be made "
            f"({error.strerror}); expected a folder, or a path where one can be made. Give "
            "checkpoint.folder another path"
        ) from error


def _compile(planner: Planner, table: SampleTable, samples: int) -> None:
    """Compile the planner's kernels once a machine, where all its ranks would at the same time."""
    shortest = np.argsort(table.llm_tokens, kind="stable")[:samples]
    with suppress(PlanError):  # check_samples will name the sample, on all ranks
        planner(table.take(shortest), 0)


def check_samples(config: RunConfig, *, index: Index, costs: Costs, ranks: int) -> None:
    """Find the sample that no step could place now, not when its step comes.

    Raises:
        PlanError: A sample of the index fits no number of these ranks; it is named.
    """
    make_problem(
        index.table,
        step=0,
        cluster=make_cluster(config, ranks),
        costs=costs,
        config=planner_config(config),
    )


def resume(run: Run) -> checkpoint.Progress:
    """Go on from the newest checkpoint of the run's folder; a collective call.

    Returns:
        How far the run has come; step 0 without a checkpoint.

    Raises:
        CheckpointError: The checkpoint is of another run (the setting that differs is named), or
            cannot be read.
    """
    # All ranks read the one that rank 0 sees.
    found = [checkpoint.find_latest(run.config.checkpoint.folder)]
    dist.broadcast_object_list(found, device=run.ranks.device)
    if (path := found[0]) is None:
        return run.progress(0, {})
    checkpoint.verify(path)
    progress = checkpoint.read_progress(path)
    checkpoint.check_identity(path, found=progress, identity=run.identity)
    run.sampler.load_state_dict(progress.loader)
    checkpoint.load(path, model=run.model, optimizer=run.optimizer)
    return progress


def describe(run: Run, start: int) -> list[str]:
    """What a run is, in lines for people; `start` is its first step."""
    config, ranks, table = run.config, run.ranks, run.index.table
    parameters = [p for p in run.model.parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    precision = {"bfloat16": "bfloat16 (autocast, float32 parameters)"}.get(
        config.precision, config.precision
    )
    origin = (
        "measured"
        if run.costs.measured
        else "reference, not measured here: predicted seconds are not this machine's"
    )
    if "offload" in (config.planner.recompute or ()):
        origin += f"; {transfer_price(run.costs)}"
    cluster = make_cluster(config, ranks.ranks)
    backend = f"{dist.get_backend()}, {ranks.device.type}"
    alone = (
        "" if ranks.ranks > 1 else "; for more: torchrun --nproc-per-node RANKS -m dynapar train"
    )
    return [
        f"ranks: {ranks.ranks}, {cluster.nodes} x {cluster.ranks_per_node} ({backend}{alone})",
        f"model: {type(run.model).__name__} of {config.model}, "
        f"{sum(p.numel() for p in parameters):,} parameters, {trained:,} trained, "
        f"{precision}, dropout off" + (", recompute" if config.recompute else ""),
        f"planner: {config.planner.scheduler}, capacity {config.planner.capacity:,} tokens, "
        f"{config.planner.encoder_capacity:,} encoder tokens; costs {run.costs.name} ({origin})",
        *describe_attention(config, run.executor.schemes, ranks=ranks.ranks),
        f"data: {len(table):,} samples, {int(table.llm_tokens.sum()):,} tokens, "
        f"{config.batch.samples:,} samples a step, seed {config.seed}",
        f"run: {_begins(config, start)}",
    ]


def _begins(config: RunConfig, start: int) -> str:
    folder = config.checkpoint.folder
    if not start:
        return f"starts at step 1 of {config.steps}; folder {folder}"
    path = checkpoint.directory(folder, start)
    if start < config.steps:
        return f"resumes at step {start + 1} of {config.steps} from {path}"
    if start == config.steps:
        return f"finished: {start} of {config.steps} steps ({path}). Raise steps to go on"
    return (
        f"finished: {start} steps are done ({path}), more than steps: {config.steps}. Nothing is "
        f"left to run: set steps above {start} to go on, or give the run another checkpoint.folder"
    )
