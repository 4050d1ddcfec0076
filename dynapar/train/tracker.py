"""Hand a step's scalars to a tracker of experiments: to TensorBoard here, to any other by a class.

A tracker gets the numbers of the step's line in `metrics.jsonl`, under the names that
`docs/metrics.md` lists, as one flat dict. It runs on rank 0 alone, after the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from dynapar.errors import ConfigError
from dynapar.train.config import RunConfig

FOLDER = "tensorboard"
"""Of the event files, in the run's folder."""


class Tracker(Protocol):
    """What follows a run."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of a step; steps ascend, and begin again after a resume."""

    def close(self) -> None:
        """Bring all of them to where they are kept."""


def step_scalars(row: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a line of `metrics.jsonl`, for a tracker.

    Numbers keep their key, those of an object have it and their own ("homogeneous/makespan"). What
    each rank measured becomes the largest and the mean over the ranks ("ranks/busy/max"), their
    speeds the least of them. Other lists, texts, the step and counts by degree are left out:
    degrees differ from step to step.

    Args:
        row: Of `StepRecord.to_json`, or read back from the file.

    >>> step_scalars({"step": 3, "loss": 0.5, "ranks": [{"busy": 1.0}, {"busy": 2.0}], "ids": []})
    {'loss': 0.5, 'ranks/busy/max': 2.0, 'ranks/busy/mean': 1.5}
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        if key in ("step", "degrees"):
            continue
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": n for name, n in _numbers(value).items()}
        elif key == "speeds" and isinstance(value, list) and value:
            found["speeds/min"] = float(min(value))
        elif key == "ranks" and isinstance(value, list):
            found |= _over_ranks([_numbers(times) for times in value])
    return _numbers(row, but=("step",)) | found


def _numbers(row: Mapping[str, object], but: tuple[str, ...] = ()) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in but
    }


def _over_ranks(rows: list[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in rows[0] if rows else ():
        values = [row[key] for row in rows if key in row]
        found[f"ranks/{key}/max"] = max(values)
        found[f"ranks/{key}/mean"] = sum(values) / len(values)
    return found


class TensorBoard:
    """Writes scalars as event files that `tensorboard --logdir FOLDER` reads."""

    def __init__(self, folder: Path, *, start: int):
        """Open a new event file in `folder`.

        Args:
            folder: Is made where it does not exist.
            start: The run's first step from here on; what earlier files say of it and of later
                steps is marked as dropped, since these steps run again.
        """
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=start)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars of a step; they are on disk when this returns."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def check_trackers(config: RunConfig) -> None:
    """Find now, on every rank alike, that a tracker of the configuration is not installed.

    Raises:
        ConfigError: TensorBoard is asked for and its package is missing.
    """
    if config.checkpoint.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError(
            "checkpoint.tensorboard is true, but the package tensorboard is not installed; "
            "expected it. Run pip install 'dynapar[tensorboard]', or set tensorboard: false"
        )


def make_trackers(config: RunConfig, *, start: int) -> list[Tracker]:
    """The trackers of a run, for rank 0; `start` is its first step."""
    if not config.checkpoint.tensorboard:
        return []
    return [TensorBoard(config.checkpoint.folder / FOLDER, start=start)]
