"""The doctor's own runs, and that they notice what is wrong."""

from __future__ import annotations

import pytest
import torch

from dynapar.attention.api import attend
from dynapar.attention.exchange import Transport
from dynapar.doctor import ring
from dynapar.doctor.selfcheck import PlannedTwice, check_attention, check_planner, plan_twice


def test_two_real_ranks_agree_with_dense_attention() -> None:
    errors = ring.measure()
    assert set(errors) == {"float64", "float32"}
    row = check_attention(errors, check="attention at degree 2", who="two gloo ranks")
    assert row.status == "ok", row
    assert row.found.startswith("two gloo ranks and dense float64 attention, forward and backward:")
    assert all(error > 0 for error in errors.values())


@pytest.mark.parametrize("dtype", ring.TOLERANCE)
def test_one_device_agrees_in_every_dtype(dtype: str) -> None:
    error = ring.compare(Transport(), degree=1, dtype=dtype)
    assert error <= ring.TOLERANCE[dtype]
    if dtype == "bfloat16":
        assert error > 1e-4


def test_attention_that_is_slightly_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: object) -> torch.Tensor:
        return attend(q, k, v + 1e-4 * v.mean(0), plan)  # type: ignore[arg-type]

    monkeypatch.setattr(ring, "attend", leaking)
    error = ring.compare(Transport(), degree=1, dtype="float32")
    row = check_attention({"float32": error}, check="attention on a GPU", who="the first GPU")
    assert row.status == "fail"
    assert row.found.endswith("in float32 apart; expected at most 5e-06 in float32")
    nan = check_attention({"float64": float("nan")}, check="attention", who="two gloo ranks")
    assert nan.status == "fail"


def test_the_planner_is_asked_twice() -> None:
    found = plan_twice()
    row = check_planner(found)
    assert row.status == "ok", row
    assert row.found.endswith(f"ms; digest {found.digests[0][:16]}")


def test_a_planner_that_changes_its_mind_fails() -> None:
    row = check_planner(PlannedTwice(("a" * 64, "b" * 64), (0.5, 0.001)))
    assert row.status == "fail"
    assert row.found == (
        "planned the same step twice, with digests aaaaaaaaaaaaaaaa and bbbbbbbbbbbbbbbb; expected "
        "one"
    )


def test_a_planner_that_is_not_compiled_is_slow() -> None:
    row = check_planner(PlannedTwice(("a" * 64, "a" * 64), (70.0, 2.5)))
    assert row.status == "warn"
    assert row.found == (
        "a step of 64 samples in 70 s (compiled now), then in 2.5e+03 ms; digest "
        "aaaaaaaaaaaaaaaa: expected milliseconds"
    )
