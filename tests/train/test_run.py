"""What a run says before its first step, and the one line by which it refuses to start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from dynapar.cli import main
from dynapar.train.config import read_run_config
from dynapar.train.loop import train
from dynapar.train.metrics import METRICS
from tests.train.tiny import PLANNER, write_config, write_model, write_run, write_source


def refused(config: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line by which `dynapar train` refuses a configuration."""
    with pytest.raises(SystemExit) as exit_info:
        main(["train", str(config)])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("folder", ["taken", "taken/run"])
def test_a_checkpoint_folder_that_is_a_file_is_named(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, planner=PLANNER, checkpoint={"folder": folder})
    (tmp_path / "taken").write_text("")
    assert f"checkpoint.folder is '{tmp_path / folder}', where no folder" in refused(config, capsys)


@pytest.mark.usefixtures("alone")
def test_a_run_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path, planner=PLANNER, steps=1)
    train(read_run_config(config))
    text = capsys.readouterr().out
    for part in (
        "ranks: 1, 1 x 1 (gloo, cpu; for more: torchrun --nproc-per-node",
        "parameters",
        "float32, dropout off",
        "costs h100_7b (reference, not measured here",
        "attention: no rings, each sample is on one rank",
        "starts at step 1 of 1; folder",
        "degrees 1x6  gap",
        "s (reference costs)  measured",
    ):
        assert part in text, text
    assert "no target" not in text


def test_an_unknown_key_is_answered_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, planner={**PLANNER, "max_degre": 2})
    assert "has no key 'max_degre'; the nearest is 'max_degree'" in refused(config, capsys)


@pytest.mark.usefixtures("alone")
def test_an_index_of_other_settings_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, planner=PLANNER)
    pixels = tmp_path / "model" / "preprocessor_config.json"
    pixels.write_text(pixels.read_text().replace("4096", "2048"))
    error = refused(config, capsys)
    assert "index.parquet" in error
    assert "max_pixels" in error


@pytest.mark.usefixtures("alone")
def test_a_source_that_changed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, planner=PLANNER)
    write_source(tmp_path / "data", samples=21)
    assert "index.parquet" in refused(config, capsys)


@pytest.mark.usefixtures("alone")
def test_a_sample_that_no_rank_holds_is_named_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path)
    error = refused(config, capsys)
    assert "1 rank x capacity 160 hold 160. Raise capacity" in error
    assert not (tmp_path / "run" / METRICS).exists()


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(read_run_config(write_run(tmp_path, planner=PLANNER, steps=1)))
    dist.destroy_process_group()
    capsys.readouterr()
    for changes, message in (
        ({"seed": 3}, "its seed is 0, the configuration's is 3"),
        ({"batch": {"samples": 5}}, "its batch.samples is 6, the configuration's is 5"),
        ({"precision": "float64"}, "its precision is 'float32', the configuration's is 'float64'"),
        ({"model": "other"}, "its model is"),
    ):
        if changes.get("model"):
            write_model(tmp_path / "other", hidden_act="gelu")
        config = write_config(tmp_path, "other.yaml", planner=PLANNER, **changes)
        assert message in refused(config, capsys)
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_damaged_checkpoint_is_not_resumed_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(read_run_config(write_run(tmp_path, planner=PLANNER, steps=1)))
    dist.destroy_process_group()
    capsys.readouterr()
    shard = tmp_path / "run" / "step-00000001" / "__0_0.distcp"
    content = shard.read_bytes()
    middle = len(content) // 2
    shard.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    error = refused(write_config(tmp_path, planner=PLANNER, steps=2), capsys)
    assert "its file __0_0.distcp has CRC-32" in error
    assert "Delete its directory" in error
