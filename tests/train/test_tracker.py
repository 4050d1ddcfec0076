"""What a tracker is told of a step, read back by TensorBoard itself; and docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist

from dynapar.errors import ConfigError
from dynapar.train import tracker
from dynapar.train.config import read_run_config
from dynapar.train.loop import train
from dynapar.train.metrics import METRICS, read_steps
from dynapar.train.tracker import FOLDER, check_trackers, step_scalars
from tests.train.tiny import PLANNER, write_config, write_run

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def events(folder: Path) -> dict[str, dict[int, float]]:
    """All scalars of a folder by name and step, as TensorBoard shows them: each step once."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    scalars = {name: found.Scalars(name) for name in found.Tags()["scalars"]}
    for rows in scalars.values():
        steps = [row.step for row in rows]
        assert steps == sorted(set(steps))
    return {name: {row.step: row.value for row in rows} for name, rows in scalars.items()}


def kept(steps: int) -> dict[str, Any]:
    section = {"folder": "run", "tensorboard": True}
    return {"planner": PLANNER, "steps": steps, "checkpoint": section}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps, killed after its third, whose checkpoint is not whole."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("resumed")
    train(read_run_config(write_run(folder, **kept(3))))
    dist.destroy_process_group()
    (folder / "run" / "step-00000003" / ".metadata").unlink()
    (folder / "run" / METRICS).write_text("")
    train(read_run_config(write_config(folder, **kept(4))))
    dist.destroy_process_group()
    return folder / "run"


def test_tensorboard_reads_every_step_once_also_after_a_resume(resumed: Path) -> None:
    found = events(resumed / FOLDER)
    rows = read_steps(resumed / METRICS)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        scalars = step_scalars(row)
        assert set(found) == set(scalars)
        for name, value in scalars.items():
            assert found[name][cast(int, row["step"])] == pytest.approx(value, rel=1e-6), name
    assert set(found["loss"]) == {0, 1, 2, 3}


def keys(row: Mapping[str, object]) -> set[str]:
    """The keys of a line, as docs/metrics.md writes them."""
    found = set()
    for key, value in row.items():
        if isinstance(value, Mapping) and key != "degrees":
            found |= {f"{key}.{inner}" for inner in value}
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            found |= {f"{key}[].{inner}" for part in value for inner in part}
        else:
            found.add(key)
    return found


def section(title: str) -> str:
    (body,) = [part for part in PAGE.split("\n## ")[1:] if part.startswith(title)]
    return body


def first_column(title: str) -> list[str]:
    """What the tables of a section list."""
    cells = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    return [name for cell in cells for name in re.findall("`(.*?)`", cell)]


def test_the_page_lists_the_keys_of_a_line(resumed: Path) -> None:
    listed = first_column("A line of metrics.jsonl")
    assert len(set(listed)) == len(listed)
    for row in read_steps(resumed / METRICS):
        assert keys(row) == set(listed)


def test_the_page_lists_the_scalars(resumed: Path) -> None:
    listed = first_column("The same for a tracker")
    assert len(set(listed)) == len(listed)
    for row in read_steps(resumed / METRICS):
        assert set(step_scalars(row)) == set(listed)


def test_the_page_names_the_files_of_a_run(resumed: Path) -> None:
    listed = re.findall(r"^\| (`.*?) \|", PAGE.split("\n## ")[0], re.MULTILINE)
    names = [name for cell in listed for name in re.findall("`(.*?)`", cell)]
    patterns = [name.rstrip("/").replace("RANK", "*") for name in names]
    for path in resumed.iterdir():
        assert any(path.match(pattern) for pattern in patterns), path


@pytest.mark.usefixtures("alone")
def test_the_pages_tracker_follows_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    config = write_run(tmp_path, planner=PLANNER, steps=2)
    exec(compile(code, "metrics.md", "exec"), {"CONFIG": config})
    rows = read_steps(tmp_path / "run" / METRICS)
    said = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\d+ \{", line)]
    assert said == [
        f"{row['step']} { {name: round(value, 4) for name, value in step_scalars(row).items()} }"
        for row in rows
    ]
    assert not (tmp_path / "run" / FOLDER).exists()


def test_trackers_are_closed_and_run_beside_each_other(tmp_path: Path, alone: None) -> None:
    class Kept:
        steps: ClassVar[list[int]] = []
        closed: ClassVar[list[bool]] = []

        def log(self, step: int, scalars: Mapping[str, float]) -> None:
            assert not self.closed
            self.steps.append(step)

        def close(self) -> None:
            self.closed.append(True)

    train(read_run_config(write_run(tmp_path, **kept(2))), trackers=[Kept()])
    assert Kept.steps == [0, 1]
    assert Kept.closed == [True]
    assert set(events(tmp_path / "run" / FOLDER)["loss"]) == {0, 1}


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
        "speeds": [1.0, 0.5],
        "degrees": {"1": 5, "2": 1},
        "costs": {"name": "own", "measured": True},
        "homogeneous": {"degree": 2, "makespan": 0.5},
        "ranks": [{"busy": 1.0, "microbatches": (1.0,)}, {"busy": 3.0, "microbatches": ()}],
    }
    assert step_scalars(row) == {
        "loss": 2.0,
        "homogeneous/degree": 2.0,
        "homogeneous/makespan": 0.5,
        "speeds/min": 0.5,
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
