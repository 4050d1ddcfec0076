"""Run the same global batches in one process and on ranks, and measure how far they are apart.

The reference runs each sample alone, unpacked, through the model's own forward. The ranks run the
planner's plan of a batch and random valid ones. Every rank compares the whole gradient.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dynapar.costs import load_costs
from dynapar.data.samples import LoadedSample
from dynapar.errors import CheckFailedError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan
from dynapar.planner import PlannerConfig, random_plan
from dynapar.runtime.order import OrderError, OrderLog, replay
from dynapar.runtime.reference import count_targets, reference_step
from dynapar.train.config import Precision, RunConfig
from dynapar.train.setup import (
    autocast_dtype,
    describe_attention,
    group_samples,
    join_ranks,
    load_model,
    make_cluster,
    make_executor,
    make_planner,
    make_schemes,
    numerics,
    planner_config,
    pool_of,
)
from dynapar.verify.batches import Batches, modalities
from dynapar.verify.findings import Batch, Finding, Findings, Trial
from dynapar.verify.gradients import Difference, difference, gradients, relative
from dynapar.verify.spawn import run_on_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank gets."""

    config: RunConfig
    trials: tuple[Trial, ...]
    references: Path
    """Folder with the reference's gradient of each step."""
    dropout: tuple[str, ...]
    """The modules whose dropout was switched off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """What one rank found."""

    losses: tuple[float, ...]
    """Of each trial."""
    differences: tuple[Difference, ...]
    """Of each trial, from the reference."""
    rings: tuple[Counter[str], ...]
    """Of each trial, the rings that begin on this rank, by how they share attention."""
    log: OrderLog


def say(line: str) -> None:
    """A line of progress, apart from the result."""
    print(f"verify: {line}", file=sys.stderr, flush=True)


def compare(config: RunConfig) -> Findings:
    """Run the reference here and the trials on ranks of this machine.

    Args:
        config: Of the run; its section `verify` says how much, its `precision` in what.

    Raises:
        CheckFailedError: A batch has nothing to compare: no targets, or a gradient of zeros.
        DynaparError: The configuration, its data or its model cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="dynapar-verify-") as folder:
        job = make_job(config, Path(folder))
        ranks = config.verify.ranks
        say(f"{len(job.trials)} plans on {ranks} ranks (gloo, one thread each)")
        timeout = timedelta(seconds=config.timeout_seconds)
        return judge(job, run_on_ranks(check_rank, job, ranks=ranks, timeout=timeout))


def make_job(config: RunConfig, folder: Path) -> Job:
    """Plan the trials, then run the reference.

    Args:
        config: Of the run.
        folder: Gets the reference's gradients.

    Raises:
        CheckFailedError: A batch has nothing to compare: no targets, or a gradient of zeros.
        PlanError: A sample fits no number of ranks; nothing has been run.
        DynaparError: The configuration, its data or its model cannot be used.
    """
    section = config.verify
    batches = Batches(config, samples=section.samples)
    costs = load_costs(config.costs)
    schemes = make_schemes(config, costs=costs, ranks=section.ranks)
    for line in describe_attention(config, schemes, ranks=section.ranks):
        say(line)
    planner = make_planner(config, costs=costs, ranks=section.ranks)
    plans: list[dict[str, StepPlan]] = []
    for step in range(section.steps):
        table = batches.draw(batches.rows(step))
        plans.append({"planned": planner(table, step), **_random_plans(config, table, step)})
    model, dropout = make_model(config, "float32" if _rounds(config) else config.precision)
    trials: list[Trial] = []
    for step, by_name in enumerate(plans):
        rows = batches.rows(step)
        say(f"step {step}: {len(rows)} samples in one process, one by one, unpacked")
        batch = _reference(config, model, batches, step, rows, folder)
        trials += [Trial(batch=batch, name=name, plan=plan) for name, plan in by_name.items()]
    return Job(config=config, trials=tuple(trials), references=folder, dropout=dropout)


def judge(job: Job, outcomes: Sequence[RankOutcome]) -> Findings:
    """What the ranks found, as one: of each trial the rank that is farthest from the reference.

    Args:
        job: What they ran.
        outcomes: By rank.
    """
    order, messages = _replay([outcome.log for outcome in outcomes])
    batches = {trial.batch.step: trial.batch for trial in job.trials}
    return Findings(
        batches=tuple(batches.values()),
        trials=tuple(_farthest(number, trial, outcomes) for number, trial in enumerate(job.trials)),
        dropout=job.dropout,
        order=order,
        messages=messages,
    )


def make_model(config: RunConfig, precision: Precision) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The configuration's model without dropout, and where it had some."""
    model = load_model(
        config.model, seed=config.seed, precision=precision, recompute=config.recompute
    )
    return model, switch_off_dropout(model)


def switch_off_dropout(model: nn.Module) -> tuple[str, ...]:
    """Set every dropout of a model to 0: it draws other numbers in every layout.

    Returns:
        The modules that had some.
    """
    found = []
    for name, module in model.named_modules():
        keys = [key for key in vars(module) if key.endswith("dropout")]
        for key in (*keys, *(["p"] if isinstance(module, nn.Dropout) else [])):
            value = getattr(module, key)
            if isinstance(value, float) and value > 0:
                setattr(module, key, 0.0)
                found.append(name)
    return tuple(found)


