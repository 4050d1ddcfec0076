"""Hold planned steps against what they took on real ranks, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.calibrate.measure import spread_of
from dynapar.costs import Costs
from dynapar.plan import StepPlan
from dynapar.speeds import Pace, Speeds, follow, predict_ranks
from dynapar.train.config import RunConfig
from dynapar.train.setup import (
    join_ranks,
    load_model,
    make_executor,
    make_planner,
)
from dynapar.verify.batches import Batches
from dynapar.verify.spawn import run_on_ranks

FloatArray = npt.NDArray[np.float64]


class Checked(NamedTuple):
    """One shape: a rank's part of a microbatch, or a step's slowest rank; seconds."""

    step: int
    rank: int
    degree: int
    predicted: float
    measured: float
    """Median of the repeats."""
    spread: float
    """Share by which single repeats stray."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank gets."""

    config: RunConfig
    plans: tuple[StepPlan, ...]
    rows: tuple[tuple[int, ...], ...]
    repeats: int


def check_steps(
    config: RunConfig, costs: Costs, *, steps: int, repeats: int = 9, ranks: int = 2
) -> tuple[list[Checked], list[Checked]]:
    """Plan the first steps of a run and run each of them several times on CPU ranks.

    Args:
        config: Of the run.
        costs: From a calibration.
        steps: Steps.
        repeats: Runs of each step; one more warms up.
        ranks: Processes of one thread.

    Returns:
        Microbatches, each on each of its ranks; and steps, by their slowest rank, microbatches and
        closing pass together. CPU time of the training thread.
    """
    batches = Batches(config)
    rows = tuple(batches.rows(step) for step in range(steps))
    planner = make_planner(config, costs=costs, ranks=ranks)
    plans = tuple(planner(batches.draw(own), step) for step, own in enumerate(rows))
    job = Job(config=config, plans=plans, rows=rows, repeats=repeats)
    readings = run_on_ranks(
        run_rank, job, ranks=ranks, timeout=timedelta(seconds=config.timeout_seconds)
    )
    closing = float(np.median([reading[1] for reading in readings]))
    micros, whole = [], []
    for step, plan in enumerate(plans):
        own = predict_ranks(plan, costs)
        busy = np.array([reading[0][step].sum(axis=1) + reading[1][step] for reading in readings])
        for rank, reading in enumerate(readings):
            for place, micro in enumerate(plan.of_rank(rank)):
                times = reading[0][step][:, place]
                micros.append(
                    Checked(
                        step,
                        rank,
                        len(micro.ranks),
                        own[rank][place],
                        float(np.median(times)),
                        spread_of(times),
                    )
                )
        # The rank that is slowest, not whichever was held up in each repeat.
        slowest = busy[np.median(busy, axis=1).argmax()]
        predicted = max(map(sum, own)) + closing
        whole.append(Checked(step, -1, 0, predicted, float(np.median(slowest)), spread_of(slowest)))
    return micros, whole


def followed(
    micros: Sequence[Checked], steps: Sequence[Checked]
) -> tuple[list[Checked], list[Checked]]:
    """The same from the second step on, each predicted with the scale that the steps before set.

    This is the common scale of `dynapar.speeds`, as a run follows it: between the process that
    calibrated and the one that runs, a shared machine may have become slower as a whole.

    Args:
        micros: Of `check_steps`, in order of steps.
        steps: Likewise.
    """
    ranks = 1 + max(c.rank for c in micros)
    state = Speeds.equal(ranks)
    later: tuple[list[Checked], list[Checked]] = [], []
    for whole in steps:
        own = [c for c in micros if c.step == whole.step]
        if state.steps:
            later[0].extend(c._replace(predicted=c.predicted * state.scale) for c in own)
            later[1].append(whole._replace(predicted=whole.predicted * state.scale))
        paces = [
            Pace(
                sum(c.predicted for c in own if c.rank == rank),
                sum(c.measured for c in own if c.rank == rank),
            )
            for rank in range(ranks)
        ]
        state = follow(state, paces)
    return later


def run_rank(rank: int, job: Job) -> tuple[list[FloatArray], FloatArray]:
    """(repeats, microbatches) CPU seconds of each step, and (steps, repeats) of its closing pass.

    Args:
        rank: This rank.
        job: The same on all.
    """
    config = job.config
    ranks = join_ranks(timeout=timedelta(seconds=config.timeout_seconds))
    model = load_model(
        config.model, seed=config.seed, precision=config.precision, device=ranks.device
    )
    executor = make_executor(model, ranks, config)
    batches = Batches(config)
    queues = [
        executor.prepare(plan, batches.of_rank(plan, rows, rank))
        for plan, rows in zip(job.plans, job.rows, strict=True)
    ]
    times: list[list[tuple[float, ...]]] = [[] for _ in queues]
    closing = np.zeros((len(queues), job.repeats))
    for repeat in range(-1, job.repeats):
        for step, queue in enumerate(queues):
            result = executor.run(queue, targets=1)
            model.zero_grad(set_to_none=True)
            if repeat >= 0:
                times[step].append(result.microbatch_busy)
                closing[step, repeat] = result.busy_seconds - sum(result.microbatch_busy)
    return [np.array(each) for each in times], closing
