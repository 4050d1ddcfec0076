"""A real busy loop in one of two ranks, under costs that were measured here: it gets half the work.

Nothing stands in for a clock: costs are calibrated on this machine, and rank 1 then spends as much
CPU time again in a loop as each of its microbatches took. Steps differ in length by more than half,
which makes nobody slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from dynapar.calibrate.command import calibrate, write_costs
from dynapar.runtime.microbatch import MicrobatchModule
from dynapar.train.config import read_run_config
from dynapar.train.loop import train
from dynapar.train.metrics import METRICS, read_steps
from tests.distributed import run_ranks
from tests.train.tiny import write_config, write_run

STEPS, LAST = 20, 6
"""Of the run; and those at its end over which work is added up, since a step has few samples."""
RUN: dict[str, Any] = {
    "steps": STEPS,
    "batch": {"samples": 16},
    "planner": {"capacity": 400, "encoder_capacity": 400},
}


@contextmanager
def busy() -> Iterator[None]:
    """After each backward pass a loop that takes as long as forward and backward did."""
    backward, began = torch.Tensor.backward, 0.0

    def begin(module: torch.nn.Module, _: object) -> None:
        nonlocal began
        if isinstance(module, MicrobatchModule):
            began = time.thread_time()

    def slowed(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        until = 2 * time.thread_time() - began
        while time.thread_time() < until:
            pass

    hook = register_module_forward_pre_hook(begin)
    with patch.object(torch.Tensor, "backward", slowed):
        yield
    hook.remove()


def run(rank: int, config: Path) -> None:
    # A rank's process may have begun before this test, with another standard output.
    with (
        (config.parent / f"said_{rank}").open("w") as said,
        redirect_stdout(said),
        busy() if rank == 1 else nullcontext(),
    ):
        train(read_run_config(config))


def ratios(rows: list[Mapping[str, object]], key: str) -> Callable[[slice], float]:
    """Seconds of rank 1 over those of rank 0, added up over some steps."""
    ranks = [cast(list[dict[str, list[float]]], row["ranks"]) for row in rows]
    mine = [[sum(rank[key]) for rank in both] for both in ranks]
    return lambda part: sum(own[1] for own in mine[part]) / sum(own[0] for own in mine[part])


@pytest.mark.slow
def test_a_busy_rank_gets_half_the_work_within_twenty_steps(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run", samples=60, **RUN)
    folder = config.parent
    write_costs(calibrate(read_run_config(config), rounds=5).costs, folder / "costs.json")
    config = write_config(folder, costs="costs.json", **RUN)
    run_ranks(run, 2, tmp_path, config)
    rows = read_steps(read_run_config(config).checkpoint.folder / METRICS)
    work, took = ratios(rows, "predicted"), ratios(rows, "microbatches_busy")
    assert 0.8 <= work(slice(3)) <= 1.25
    assert took(slice(1, 4)) >= 1.5
    # At the end half of the work, in about the time of the other rank, whatever else runs here.
    assert 0.3 <= work(slice(-LAST, None)) <= 0.7
    assert 0.7 <= took(slice(-LAST, None)) <= 1.4
    tokens = [int(str(row["tokens"])) for row in rows]
    assert max(tokens) > 1.5 * min(tokens), "expected long steps among short ones"
    said = (folder / "said_0").read_text()
    assert "rank 1 takes" in said
    assert "rank 0 takes" not in said
