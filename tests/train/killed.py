"""A training run that loses a rank: `torchrun -m tests.train.killed CONFIG RANK STEPS`."""

from __future__ import annotations

import os
import signal
import sys

from dynapar.cli import main
from dynapar.data.loader import StepLoader
from dynapar.train import loop
from dynapar.train.metrics import StepRecord
from dynapar.train.run import Run


def train_and_die(config: str, rank: int, steps: int) -> None:
    """`dynapar train`, but one rank dies as soon as its optimizer took its `steps`-th step."""
    whole = loop.run_step

    def run_step(run: Run, loader: StepLoader) -> StepRecord:
        record = whole(run, loader)
        if record.plan.step + 1 == steps and run.ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    loop.run_step = run_step
    main(["train", config])


if __name__ == "__main__":
    train_and_die(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
