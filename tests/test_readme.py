"""What the README shows runs, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cli import call
from tests.train.tiny import write_run

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; "" for those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [body for name, body in found if name == language]


def test_its_python_runs() -> None:
    (code,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    *microbatches, last = done.stdout.splitlines()
    assert len(microbatches) > 1
    assert re.fullmatch(r"[\d.]+ s predicted, [\d.]+% above the lower bound", last)


def test_its_loop_trains(tmp_path: Path) -> None:
    """On one rank; the folder has the configuration that it reads."""
    planner = {"capacity": 640, "encoder_capacity": 64}  # all on one rank
    config = write_run(tmp_path, steps=2, planner=planner)
    config.rename(tmp_path / "run.yaml")
    (code,) = blocks("py")
    report = "\n        print(run.optimizer.state_dict()['state'][0]['step'].item(), result.loss)\n"
    done = subprocess.run(
        [sys.executable, "-c", code.rstrip() + report],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    steps, losses = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert steps == ("1.0", "2.0")
    assert all(float(loss) > 0 for loss in losses)


def test_its_files_exist() -> None:
    (tree,) = [block for block in blocks("") if block.startswith("packing/")]
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
        path = folder / name if line.startswith(" ") else folder
        assert path.exists(), line
    for name in re.findall(r"(?:\bdynapar|\bscripts|\battention|\bpacking|\.ci)/[\w./]*", TEXT):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    ("command", "options"),
    re.findall(r"^(?:dynapar|.* -m dynapar) ([\w-]+)(.*)$", "".join(blocks("")), re.MULTILINE),
)
def test_its_commands_have_these_options(
    command: str, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(command, "--help") == 0
    shown = capsys.readouterr().out
    assert [name for name in re.findall(r"--[\w-]+", options) if name not in shown] == []