def check_rank(rank: int, job: Job) -> RankOutcome:
    """Run all trials as one rank of them.

    Args:
        rank: Of this process, whose default group is made.
        job: The same on all ranks.
    """
    config = job.config
    ranks = join_ranks(
        timeout=timedelta(seconds=config.timeout_seconds),
        device=torch.device("cpu"),
        pool=pool_of(config),
    )
    model, _ = make_model(config, config.precision)
    executor = make_executor(model, ranks, config, costs=load_costs(config.costs))
    batches = Batches(config)
    losses, differences, rings = [], [], []
    for trial in job.trials:
        model.zero_grad()
        batch = trial.batch
        samples = batches.of_rank(trial.plan, batch.rows, rank, stubs=batch.stubs)
        queue = executor.prepare(trial.plan, samples)
        with numerics(config.precision):
            result = executor.run(queue, targets=batch.targets)
        mine = [shard for shard in queue if len(shard.ranks) > 1 and shard.position == 0]
        rings.append(Counter(shard.scheme for shard in mine))
        losses.append(result.loss)
        differences.append(difference(gradients(model), _load(job.references, batch.step)))
        if rank == 0:
            say(
                f"step {batch.step}, {trial.name}: loss {result.loss:.6f}, gradient "
                f"{differences[-1].whole:.1e} apart, {result.seconds:.1f} s"
            )
    return RankOutcome(
        losses=tuple(losses),
        differences=tuple(differences),
        rings=tuple(rings),
        log=ranks.log,
    )


def _rounds(config: RunConfig) -> bool:
    """Whether the precision is judged by its distance to the float32 reference."""
    return config.precision == "bfloat16"


def _reference(
    config: RunConfig,
    model: PreTrainedModel,
    batches: Batches,
    step: int,
    rows: tuple[int, ...],
    folder: Path,
) -> Batch:
    samples = [batches.whole(row) for row in rows]
    good = [sample for sample in samples if not sample.stub]
    targets = count_targets(good)
    if targets == 0:
        lost = (
            f"; {len(samples) - len(good)} could not be loaded" if len(good) < len(samples) else ""
        )
        raise CheckFailedError(
            f"nothing to compare: the {len(samples)} samples of step {step} have 0 targets{lost}; "
            "expected assistant turns, whose tokens are learnt. Give a source that has some"
        )
    precision: Precision = "float32" if _rounds(config) else config.precision
    loss, want = _one_process(model, good, targets, precision, None)
    if not any(bool(gradient.any()) for gradient in want.values()):
        raise CheckFailedError(
            f"nothing to compare: the one-process gradient of step {step} is zero in all "
            f"{len(want)} parameters that are trained; expected one that is not. Check the model's "
            "weights and which of them are frozen"
        )
    torch.save(want, _path(folder, step))
    alone = None
    if _rounds(config):
        say(f"step {step}: the same in {config.precision}")
        _, got = _one_process(model, good, targets, precision, autocast_dtype(config.precision))
        alone = difference(got, want)
    return Batch(
        step=step,
        rows=rows,
        targets=targets,
        tokens=sum(len(sample.input_ids) for sample in samples),
        modalities=modalities(batches.draw(rows)),
        stubs={row: s.stub for row, s in zip(rows, samples, strict=True) if s.stub},
        loss=loss,
        one_process=alone,
    )


def _one_process(
    model: PreTrainedModel,
    samples: Sequence[LoadedSample],
    targets: int,
    precision: Precision,
    autocast: torch.dtype | None,
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with numerics(precision):
        loss = reference_step(model, samples, targets=targets, autocast=autocast)
    return loss, gradients(model)


def _random_plans(config: RunConfig, table: SampleTable, step: int) -> dict[str, StepPlan]:
    section, planner = config.verify, config.planner
    table = group_samples(config, table, ranks=section.ranks)
    # Degrees that the run's own limit leaves out are checked, too; a pool has no groups for them.
    own = planner_config(config)
    wide = PlannerConfig(capacity=planner.capacity, encoder_capacity=planner.encoder_capacity)
    if config.attention.pool:
        wide = replace(
            wide,
            degrees=own.degrees,
            windows=own.windows,
            peer_budget=own.peer_budget,
            max_degree=own.max_degree,
        )
    return {
        f"random {number + 1}": random_plan(
            table,
            seed=section.plans * step + number + config.seed,
            step=step,
            cluster=make_cluster(config, section.ranks),
            costs=load_costs(config.costs),
            config=wide,
        )
        for number in range(section.plans)
    }


def _farthest(number: int, trial: Trial, outcomes: Sequence[RankOutcome]) -> Finding:
    """Ranks hold the same gradient unless something is wrong; the worst one counts."""
    want = trial.batch.loss
    differences = [outcome.differences[number] for outcome in outcomes]
    return Finding(
        trial=trial,
        loss=max(relative(outcome.losses[number] - want, want) for outcome in outcomes),
        gradient=max(differences, key=lambda found: (found.worst, found.whole)),
        rings=dict(sorted(sum((outcome.rings[number] for outcome in outcomes), Counter()).items())),
    )


def _replay(logs: Sequence[OrderLog]) -> tuple[str, int]:
    count = sum(len(log.operations) for log in logs)
    try:
        replay(logs)
    except OrderError as error:
        return str(error), count
    return "", count


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step}.pt"


def _load(folder: Path, step: int) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = torch.load(_path(folder, step), mmap=True)
    return loaded


def in_precision(config: RunConfig, precision: Precision) -> RunConfig:
    """The same run in another precision; float64 cannot recompute, and then does not."""
    recompute = config.recompute and precision != "float64"
    return replace(config, precision=precision, recompute=recompute)
