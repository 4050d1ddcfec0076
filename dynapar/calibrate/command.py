"""Run a calibration: choose blocks, time them, fit, and say how good the costs are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from dynapar.calibrate.blocks import Block, choose_blocks
from dynapar.calibrate.fit import FITTED, FloatArray, Link, costs_of, fit, link_of, medians
from dynapar.calibrate.measure import Job, Timings, time_blocks
from dynapar.calibrate.predict import TERMS, TermError, errors_by_term, predict
from dynapar.catalog import load_model_shape
from dynapar.costs import Costs, costs_to_json
from dynapar.data.index import read_index
from dynapar.meta import SampleTable
from dynapar.train.config import RunConfig
from dynapar.train.origin import measured_on


class Calibration(NamedTuple):
    """Costs, and what they were fitted to."""

    costs: Costs
    blocks: tuple[Block, ...]
    seconds: FloatArray
    """(blocks,) medians."""
    spreads: FloatArray
    """(blocks,) of runs of the same block, as shares."""
    predicted: FloatArray
    """(blocks,) by the costs."""
    rounds: int
    cuda: bool
    link: Link

    @property
    def errors(self) -> list[TermError]:
        """By kind of block."""
        return errors_by_term(self.blocks, self.seconds, self.spreads, self.predicted)


def calibrate(config: RunConfig, *, rounds: int = 9, budget: float = 140.0) -> Calibration:
    """Measure the costs of a configuration's model, here; under torchrun a call of all ranks.

    Args:
        config: Of the run; its `costs` are not read.
        rounds: Runs of each block, at most.
        budget: Seconds of wall clock for all rounds; at least three are run.

    Raises:
        DynaparError: The configuration, its data or its model cannot be used, or a measured time
            is no number.
    """
    table = read_index(config.index).table
    blocks = choose_blocks(
        table,
        capacity=config.planner.capacity,
        encoder_capacity=config.planner.encoder_capacity,
        ranks=int(os.environ.get("WORLD_SIZE", "2")),
    )
    timings = time_blocks(Job(config=config, blocks=blocks, rounds=rounds, budget=budget))
    if len(timings) == 1:
        blocks, timings = _without_rings(blocks, timings[0])
    return judge(config, table, blocks, timings)


def _without_rings(
    blocks: tuple[Block, ...], alone: Timings
) -> tuple[tuple[Block, ...], list[Timings]]:
    kept = [number for number, block in enumerate(blocks) if block.degree == 1]
    times = alone._replace(blocks=alone.blocks[:, kept])
    return tuple(blocks[number] for number in kept), [times]


def judge(
    config: RunConfig, table: SampleTable, blocks: tuple[Block, ...], timings: list[Timings]
) -> Calibration:
    """Fit what was timed, and predict it again."""
    seconds, spreads = medians(blocks, timings)
    shape = load_model_shape(str(config.model))
    costs = costs_of(fit(table, blocks, seconds), shape, timings, measured_on(config))
    return Calibration(
        costs=costs,
        blocks=blocks,
        seconds=seconds,
        spreads=spreads,
        predicted=np.array([predict(table, block, costs) for block in blocks]),
        rounds=len(timings[0].blocks),
        cuda=timings[0].cuda,
        link=link_of(timings),
    )


def write_costs(costs: Costs, path: Path) -> None:
    """Write a cost file, on rank 0 alone; it is whole or not there."""
    if dist.is_initialized() and dist.get_rank():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(costs_to_json(costs), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def report(found: Calibration) -> list[str]:
    """What was found, in lines for people."""
    clock = "wall clock of the GPU's work" if found.cuda else "CPU time of the training thread"
    where = found.costs.measured_on
    assert where is not None
    lines = [
        f"{where.hardware}; {where.versions}; {where.precision}",
        f"{len(found.blocks)} microbatches x {found.rounds} rounds, {clock}, medians",
        f"{'':30}{'blocks':>7}{'median error':>14}{'worst':>8}{'same shape again':>18}",
    ]
    for term in found.errors:
        lines.append(
            f"{TERMS[term.kind]:30}{term.blocks:7}{100 * term.median:12.1f} %"
            f"{100 * term.worst:6.1f} %{100 * term.spread:16.1f} %"
        )
    fitted = [n for n, block in enumerate(found.blocks) if block.kind in FITTED]
    within = np.mean(np.abs(found.predicted / found.seconds - 1)[fitted] <= 0.1)
    lines.append(
        f"fitted to {len(fitted)} of them, {100 * within:.0f} % of which are within 10 %; a "
        f"microbatch costs {1000 * found.costs.fixed.microbatch:.3g} ms, a step's end "
        f"{1000 * found.costs.step.closing_step:.3g} ms"
    )
    host = found.costs.host
    assert host is not None
    lines.append(
        f"copies between device and host, as offload makes them: {_rate(host.bytes_per_s)}"
    )
    if found.link.latency or found.link.bytes_per_s > 1:
        lines.append(
            f"messages between two ranks, wall clock: {1e6 * found.link.latency:.0f} us and "
            f"{_rate(found.link.bytes_per_s)} each way"
        )
    return lines


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
