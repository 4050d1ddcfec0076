"""Whole runs: in one process, and on real ranks, one of which may be killed."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dynapar.costs import load_costs
from dynapar.data.index import read_index
from dynapar.errors import CheckFailedError, SampleError
from dynapar.plan import plan_from_json, validate
from dynapar.runtime.order import OrderLog, replay
from dynapar.train.config import read_run_config
from dynapar.train.loop import train
from dynapar.train.metrics import METRICS, PLANS, read_steps
from dynapar.train.setup import make_planner
from tests.distributed import run_ranks
from tests.train.tiny import PLANNER, write_config, write_run

Killed = tuple[Path, "subprocess.CompletedProcess[str]"]

STEPS = 5
KEPT = {"folder": "run", "every": 2}


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile the planner here: a rank that does may outlast its peers' patience."""
    config = read_run_config(write_run(tmp_path_factory.mktemp("compiled")))
    table = read_index(config.index).table
    make_planner(config, costs=load_costs(None), ranks=4)(table, 0)


def check_train(rank: int, config: Path) -> None:
    train(read_run_config(config))


def rows(config: Path) -> list[Any]:
    return list(read_steps(read_run_config(config).checkpoint.folder / METRICS))


def check_order(folder: Path, ranks: int) -> None:
    logs = [OrderLog.load(path) for path in sorted(folder.glob("order_*.jsonl"))]
    assert len(logs) == ranks
    assert any(op.operation == "gradients" for op in logs[0].operations)
    replay(logs)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run on four ranks that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    config = write_run(folder, steps=STEPS, checkpoint=KEPT)
    run_ranks(check_train, 4, folder, config)
    return config


