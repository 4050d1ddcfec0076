from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.errors import CheckFailedError, ConfigError, PlanError, SourceError
from dynapar.plan import plan_digest
from dynapar.plan_check import check_command, check_plans
from dynapar.plan_command import plan_command
from dynapar.planner import PlannerConfig
from dynapar.planning import PlanRequest, plan_steps, read_source


def metadata(path: Path, samples: int = 10) -> Path:
    rows = [{"id": f"a{i}", "text_tokens": 100 + 90 * i} for i in range(samples)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(source: Path | str, **fields: Any) -> PlanRequest:
    values: dict[str, Any] = {
        "cluster": Cluster(nodes=1, ranks_per_node=4),
        "config": PlannerConfig(capacity=1000, encoder_capacity=100_000),
        "costs": load_costs(None),
        "global_batch": 4,
        "steps": 3,
    }
    return PlanRequest(source=str(source), **{**values, **fields})


def run(source: Path | str, **fields: Any) -> None:
    values: dict[str, Any] = {
        "cluster": "1x4",
        "capacity": 1000,
        "encoder_capacity": 100_000,
        "global_batch": 4,
        "steps": 3,
    }
    plan_command(str(source), **{**values, **fields})


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_plans_are_written_and_check_out(
    sync: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plans.jsonl"
    run(metadata(tmp_path / "m.jsonl"), sync=sync, out=out)
    printed = capsys.readouterr().out
    assert "reference costs h100_7b (not measured here" in printed
    assert check_plans(out) == 3
    assert [json.loads(line)["step"] for line in out.read_text().splitlines()] == [0, 1, 2]
    check_command(out)
    assert "3 plans, all valid" in capsys.readouterr().out


def test_json_says_which_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(metadata(tmp_path / "m.jsonl"), json=True, steps=2)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["costs"], printed["measured"]) == ("h100_7b", False)
    assert [row["step"] for row in printed["steps"]] == [0, 1]


def test_a_proven_plan_shows_no_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = request(metadata(tmp_path / "m.jsonl"), steps=2)
    proven, open_ = plan_steps(source)
    plans = [replace(proven, optimal=True), replace(open_, optimal=False)]
    monkeypatch.setattr("dynapar.plan_command.plan_steps", lambda request: plans)
    run(source.source, steps=2)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("\u2502")]
    assert ["optimal" in row for row in rows] == [True, False]
    run(source.source, steps=2, json=True)
    printed = json.loads(capsys.readouterr().out)["steps"]
    assert [row["optimal"] for row in printed] == [True, False]
    assert printed[0]["gap %"] == round(100 * proven.gap, 3)


def test_an_epoch_holds_each_sample_once(tmp_path: Path) -> None:
    source = metadata(tmp_path / "m.jsonl", 8)
    for shuffle in (False, True):
        plans = list(plan_steps(request(source, steps=2, shuffle=shuffle)))
        ids = [name for plan in plans for name in plan.samples.ids]
        assert sorted(ids) == [f"a{i}" for i in range(8)]
        assert (ids == sorted(ids)) is not shuffle


def test_a_batch_larger_than_the_source_numbers_the_repeats(tmp_path: Path) -> None:
    (plan,) = plan_steps(request(metadata(tmp_path / "m.jsonl", 2), global_batch=5, steps=1))
    assert sorted(plan.samples.ids)[:2] == ["a0", "a0#2"]
    assert len(set(plan.samples.ids)) == 5


def test_schedulers(tmp_path: Path) -> None:
    source = metadata(tmp_path / "m.jsonl")
    fixed = list(plan_steps(request(source, scheduler="homogeneous:2")))
    assert {plan.degrees for plan in fixed} == {(2,)}
    best = list(plan_steps(request(source, scheduler="homogeneous")))
    dynamic = list(plan_steps(request(source)))
    assert [plan.homogeneous_makespan for plan in dynamic] == [plan.makespan for plan in best]
    assert all(plan.lower_bound > 0 for plan in plan_steps(request(source, scheduler="random")))


def test_workloads_are_sources() -> None:
    config = PlannerConfig(capacity=16_384, encoder_capacity=65_536)
    plans = list(plan_steps(request("docs", config=config, global_batch=20, steps=2)))
    assert [len(plan.samples) for plan in plans] == [20, 20]
    assert plans[0].samples.llm_tokens.tolist() != plans[1].samples.llm_tokens.tolist()


