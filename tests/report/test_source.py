"""Files that were cut off, are empty, mixed or changed: what is left out, and what is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynapar.costs import Costs, costs_to_json, load_costs
from dynapar.errors import ConfigError, CostsError, PlanError, SourceError
from dynapar.plan import StepPlan
from dynapar.report.gather import Question, gather
from dynapar.report.model import Report
from dynapar.report.source import Source, open_source
from tests.report.small import plans, write_plans, write_run


@pytest.fixture(scope="module")
def made() -> list[StepPlan]:
    return plans(3)


def read(path: Path, **question: Any) -> Report:
    return gather(open_source(path), Question(**question))


def fails(path: Path, **question: Any) -> str:
    with pytest.raises(SourceError) as caught:
        read(path, **question)
    return str(caught.value)


def changed(path: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change one line of a file, from 1."""
    lines = path.read_text().splitlines()
    row = json.loads(lines[number - 1])
    change(row)
    lines[number - 1] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")


def test_a_run_cut_off_in_mid_line(made: list[StepPlan], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made)
    path = folder / "metrics.jsonl"
    text = path.read_text().rstrip("\n")
    path.write_text(text[:-40])
    last = text.splitlines()[-1]
    found = read(folder)
    assert found.notes == (
        f"{path}, line 3 was cut off after {len(last) - 40:,} bytes and is left out.",
        "Steps without measurements: 2; only their plan is shown.",
    )
    assert found.measured is not None
    assert [step.step for step in found.measured.steps] == [0, 1]
    assert [step.step for step in found.steps] == [0, 1, 2]


def test_plans_cut_off_in_mid_line(made: list[StepPlan], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made)
    path = folder / "plans.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    found = read(folder)
    assert len(found.steps) == 2
    assert found.notes[0].startswith(f"{path}, line 3 was cut off after ")
    assert found.notes[1:] == (
        "Steps without a plan are left out (2): metrics.jsonl has them, plans.jsonl does not.",
    )


def test_a_whole_last_line_needs_no_end(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    path.write_text(path.read_text().rstrip("\n"))
    assert len(read(path).steps) == 3


def test_a_file_of_one_line_that_was_cut_off(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", made[:1])
    path.write_bytes(path.read_bytes()[:50])
    assert fails(path) == (
        f"{path} has no plan ({path}, line 1 was cut off after 50 bytes and is left out); expected "
        f"one a line. `dynapar plan --out` writes such"
    )


def test_a_broken_line_that_is_not_the_last(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:80], lines[2]]) + "\n")
    assert fails(path).startswith(f"{path}, line 2 is not JSON (")
    path.write_text("[1]\n")
    assert fails(path).startswith(f"{path}, line 1 is list, not a JSON object; expected one object")


def test_an_empty_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "plans.jsonl"
    assert fails(folder) == (
        f"{folder} has no plans.jsonl; expected the folder of a run, in which `dynapar train` "
        "writes it with the first step. Give that folder, or a file of plans itself"
    )
    path.touch()
    assert fails(folder) == (
        f"{path} has no finished step; expected one a line. Let the run finish a step first"
    )


def test_a_run_without_measurements(made: list[StepPlan], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made)
    path = folder / "metrics.jsonl"
    path.unlink()
    found = read(folder)
    assert found.measured is None
    assert found.notes == (f"{path} is not there: the run has plans, but no measurements.",)


def test_other_files_than_plans(tmp_path: Path) -> None:
    path = tmp_path / "metadata.jsonl"
    path.write_text('{"id": "a", "text_tokens": 3}\n')
    assert fails(path) == (
        f"{path}, line 1 has step None; expected a number: give a file of plans, as `dynapar plan "
        f"--out` writes, or the folder of a run"
    )


