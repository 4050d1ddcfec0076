"""What a tracker is told of a step, read back by TensorBoard itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from dynapar.errors import ConfigError
from dynapar.train import tracker
from dynapar.train.config import read_run_config
from dynapar.train.loop import train
from dynapar.train.metrics import METRICS, read_steps
from dynapar.train.tracker import FOLDER, check_trackers, step_scalars
from tests.train.tiny import PLANNER, write_config, write_run


def events(folder: Path) -> dict[str, dict[int, float]]:
    """All scalars of a folder by name and step, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        name: {event.step: event.value for event in found.Scalars(name)}
        for name in found.Tags()["scalars"]
    }


def kept(steps: int) -> dict[str, Any]:
    section = {"folder": "run", "tensorboard": True}
    return {"planner": PLANNER, "steps": steps, "checkpoint": section}


@pytest.mark.usefixtures("alone")
def test_tensorboard_reads_every_step_once_also_after_a_resume(tmp_path: Path) -> None:
    train(read_run_config(write_run(tmp_path, **kept(3))))
    dist.destroy_process_group()
    # The run was killed after its third step, whose checkpoint is not complete.
    (tmp_path / "run" / "step-00000003" / ".metadata").unlink()
    (tmp_path / "run" / METRICS).write_text("")
    train(read_run_config(write_config(tmp_path, **kept(4))))
    found = events(tmp_path / "run" / FOLDER)
    rows = read_steps(tmp_path / "run" / METRICS)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        scalars = step_scalars(row)
        assert set(found) == set(scalars)
        for name, value in scalars.items():
            assert found[name][cast(int, row["step"])] == pytest.approx(value, rel=1e-6), name
    assert set(found["loss"]) == {0, 1, 2, 3}


@pytest.mark.usefixtures("alone")
def test_no_event_file_without_the_key(tmp_path: Path) -> None:
    train(read_run_config(write_run(tmp_path, planner=PLANNER, steps=1)))
    assert not (tmp_path / "run" / FOLDER).exists()


def test_the_scalars_of_a_step() -> None:
    row: Mapping[str, object] = {
        "step": 7,
        "loss": 2,
        "chosen": "dynamic",
        "frozen": True,
        "nothing": None,
        "degrees": {"1": 5, "2": 1},
        "costs": {"name": "own", "measured": True},
        "homogeneous": {"degree": 2, "makespan": 0.5},
        "ranks": [{"busy": 1.0, "microbatches": (1.0,)}, {"busy": 3.0, "microbatches": ()}],
    }
    assert step_scalars(row) == {
        "loss": 2.0,
        "homogeneous/degree": 2.0,
        "homogeneous/makespan": 0.5,
        "ranks/busy/max": 3.0,
        "ranks/busy/mean": 2.0,
    }


def test_a_missing_package_is_named_before_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_run_config(write_config(tmp_path, **kept(1)))
    check_trackers(config)
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_trackers(config)
    assert str(caught.value) == (
        "checkpoint.tensorboard is true, but the package tensorboard is not installed; expected "
        "it. Run pip install 'dynapar[tensorboard]', or set tensorboard: false"
    )
    check_trackers(read_run_config(write_config(tmp_path)))