def test_mistakes_are_named(tmp_path: Path) -> None:
    source = metadata(tmp_path / "m.jsonl")
    with pytest.raises(SourceError, match=r"source 'x.tar' cannot be planned; expected an index"):
        read_source("x.tar")
    with pytest.raises(ConfigError, match=r"scheduler is 'best'; expected dynamic, homogeneous"):
        request(source, scheduler="best")
    with pytest.raises(ConfigError, match=r"global_batch is 0; expected 1 or more"):
        request(source, global_batch=0)
    with pytest.raises(ConfigError, match=r"steps is -1; expected 1 or more"):
        request(source, steps=-1)
    config = PlannerConfig(capacity=220, encoder_capacity=1)
    with pytest.raises(PlanError, match=r"sample 'a9' has 910 tokens; 4 ranks x capacity 220"):
        list(plan_steps(request(source, global_batch=10, config=config)))


def edited(path: Path, line: int, **fields: object) -> None:
    """Change a plan on file, as a careless tool would; the digest is made to fit."""
    from dynapar.plan.form import _read

    lines = path.read_text().splitlines()
    values = {**json.loads(lines[line]), **fields}
    values["digest"] = plan_digest(_read(values))
    lines[line] = json.dumps(values)
    path.write_text("\n".join(lines) + "\n")


def test_check_names_the_line_and_the_fault(tmp_path: Path) -> None:
    out = tmp_path / "plans.jsonl"
    run(metadata(tmp_path / "m.jsonl"), out=out)
    good = out.read_text()
    edited(out, 1, capacity=10)
    with pytest.raises(CheckFailedError, match=r"plans.jsonl, line 2: .*capacity is 10") as caught:
        check_plans(out)
    assert caught.value.exit_code == 1
    out.write_text(good.replace('"gap":', '"gap":1', 1))
    with pytest.raises(CheckFailedError, match=r"line 1: step 0: gap is 1\d*\.\d+; expected 0"):
        check_plans(out)


def test_check_of_what_is_no_plan_is_bad_input(tmp_path: Path) -> None:
    out = tmp_path / "plans.jsonl"
    run(metadata(tmp_path / "m.jsonl"), out=out)
    good = out.read_text()
    for text, message in (
        (good.replace('"chosen":"', '"chosen":"x'), r"line 1: step 0: .*broken: chosen is 'x"),
        (good.replace('"queues"', '"lines"'), r"line 1: step 0: .*broken: queues is missing"),
        (good + "nonsense\n", r"plans.jsonl, line 4 is not JSON"),
        (good + "[" * 100_000 + "\n", r"plans.jsonl, line 4 is not JSON"),
        (good + "[]\n", r"plans.jsonl, line 4 is not a JSON object"),
        ("\n", r"has no plans; expected one a line"),
    ):
        out.write_text(text)
        with pytest.raises(SourceError, match=message) as caught:
            check_plans(out)
        assert caught.value.exit_code == 2
    with pytest.raises(SourceError, match=r"none.jsonl: No such file"):
        check_plans(tmp_path / "none.jsonl")
    out.write_bytes(b"\xff\xfe")
    with pytest.raises(SourceError, match=r"plans.jsonl is not UTF-8"):
        check_plans(out)


def test_samples_of_a_prefix_are_planned_as_trees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"id": f"a{i}", "text_tokens": 100 + i, "prefix": {"id": f"p{i // 3}", "tokens": 80}}
        for i in range(12)
    ]
    source = tmp_path / "m.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "plans.jsonl"
    run(source, group_by="prefix", global_batch=7, steps=2, out=out, json=True)
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(row["samples"], row["trees"], row["members"]) for row in steps] == [(2, 2, 6)] * 2
    assert [row["saved"] for row in steps] == [4 * 80] * 2
    assert check_plans(out) == 2
    members = [
        member["id"]
        for line in out.read_text().splitlines()
        for sample in json.loads(line)["samples"]
        for member in sample["members"]
    ]
    assert sorted(members) == sorted(str(row["id"]) for row in rows)
    run(source, group_by="prefix", global_batch=7, steps=1)
    assert "trees: samples of this step that stand for several members" in capsys.readouterr().out


def test_what_cannot_be_grouped_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="group_by is 'image'; expected 'prefix', or none"):
        request("docs", group_by="image")
    for source in ("docs", metadata(tmp_path / "m.jsonl")):
        with pytest.raises(ConfigError, match="samples are to be grouped by prefix, and "):
            list(plan_steps(request(source, group_by="prefix")))
