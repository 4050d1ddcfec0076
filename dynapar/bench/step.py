"""Run the same global batches in three layouts on real ranks and compare the CPU time they take.

The ranks of a step meet in its closing pass, so a step takes as long as its slowest rank. Where
ranks share few cores, wall-clock time says nothing about that; busy CPU time does: what a rank's
training thread computes, with waiting for others left out. Loading and decoding are not part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from dynapar.bench.baselines import lay_out_padded
from dynapar.costs import load_costs
from dynapar.errors import CheckFailedError
from dynapar.meta import IntArray, SampleTable
from dynapar.plan import StepPlan
from dynapar.planner import PlannerConfig, homogeneous_plan
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.layout import ShardLayout
from dynapar.simulate.padded import PaddedBatch, fixed_degree, padded_batches
from dynapar.train.config import RunConfig
from dynapar.train.setup import join_ranks, load_model, make_cluster, make_executor, make_planner
from dynapar.verify.batches import Batches
from dynapar.verify.spawn import run_on_ranks

LAYOUTS = ("dynapar", "homogeneous", "padded")
"""The planner's; the best single degree of each step, balanced as well as dynapar can; and what
`dynapar.bench.baselines` describes."""

DRAWS = 2000
"""Of the bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayouts:
    """One global batch, laid out three times."""

    rows: tuple[int, ...]
    """Of the index, by row of the plans' sample tables."""
    dynapar: StepPlan
    homogeneous: StepPlan
    padded: tuple[PaddedBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank gets."""

    config: RunConfig
    steps: tuple[StepLayouts, ...]
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What one rank measured; each by (step, repeat, layout)."""

    busy: tuple[tuple[tuple[float, ...], ...], ...]
    wall: tuple[tuple[tuple[float, ...], ...], ...]
    loss: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """One layout over all steps."""

    layout: str
    busy_seconds: float
    """Sum over the steps of the slowest rank's busy CPU time, mean of the repeats."""
    wall_seconds: float
    """The same of wall-clock time."""
    ratio: float
    """`busy_seconds` / that of the layout "dynapar"."""
    interval: tuple[float, float]
    """95 % bootstrap interval of the ratio, over the steps."""
    degrees: dict[int, int]
    """Samples by degree."""
    tokens: int
    """Computed by all ranks, padding included."""
    encoder_tokens: int
    """Encoded by all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All layouts on the same batches."""

    results: tuple[LayoutResult, ...]
    same: int
    """Steps in which dynapar took the homogeneous plan."""
    steps: int


def compare_layouts(config: RunConfig, *, steps: int, repeats: int, ranks: int) -> Comparison:
    """Measure the three layouts, interleaved, on ranks of this machine.

    Args:
        config: Of the run; the batches are its first `steps`.
        steps: Global batches.
        repeats: How often each is run in each layout; the first one once more, not counted.
        ranks: Processes, of one thread each.

    Raises:
        CheckFailedError: The layouts do not give the same loss.
        DynaparError: The configuration cannot be used, or a sample does not fit.
    """
    batches = Batches(config)
    planned = tuple(_lay_out(config, batches, step, ranks) for step in range(steps))
    say(f"{steps} steps x {repeats} repeats x {len(LAYOUTS)} layouts on {ranks} ranks")
    readings = run_on_ranks(
        measure_rank,
        Job(config=config, steps=planned, repeats=repeats),
        ranks=ranks,
        timeout=timedelta(seconds=config.timeout_seconds),
    )
    _check_losses(np.array(readings[0].loss))
    # (steps, layouts): the slowest rank of each repeat, then the mean of the repeats.
    busy = np.max([reading.busy for reading in readings], axis=0).mean(axis=1)
    wall = np.max([reading.wall for reading in readings], axis=0).mean(axis=1)
    tables = [batches.draw(step.rows) for step in planned]
    return Comparison(
        results=tuple(
            _result(number, busy, wall, planned, tables) for number in range(len(LAYOUTS))
        ),
        same=sum(step.dynapar.chosen == "homogeneous" for step in planned),
        steps=steps,
    )


def say(line: str) -> None:
    """A line of progress, apart from the result."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


def _lay_out(config: RunConfig, batches: Batches, step: int, ranks: int) -> StepLayouts:
    section, costs = config.planner, load_costs(config.costs)
    rows = batches.rows(step)
    table = batches.draw(rows)
    cluster = make_cluster(config, ranks)
    degree = fixed_degree(
        int(batches.table.llm_tokens.max()), capacity=section.capacity, cluster=cluster
    )
    return StepLayouts(
        rows=rows,
        dynapar=make_planner(config, costs=costs, ranks=ranks)(table, step),
        homogeneous=homogeneous_plan(
            table,
            degree=None,
            step=step,
            cluster=cluster,
            costs=costs,
            config=PlannerConfig(
                capacity=section.capacity, encoder_capacity=section.encoder_capacity
            ),
        ),
        padded=padded_batches(
            table,
            degree=degree,
            ranks=ranks,
            budget=section.capacity,
            encoder_capacity=section.encoder_capacity,
        ),
    )


def measure_rank(rank: int, job: Job) -> Readings:
    """Run all layouts of all steps as one rank of them.

    Args:
        rank: Of this process, whose default group is made.
        job: The same on all ranks.
    """
    config = job.config
    timeout = timedelta(seconds=config.timeout_seconds)
    ranks = join_ranks(timeout=timeout, device=torch.device("cpu"))
    model = load_model(
        config.model,
        seed=config.seed,
        precision=config.precision,
        recompute=config.recompute,
    )
    executor = make_executor(model, ranks, config)
    batches = Batches(config)
    busy, wall, loss = [], [], []
    for number, step in enumerate(job.steps):
        queues = _queues(executor, batches, step, rank)
        targets = int(batches.draw(step.rows).label_tokens.sum())
        if number == 0:
            _run(executor, queues, 0, targets)  # first calls make connections and buffers
        runs = [_run(executor, queues, number + k, targets) for k in range(job.repeats)]
        busy.append(tuple(tuple(run[0]) for run in runs))
        wall.append(tuple(tuple(run[1]) for run in runs))
        loss.append(tuple(tuple(run[2]) for run in runs))
        if rank == 0:
            say(f"step {number + 1} of {len(job.steps)}")
    return Readings(busy=tuple(busy), wall=tuple(wall), loss=tuple(loss))


def _queues(
    executor: StepExecutor, batches: Batches, step: StepLayouts, rank: int
) -> list[tuple[ShardLayout, ...]]:
    """This rank's work, by layout."""
    plans = [
        executor.prepare(plan, batches.of_rank(plan, step.rows, rank))
        for plan in (step.dynapar, step.homogeneous)
    ]
    mine = [batch for batch in step.padded if rank in batch.ranks]
    whole = {row: batches.whole(step.rows[row]) for batch in mine for row in batch.rows}
    padded = tuple(
        lay_out_padded(
            batch,
            whole,
            rank=rank,
            masks=executor.adapter.masks,
            bands=executor.adapter.bands,
        )
        for batch in mine
    )
    return [*plans, padded]


def _run(
    executor: StepExecutor,
    queues: Sequence[tuple[ShardLayout, ...]],
    turn: int,
    targets: int,
) -> tuple[list[float], list[float], list[float]]:
    """Busy and wall-clock seconds and loss, by layout; each turn starts at another layout."""
    busy, wall, loss = ([0.0] * len(queues) for _ in range(3))
    for place in range(len(queues)):
        layout = (place + turn) % len(queues)
        executor.adapter.model.zero_grad()
        dist.barrier()
        result = executor.run(queues[layout], targets=targets)
        busy[layout], wall[layout] = result.busy_seconds, result.seconds
        loss[layout] = result.loss
    return busy, wall, loss


def _check_losses(loss: np.ndarray) -> None:
    """(steps, repeats, layouts): one loss a step, whatever the layout."""
    spread = np.abs(loss / loss[:, :1, :1] - 1).max(axis=(0, 1))
    for layout, apart in zip(LAYOUTS, spread, strict=True):
        if not apart <= 1e-4:
            raise CheckFailedError(
                f"layout {layout} gives a loss that is {apart:.1e} apart from dynapar's; expected "
                "the same. Run `dynapar verify` on this configuration"
            )


def _result(
    number: int,
    busy: np.ndarray,
    wall: np.ndarray,
    steps: Sequence[StepLayouts],
    tables: Sequence[SampleTable],
) -> LayoutResult:
    degrees: dict[int, int] = {}
    tokens = encoder_tokens = 0
    for step, table in zip(steps, tables, strict=True):
        if LAYOUTS[number] == "padded":
            for batch in step.padded:
                degree = len(batch.ranks)
                degrees[degree] = degrees.get(degree, 0) + len(batch.rows)
                tokens += batch.length * len(batch.rows)
                encoder_tokens += degree * int(table.encoder_tokens[list(batch.rows)].sum())
            continue
        plan = step.dynapar if LAYOUTS[number] == "dynapar" else step.homogeneous
        for placement in (p for micro in plan.microbatches for p in micro.placements):
            degree = len(placement.ranks)
            degrees[degree] = degrees.get(degree, 0) + 1
        tokens += int(table.llm_tokens.sum())
        encoder_tokens += int(table.encoder_tokens.sum())
    return LayoutResult(
        layout=LAYOUTS[number],
        busy_seconds=float(busy[:, number].sum()),
        wall_seconds=float(wall[:, number].sum()),
        ratio=float(busy[:, number].sum() / busy[:, 0].sum()),
        interval=bootstrap(busy[:, number], busy[:, 0]),
        degrees=dict(sorted(degrees.items())),
        tokens=tokens,
        encoder_tokens=encoder_tokens,
    )


def bootstrap(over: np.ndarray, under: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of sum(over) / sum(under) when the pairs are drawn anew.

    Args:
        over: (n,) float64.
        under: (n,) float64, above 0, of the same steps.
        seed: Of the draws.

    >>> bootstrap(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    (2.0, 2.0)
    """
    n = len(over)
    draws: IntArray = np.random.default_rng(seed).integers(0, n, size=(DRAWS, n))
    ratios = over[draws].sum(axis=1) / under[draws].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