def test_mixed_versions(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    changed(path, 3, lambda row: row.update(version=9))
    assert fails(path) == (
        f"{path}, line 3 has version 9 of a plan's form (line 1 has 1); expected 1 or 2: plan "
        f"again, or report with the dynapar that wrote it"
    )


def test_a_changed_plan(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    changed(path, 2, lambda row: row.update(gap=0.5))
    assert fails(path).startswith(f"{path}, line 2: step 1: gap is 0.5; expected ")


def test_a_step_twice(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", [*made, made[1]])
    assert fails(path) == (
        f"{path} holds step 1 twice, in lines 2 and 4; expected each step once: report on each "
        f"run's file by itself"
    )
    folder = write_run(tmp_path / "run", made)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + metrics.read_text().splitlines()[0] + "\n")
    assert (
        fails(folder) == f"{metrics}, line 4 is the second one of step 0; expected one. Remove it"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: row.update(plan_digest="f" * 64), "they are of another plan (ffffffffffff, "),
        (lambda row: row["ranks"].pop(), "they are of 7 ranks, the plan is for 8"),
        (lambda row: row["ranks"][2]["microbatches"].append(1.0), "rank 2 measured "),
        (lambda row: row.update(loss=float("nan")), "loss is nan; expected a finite number."),
        (
            lambda row: row["ranks"][1].update(step=float("inf")),
            "ranks[1].step is inf; expected a finite number of 0 or more.",
        ),
        (lambda row: row["ranks"][0].update(waited=-1.0), "ranks[0].waited is -1.0; expected"),
        (lambda row: row.update(speeds=[float("nan")]), "speeds[0] is nan; expected"),
    ],
)
def test_measurements_that_cannot_be_used(
    made: list[StepPlan],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    reason: str,
) -> None:
    folder = write_run(tmp_path / "run", made)
    changed(folder / "metrics.jsonl", 2, change)
    found = read(folder)
    (note,) = found.notes
    assert note.startswith(f"The measurements of step 1 are left out: {reason}")
    assert found.measured is not None
    assert [step.step for step in found.measured.steps] == [0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("loss"), "loss is missing; expected a number"),
        (lambda row: row.update(ranks=[]), "ranks is []; expected a list with one object a rank"),
        (lambda row: row.update(ranks=[3]), "ranks[0] is 3; expected an object"),
        (lambda row: row["ranks"][1].pop("step"), "ranks[1].step is missing; expected a number"),
        (
            lambda row: row["ranks"][1].update(microbatches=None),
            "ranks[1].microbatches is missing; expected a list of numbers",
        ),
        (
            lambda row: row["ranks"][0]["microbatches"].insert(0, "1"),
            "ranks[0].microbatches[0] is '1'; expected a number",
        ),
        (lambda row: row.update(step="x"), None),
    ],
)
def test_broken_metrics(
    made: list[StepPlan],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str | None,
) -> None:
    folder = write_run(tmp_path / "run", made)
    path = folder / "metrics.jsonl"
    changed(path, 2, change)
    said = message or "has step 'x'; expected a number"
    separator = ": " if message else " "
    assert fails(folder) == (
        f"{path}, line 2{separator}{said}. Give the file as `dynapar train` wrote it"
    )


def named(costs: Costs, name: str, path: Path) -> Path:
    path.write_text(json.dumps({**costs_to_json(costs), "name": name, "measured": True}))
    return path


def renamed(plan: StepPlan, name: str) -> StepPlan:
    from dataclasses import replace

    return replace(plan, costs=name)


def test_costs_that_are_missing_are_said(made: list[StepPlan], tmp_path: Path) -> None:
    mine = [renamed(plan, "mine") for plan in made]
    folder = write_run(tmp_path / "run", mine)
    (note,) = read(folder).notes
    assert note == (
        "The plans were made with costs 'mine', which were not given: all that is priced here (the "
        "work of encoders and LLM, idle time, static and padded layouts) is priced with the "
        "reference costs h100_7b. Give the plans' own by --costs."
    )
    path = named(load_costs(None), "mine", tmp_path / "costs.json")
    given = read(folder, costs=path)
    assert given.notes == ()
    assert given.compared is not None
    assert (given.compared.costs, given.compared.measured) == ("mine", True)
    path.rename(folder / "costs.json")
    assert read(folder).notes == ()


def test_other_costs_are_said(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    found = read(path, costs=Path("harder"))
    assert found.notes == (
        "The plans were made with costs 'h100_7b'; what is priced here is priced with 'harder'.",
    )
    assert found.compared is not None
    assert found.compared.difference > 0.01
    with pytest.raises(CostsError, match=r"none\.json"):
        read(path, costs=tmp_path / "none.json")


def test_a_step_that_is_not_there(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    with pytest.raises(ConfigError, match=r"step 7 is not there; expected steps from 0 to 2"):
        read(path, show=(1, 7))


def test_a_plan_that_breaks_its_contract_is_not_compared(
    made: list[StepPlan], tmp_path: Path
) -> None:
    """Kernels are only given what is valid."""
    from dataclasses import replace

    columns = replace(made[0].columns, queue=made[0].columns.queue[::-1].copy())
    path = write_plans(tmp_path / "p.jsonl", [replace(made[0], columns=columns)])
    with pytest.raises(PlanError, match="the plan is not valid"):
        read(path)


def test_reading_again_finds_the_same_plan(made: list[StepPlan], tmp_path: Path) -> None:
    source: Source = open_source(write_plans(tmp_path / "p.jsonl", made))
    assert list(source) == made
    assert [source.plan(step) for step in (2, 0)] == [made[2], made[0]]
