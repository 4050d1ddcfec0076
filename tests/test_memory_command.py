"""Capacities of the commands follow from bytes, or the message says why none do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynapar.cli import main
from dynapar.plan import plan_from_json

PLAN = ("plan", "video", "--cluster", "1x8", "--global-batch", "16", "--model", "qwen2.5-vl-7b")
CAPACITIES = ("--capacity", "9000", "--encoder-capacity", "9000")
FULL = ("--memory", "80GB", "--sync", "microbatch")


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_a_plan_in_a_budget_is_written_shown_and_checks_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plans.jsonl"
    assert call(*PLAN, *FULL, "--out", str(out), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["recompute"] for row in report["memory"]] == ["none", "selective", "full"]
    plan = plan_from_json(json.loads(out.read_text().splitlines()[0]))
    assert plan.memory is not None
    assert plan.capacity == plan.memory.capacity
    assert report["steps"][0]["recompute"].split()[1] in ("none", "selective", "full")
    assert call("plan", "--check", str(out)) == 0


def test_simulate_and_inspect_take_one_policy(capsys: pytest.CaptureFixture[str]) -> None:
    simulate = ("simulate", *PLAN[1:], *FULL, "--steps", "1", "--draws", "0", "--compare",
                "homogeneous")  # fmt: skip
    assert call(*simulate, "--recompute", "selective") == 0
    assert "recompute selective in 80GB" in capsys.readouterr().out
    line = '{"id": "a", "text_tokens": 20000}'
    inspect = (
        "inspect",
        line,
        "--model",
        "qwen2.5-vl-7b",
        "--memory",
        "80GB",
        "--sharding",
        "full",
    )
    assert call(*inspect, "--recompute", "none", "--json") == 0
    none = json.loads(capsys.readouterr().out)
    assert call(*inspect, "--json") == 0
    full = json.loads(capsys.readouterr().out)
    assert none["degree"] > full["degree"]
    by_degree = [
        {row["degree"]: row["seconds"] for row in each["degrees"]} for each in (none, full)
    ]
    assert all(by_degree[1][degree] > seconds for degree, seconds in by_degree[0].items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PLAN[:-2], *FULL), "memory is '80GB' and no model is given; expected one, whose bytes"),
        ((*PLAN, *FULL, "--capacity", "100"), "capacity 100 and memory '80GB' are both given"),
        ((*PLAN, *FULL, "--recompute", "some"), "recompute is 'some'; expected some of none, sele"),
        ((*PLAN, *FULL, "--sharding", "fsdp"), "sharding is 'fsdp'; expected one of ddp, zero1,"),
        ((*PLAN, *FULL, "--sharding", "ddp"), "sharding is 'ddp' with sync 'microbatch'; expected"),
        ((*PLAN, "--memory", "80GB"), "states alone take 199.0 GB: weights 33.2 GB, gradients"),
        ((*PLAN, "--memory", "80PB"), "memory is '80PB'; expected bytes with a unit, such as 80GB"),
        ((*PLAN, *CAPACITIES, "--recompute", "full"), "--recompute is 'full' without --me"),
        (
            ("simulate", *PLAN[1:], *FULL, "--recompute", "none,full"),
            "recompute is 'none,full'; expected one policy, under which all is compared alike",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    assert message in capsys.readouterr().err
