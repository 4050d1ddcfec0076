"""`scripts/gpu_check`, on the CPU's kernels, and on kernels that are made to be wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dynapar.attention import kernels_cuda, merge
from dynapar.attention.kernels import KERNELS
from dynapar.attention.kernels_cpu import CpuFlash
from dynapar.bench import device_check, device_report
from dynapar.bench.device_check import (
    RATIO,
    Check,
    checks,
    rows_without_keys,
    run,
    run_all,
    unusable,
)
from tests.attention.fake_cuda_ops import FakeOps

ROOT = Path(__file__).parents[2]
BASE = Check(kernel="cpu_flash", dtype=torch.float32)


def test_all_kernels_of_a_cpu_are_checked_and_others_say_why_not() -> None:
    planned = list(checks("cpu"))
    assert {check.kernel for check in planned} == {"cpu_flash", "math"}
    assert {check.degree for check in planned} == {1, 3, 4}
    assert {check.kernel for check in planned if check.softcap} == {"math"}
    schemes = {(check.degree, check.scheme) for check in planned}
    assert schemes >= {(4, "auto"), (3, "ulysses"), (4, "ulysses"), (4, "hybrid")}
    # So that each ring in bfloat16 is held to a rank alone.
    assert all(check.alone in planned[: n + 1] for n, check in enumerate(planned))
    assert unusable("cpu") == dict.fromkeys(
        ("flash_attn_2", "cuda_flash"), "it runs on CUDA, not on cpu"
    )


@pytest.mark.parametrize(
    "check",
    [
        BASE,
        replace(BASE, mask="pictures", degree=4, dtype=torch.float64),
        replace(BASE, degree=3, scheme="ulysses"),
        replace(BASE, mask="pictures", degree=4, scheme="hybrid"),
        replace(BASE, heads=(7, 1, 128), degree=4, scheme="hybrid"),
        replace(BASE, degree=4, stages=1, dtype=torch.bfloat16),
        replace(BASE, kernel="math", softcap=5.0, degree=3),
    ],
    ids=lambda check: check.name,
)
def test_a_right_kernel_is_within_its_limit(check: Check) -> None:
    found = run(check, "cpu")
    assert found.right
    assert len(found.errors) == 4


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = CpuFlash.backward

    def wrong(*args: object, **keywords: object) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = backward(*args, **keywords)  # type: ignore[arg-type]
        return dq, dk * 1.001, dv

    monkeypatch.setattr(CpuFlash, "backward", wrong)
    out, dq, dk, dv = run(BASE, "cpu").errors
    assert max(out, dq, dv) < 5e-6 < dk
    assert not run(BASE, "cpu").right


def test_a_ring_that_is_a_little_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the limit for bfloat16, and not within 1.5 times the error of a rank alone."""
    low = replace(BASE, dtype=torch.bfloat16)
    alone, right = run_all([low, replace(low, degree=4)], "cpu")
    assert alone.ratio is None
    assert right.ratio is not None
    assert right.ratio < 1.1
    merge_ = merge.merge_

    def off(out: Tensor, *args: Tensor) -> None:
        merge_(out, *args)
        out.mul_(1.002)

    monkeypatch.setattr(merge, "merge_", off)
    _, wrong = run_all([low, replace(low, degree=4)], "cpu")
    assert wrong.ratio is not None
    assert wrong.ratio > RATIO
    assert max(wrong.errors) < wrong.limit
    assert not wrong.right


def test_what_a_kernel_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **keywords: object) -> None:
        raise RuntimeError("no such launch\nmore of it")

    monkeypatch.setattr(CpuFlash, "forward", broken)
    found = run(BASE, "cpu")
    assert found.failed == "RuntimeError: no such launch"
    assert not found.right


def test_rows_without_keys_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_cuda, "_forward", FakeOps("2.13").forward)
    assert rows_without_keys("cuda_flash", "cpu", torch.float32) == -float("inf")


def test_the_report_names_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [BASE, replace(BASE, kernel="math")]
    monkeypatch.setattr(device_report, "checks", lambda device: iter(few))
    monkeypatch.setattr(device_report, "SIZES", {"cpu": ((40,),)})
    assert device_report.report("cpu")
    said = capsys.readouterr().out
    assert "flash_attn_2 is left out: it runs on CUDA, not on cpu" in said
    assert "2 of 2 checks are right" in said
    assert "1 of 40" in said
    monkeypatch.setitem(device_check.LIMITS, torch.float32, 1e-12)
    assert not device_report.report("cpu")
    assert "WRONG math torch.float32 causal, degree 1, heads 8:2:64: " in capsys.readouterr().out
    assert not device_report.report("cpu", budget=0.0)
    assert "2 of 2 checks were left out" in capsys.readouterr().out
    assert "math" in KERNELS


def test_a_machine_without_a_gpu_is_told_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"torch {torch.__version__} finds no CUDA device: nothing was checked\n"
