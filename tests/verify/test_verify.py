"""`dynapar verify` passes on a right run of text, images and video, and fails on a wrong one."""

from __future__ import annotations

import json
import re
from math import inf
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from dynapar.catalog import load_model_shape
from dynapar.cli import main
from dynapar.data.index import build_index
from dynapar.data.sources import open_source
from dynapar.errors import CheckFailedError, ConfigError, PlanError
from dynapar.train.config import read_run_config
from dynapar.verify import command, run, verify_command
from dynapar.verify.findings import Findings
from dynapar.verify.run import Job, RankOutcome, check_rank, judge, make_job, switch_off_dropout
from dynapar.verify.spawn import run_on_ranks
from tests.data.small import write_lines
from tests.verify.faults import FAULTS
from tests.verify.small_run import write_small_run


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("small"))


def change(config: Path, **changes: object) -> Path:
    """The same run, other settings."""
    values = yaml.safe_load(config.read_text())
    path = config.with_name(f"changed_{len(list(config.parent.iterdir()))}.yaml")
    path.write_text(yaml.safe_dump({**values, **changes}))
    return path


def test_a_right_run_passes(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify_command(small_run, dtype=None, json=False)
    out, err = capsys.readouterr()
    assert out.splitlines()[0].strip() == "float32: planned layouts against one process"
    assert "compared: 1 global batches (5 image, 5 text, 2 video; " in out
    assert "of loss, whole gradient and each parameter" in out
    assert "dropout: none" in out
    assert "operations replayed, none blocks" in out
    assert out.splitlines()[-1] == "passed"
    assert "verify: step 0: 12 samples in one process" in err
    assert "verify: no costs are given" in err


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("bf16", 1.5)])
def test_other_precisions(
    small_run: Path, capsys: pytest.CaptureFixture[str], dtype: str, tolerance: float
) -> None:
    verify_command(small_run, dtype=dtype, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["order"] == "holds"
    assert found["tolerance"] == tolerance
    assert found["batches"][0]["samples"] == {"image": 5, "text": 5, "video": 2}
    assert [plan["plan"] for plan in found["plans"]] == ["planned"] + [
        f"random {number}" for number in (1, 2, 3)
    ]
    degrees = {degree for plan in found["plans"] for degree in plan["degrees"]}
    assert degrees == {"1", "2", "3", "4"}
    for plan in found["plans"]:
        assert sum(plan["degrees"].values()) == 12
        if dtype == "float64":
            assert plan["one_process"] is None
            assert plan["worst"] < 1e-12
        else:
            assert 1e-3 < plan["one_process"] < 0.1
            assert plan["gradient"] <= 1.5 * plan["one_process"]


def check_faults(rank: int, job: Job) -> dict[str, RankOutcome]:
    found = {"nothing": check_rank(rank, job)}
    for name, plant in FAULTS.items():
        with plant():
            found[name] = check_rank(rank, job)
    return found


@pytest.fixture(scope="module")
def findings(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Findings]:
    """With each fault, on the same ranks."""
    job = make_job(read_run_config(small_run), tmp_path_factory.mktemp("references"))
    outcomes = run_on_ranks(check_faults, job, ranks=4)
    return {name: judge(job, [found[name] for found in outcomes]) for name in outcomes[0]}


def test_nothing_planted_passes(findings: dict[str, Findings]) -> None:
    assert findings["nothing"].passed(1e-5)


@pytest.mark.parametrize("fault", [name for name in FAULTS if not name.startswith("reduced")])
def test_a_planted_fault_fails(fault: str, findings: dict[str, Findings]) -> None:
    found = findings[fault]
    assert not found.passed(1e-5)
    assert not found.order
    worst = max(finding.score for finding in found.trials)
    assert 1e-2 < worst < inf, "far above rounding, and a number"


def test_a_reduction_before_the_last_exchange_fails(findings: dict[str, Findings]) -> None:
    found = findings["reduced_in_the_last_microbatch"]
    assert all(finding.score < 1e-5 for finding in found.trials), "gloo forgives it"
    assert "wait for each other under NCCL's order" in found.order
    assert not found.passed(1e-5)


def test_the_command_exits_1(
    small_run: Path,
    findings: dict[str, Findings],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = findings["labels_shifted_after_the_cut"]
    monkeypatch.setattr(command, "compare", lambda config: found)
    with pytest.raises(SystemExit) as stopped:
        main(["verify", str(small_run)])
    assert stopped.value.code == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "FAILED"
    assert re.search(r"[1-4] of 4 plans are above the tolerance of 1e-05: step 0, ", err)
    found = findings["reduced_in_the_last_microbatch"]
    with pytest.raises(CheckFailedError, match="the order of communication does not hold: ranks"):
        verify_command(small_run, dtype=None, json=True)
    assert not json.loads(capsys.readouterr().out)["passed"]


def test_an_unreadable_image_is_a_stub_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_small_run(tmp_path, verify={"steps": 1, "plans": 1})
    picture = tmp_path / "data" / "media" / "2.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    verify_command(config, dtype=None, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    (reason,) = found["batches"][0]["stubs"]
    assert "2.png" in reason


def test_a_tolerance_of_the_run_counts_for_its_own_precision(
    small_run: Path, findings: dict[str, Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "compare", lambda config: findings["nothing"])
    config = change(small_run, verify={"tolerance": 1e-20})
    with pytest.raises(CheckFailedError, match="4 of 4 plans are above the tolerance of 1e-20"):
        verify_command(config, dtype=None, json=True)
    verify_command(config, dtype="bf16", json=True)


def test_a_batch_without_targets_fails(tmp_path: Path) -> None:
    config = write_small_run(tmp_path)
    asked = [{"role": "user", "content": "say it"}]
    source = write_lines(tmp_path / "data" / "q.jsonl", [{"messages": asked}, {"messages": asked}])
    index = tmp_path / "q.parquet"
    build_index(open_source(str(source)), load_model_shape(str(tmp_path / "model")), index)
    config = change(config, source=str(source), index=str(index), batch={"samples": 2})
    with pytest.raises(CheckFailedError, match=r"nothing to compare: the 2 samples .* 0 targets;"):
        verify_command(config, dtype=None, json=False)


def test_a_gradient_of_zeros_fails(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(model: nn.Module) -> dict[str, torch.Tensor]:
        return {"a": torch.zeros(2)}

    monkeypatch.setattr(run, "gradients", zeros)
    with pytest.raises(CheckFailedError, match="gradient of step 0 is zero in all 1 parameters"):
        verify_command(small_run, dtype=None, json=False)


def test_a_sample_that_fits_no_rank_is_named_before_anything_runs(
    small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = change(small_run, planner={"capacity": 10, "encoder_capacity": 300})
    with pytest.raises(PlanError, match="sample"):
        verify_command(config, dtype=None, json=False)
    assert "in one process" not in capsys.readouterr().err


def test_an_unknown_dtype_is_refused(small_run: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'fp8'; expected one of float32, float64"):
        verify_command(small_run, dtype="fp8", json=False)


def test_dropout_is_switched_off_wherever_it_is() -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    inner.attention_dropout = 0.2  # type: ignore[assignment]
    model = nn.Sequential(inner, nn.Dropout(0.0))
    assert sorted(switch_off_dropout(model)) == ["0", "0.1"]
    assert switch_off_dropout(model) == ()
    assert torch.equal(inner[1](torch.ones(99)), torch.ones(99))