def test_a_run_says_what_each_step_did(unbroken: Path) -> None:
    folder = unbroken.parent / "run"
    steps = rows(unbroken)
    assert [row["step"] for row in steps] == list(range(STEPS))
    for row, line in zip(steps, (folder / PLANS).read_text().splitlines(), strict=True):
        plan = plan_from_json(json.loads(line))
        validate(plan)
        assert row["ids"] == list(plan.samples.ids)
        assert row["tokens"] == plan.samples.llm_tokens.sum()
        assert row["targets"] == row["planned_targets"] == plan.samples.label_tokens.sum()
        assert sum(row["degrees"].values()) == len(plan.samples)
        assert row["gap"] == pytest.approx(row["makespan"] / row["lower_bound"] - 1)
        assert row["costs"] == {"name": "h100_7b", "measured": False}
        for times, queue in zip(row["ranks"], plan.queues, strict=True):
            assert len(times["microbatches"]) == len(queue)
            assert sum(times["microbatches"]) <= times["step"]
            assert times["busy"] > 0
    degrees = {degree for row in steps for degree in row["degrees"]}
    assert len(degrees) > 1, "the layouts of this run should change"
    check_order(folder, 4)


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Killed:
    """The same run under torchrun, whose rank 1 is killed after its third step."""
    folder = tmp_path_factory.mktemp("killed")
    config = write_run(folder, steps=STEPS, checkpoint=KEPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, "-m", "tests.train.killed", str(config), "1", "3"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    return config, done


def test_the_peers_of_a_killed_rank_end_at_once_and_say_so(
    killed: Killed,
) -> None:
    config, done = killed
    assert done.returncode == 1
    assert "step 3/5" in done.stdout
    assert "step 4/5" not in done.stdout
    assert "Signal 9 (SIGKILL)" in done.stderr
    # Torchrun's own traceback is the only one.
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert [row["step"] for row in rows(config)] in ([0, 1], [0, 1, 2])


@pytest.mark.parametrize("ranks", [4, 3])
def test_a_killed_run_goes_on_exactly(
    ranks: int,
    unbroken: Path,
    killed: Killed,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(killed[0].parent, folder)
    config = folder / killed[0].name
    run_ranks(check_train, ranks, tmp_path, config)
    want, got = rows(unbroken), rows(config)
    assert [row["ids"] for row in got] == [row["ids"] for row in want]
    assert [len(row["ranks"]) for row in got] == [4, 4, ranks, ranks, ranks]
    losses, expected = [row["loss"] for row in got], [row["loss"] for row in want]
    if ranks == 4:
        assert losses == expected
    else:
        assert losses == pytest.approx(expected, rel=1e-4)
    check_order(folder / "run", ranks)


def test_more_ranks_than_samples_train_on_a_fixed_batch(tmp_path: Path) -> None:
    config = write_run(
        tmp_path,
        samples=2,
        batch={"samples": 2},
        planner={"capacity": 400, "encoder_capacity": 64, "max_degree": 1},
        steps=8,
    )
    run_ranks(check_train, 4, tmp_path, config)
    steps = rows(config)
    for row in steps:
        assert sorted(row["ids"]) == ["s0", "s1"]
        assert sorted(map(len, row["queues"])) == [0, 0, 1, 1]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    check_order(tmp_path / "run", 4)


@pytest.mark.usefixtures("alone")
def test_a_run_that_was_cut_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_run(tmp_path, planner=PLANNER, checkpoint={"folder": "whole"})
    train(read_run_config(whole))
    dist.destroy_process_group()
    assert "starts at step 1 of 4" in capsys.readouterr().out
    for steps in (1, 3, 4):
        cut = write_config(
            tmp_path, "cut.yaml", planner=PLANNER, checkpoint={"folder": "cut"}, steps=steps
        )
        train(read_run_config(cut))
        dist.destroy_process_group()
    text = capsys.readouterr().out
    assert f"resumes at step 4 of 4 from {tmp_path / 'cut' / 'step-00000003'}" in text
    for key in ("ids", "loss", "gradient_norm", "targets", "plan_digest"):
        assert [row[key] for row in rows(cut)] == [row[key] for row in rows(whole)], key


@pytest.mark.usefixtures("alone")
def test_a_finished_run_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    train(read_run_config(write_run(tmp_path, planner=PLANNER, steps=2)))
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert folder / "order_0.jsonl" in files
    for steps, message in (
        (2, f"run: finished: 2 of 2 steps ({folder / 'step-00000002'}). Raise steps"),
        (1, "run: finished: 2 steps are done"),
    ):
        dist.destroy_process_group()
        capsys.readouterr()
        train(read_run_config(write_config(tmp_path, planner=PLANNER, steps=steps)))
        text = capsys.readouterr().out
        assert message in text
        assert "resumes" not in text
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    assert "more than steps: 1. Nothing is left to run: set steps above 2" in text


def gradients_of_a_step(config: Path) -> list[torch.Tensor]:
    """What the optimizer is stepped with, in a run of one step."""
    seen: list[torch.Tensor] = []

    def look(optimizer: torch.optim.Optimizer, args: object, options: object) -> None:
        for group in optimizer.param_groups:
            seen.extend(p.grad.double() for p in group["params"] if p.grad is not None)

    handle = register_optimizer_step_pre_hook(look)
    train(read_run_config(config))
    handle.remove()
    return seen


@pytest.mark.usefixtures("alone")
def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    limit = 1e-3
    found = {}
    write_run(tmp_path)
    for name, clip_norm in (("free", None), ("tiny", limit)):
        config = write_config(
            tmp_path,
            f"{name}.yaml",
            planner=PLANNER,
            steps=1,
            optimizer={"lr": 1e-2, "clip_norm": clip_norm},
            checkpoint={"folder": name},
        )
        found[name] = gradients_of_a_step(config)
        dist.destroy_process_group()
        norm = math.sqrt(sum(float(g.square().sum()) for g in found["free"]))
        assert norm > 100 * limit
        assert rows(config)[0]["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    for free, tiny in zip(found["free"], found["tiny"], strict=True):
        torch.testing.assert_close(tiny, free * (limit / norm), rtol=1e-4, atol=1e-12)


@pytest.mark.usefixtures("alone")
def test_a_step_without_a_target_is_said_and_steps_no_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, samples=1, planner=PLANNER, steps=1, batch={"samples": 1})
    (tmp_path / "data" / "0.png").unlink()
    assert gradients_of_a_step(config) == []
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("step 1 has no target: the optimizer was not stepped") == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"precision": "float64"}, 1e-5),
        ({"precision": "bfloat16"}, 3e-2),
        ({"recompute": True}, 0.0),
        ({"loss_chunk": 7}, 1e-6),
    ],
    ids=str,
)
def test_precisions_and_recomputation_train_alike(
    changes: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    plain = write_run(tmp_path, planner=PLANNER, steps=2, checkpoint={"folder": "plain"})
    train(read_run_config(plain))
    dist.destroy_process_group()
    other = write_config(
        tmp_path, "other.yaml", planner=PLANNER, steps=2, checkpoint={"folder": "other"}, **changes
    )
    train(read_run_config(other))
    losses = [row["loss"] for row in rows(other)]
    assert losses == pytest.approx([row["loss"] for row in rows(plain)], rel=tolerance, abs=0)
    assert changes.get("precision") != "float64" or losses != [row["loss"] for row in rows(plain)]


@pytest.mark.usefixtures("alone")
def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    config = write_run(tmp_path, planner=PLANNER, optimizer={"lr": 1e30}, steps=3)
    with pytest.raises(CheckFailedError, match=r"step 2: the loss is .*expected finite"):
        train(read_run_config(config))
    assert [math.isfinite(row["loss"]) for row in rows(config)] == [True]


@pytest.mark.usefixtures("alone")
def test_a_picture_that_cannot_be_read_is_said_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, planner=PLANNER, steps=1, batch={"samples": 20})
    (tmp_path / "data" / "3.png").unlink()
    train(read_run_config(config))
    (row,) = rows(config)
    assert row["targets"] < row["planned_targets"]
    assert "(stubs: s3)" in capsys.readouterr().out
    (quarantined,) = read_steps(tmp_path / "run" / "quarantine.jsonl")
    assert quarantined["id"] == "s3"


@pytest.mark.usefixtures("alone")
def test_lost_samples_count_through_a_resume(tmp_path: Path) -> None:
    """One of six samples a step: 2 of 12 are just within the limit, 3 of 18 are not."""
    batch = {"samples": 6, "stub_limit": 0.12}
    config = write_run(tmp_path, samples=6, planner=PLANNER, batch=batch, steps=2)
    (tmp_path / "data" / "3.png").unlink()
    train(read_run_config(config))
    dist.destroy_process_group()
    config = write_config(tmp_path, planner=PLANNER, batch=batch, steps=4)
    with pytest.raises(SampleError, match=r"3 of 18 samples .* most 12% .* The last is 's3': "):
        train(read_run_config(config))
    assert len(rows(config)) == 2
