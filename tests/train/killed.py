"""A training run that loses a rank: `torchrun -m tests.train.killed CONFIG RANK STEPS`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from dynapar.cli import main
from dynapar.data.loader import StepLoader
from dynapar.train import loop
from dynapar.train.metrics import StepRecord
from dynapar.train.run import Run

_, CONFIG, RANK, STEPS = sys.argv
_run_step = loop.run_step


def run_step(run: Run, loader: StepLoader) -> StepRecord:
    """The rank dies as soon as its optimizer took step number STEPS."""
    record = _run_step(run, loader)
    if record.plan.step + 1 == int(STEPS) and run.ranks.rank == int(RANK):
        os.kill(os.getpid(), signal.SIGKILL)
    return record


if __name__ == "__main__":
    loop.run_step = run_step
    main(["train", str(Path(CONFIG))])
