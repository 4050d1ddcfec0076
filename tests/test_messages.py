"""What a user sees of bad input to `dynapar index` and `dynapar plan`: one line with the remedy.

Mistakes in a training run are in `tests/train/test_run.py`, those in a configuration in
`tests/test_config.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_cli import call, failed
from tests.train.tiny import write_model, write_source

PLAN = ("--cluster", "1x4", "--capacity", "1000", "--encoder-capacity", "4000")


def metadata(tmp_path: Path, *lengths: int) -> Path:
    path = tmp_path / "meta.jsonl"
    rows = [{"id": f"a{place}", "text_tokens": tokens} for place, tokens in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_sample_longer_than_all_ranks_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = metadata(tmp_path, 10, 4001)
    line = failed(capsys, 2, "plan", source, *PLAN, "--global-batch", "2")
    assert "'a1'" in line
    assert "4,001 tokens" in line
    assert "Raise capacity" in line


def test_more_ranks_than_samples_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = metadata(tmp_path, 10), tmp_path / "plans.jsonl"
    arguments = ("plan", source, *PLAN, "--global-batch", "1", "--out", out, "--json")
    assert call(*arguments, "--max-degree", "1") == 0
    (row,) = json.loads(capsys.readouterr().out)["steps"]
    assert row["samples"] == 1
    assert sum(not queue for queue in json.loads(out.read_text())["queues"]) == 3
    assert call("plan", "--check", out) == 0
    assert capsys.readouterr().out == f"{out}: 1 plan, all valid\n"


def test_a_plan_that_was_tampered_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plans.jsonl"
    source = metadata(tmp_path, 10, 20)
    assert call("plan", source, *PLAN, "--global-batch", "2", "--out", out) == 0
    capsys.readouterr()
    plan = json.loads(out.read_text())
    plan["makespan"] *= 2
    out.write_text(json.dumps(plan) + "\n")
    assert f"{out}, line 1" in failed(capsys, 1, "plan", "--check", out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no samples"),
        ("{", "line 1"),
        ('{"id": "a", "text_tokens": 0}\n', "line 1"),
        ('{"id": "a", "text_tokens": 5}\n{"id": "a", "text_tokens": 6}\n', "'a' stands 2 times"),
        ('{"id": "a", "messages": []}\n', "dynapar index"),
    ],
)
def test_a_bad_metadata_file(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "meta.jsonl"
    source.write_text(content)
    line = failed(capsys, 2, "plan", source, *PLAN, "--global-batch", "2")
    assert str(source) in line
    assert message in line


def test_a_source_without_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model")
    source = tmp_path / "empty.jsonl"
    source.write_text("\n")
    line = failed(capsys, 2, "index", source, "--model", model, "--out", tmp_path / "x.parquet")
    assert str(source) in line
    assert "no samples" in line
    assert not (tmp_path / "x.parquet").exists()


def test_an_unreadable_image_is_named_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model")
    source = write_source(tmp_path / "data", samples=4)
    image = tmp_path / "data" / "3.png"
    image.write_bytes(image.read_bytes()[:20])
    arguments = ("index", source, "--model", model, "--out", tmp_path / "x.parquet")
    line = failed(capsys, 2, *arguments)
    assert "3.png" in line
    assert call(*arguments, "--skip-bad", "--json") == 0
    captured = capsys.readouterr()
    assert "left out: " in captured.err
    assert "3.png" in captured.err
    found = json.loads(captured.out)
    assert found["samples"] == 3
    assert found["kinds"] == {"image": 1, "text": 2}


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone.jsonl"
    assert str(gone) in failed(capsys, 2, "plan", gone, *PLAN, "--global-batch", "2")
    assert "gone.jsonl" in failed(capsys, 2, "plan", "--check", gone)
    out = tmp_path / "no" / "plans.jsonl"
    line = failed(
        capsys, 2, "plan", metadata(tmp_path, 9), *PLAN, "--global-batch", "1", "--out", out
    )
    assert "No such file or directory" in line
    assert str(out) in line
