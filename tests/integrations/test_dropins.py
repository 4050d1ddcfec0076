"""The snippets of docs/dropins.md, run from the page."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from dynapar.integrations import megatron as our_megatron
from dynapar.integrations import verl as our_verl
from tests.integrations import peers

PAGE = (Path(__file__).parents[2] / "docs" / "dropins.md").read_text(encoding="utf-8")


def snippet(section: str) -> str:
    """The one block of Python of a section."""
    (body,) = [part for part in PAGE.split("\n## ")[1:] if part.startswith(section)]
    (code,) = re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
    return str(code)


def run(section: str) -> None:
    exec(compile(snippet(section), f"dropins.md: {section}", "exec"), {})


def test_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    run("Lengths and two numbers")
    lines = capsys.readouterr().out.splitlines()
    form = re.compile(r"rank \d shares microbatch \d+ with \(.*\): \[.*\]")
    assert all(form.fullmatch(line) for line in lines)
    assert {line.split()[1] for line in lines} == {"0", "1", "2", "3"}
    assert any("52344" in line for line in lines)


def test_plans_made_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    run("A plan for every step, made ahead")
    lines = capsys.readouterr().out.splitlines()
    form = re.compile(r"step (\d): rank 1 runs \[([\d, ]*)\] with ranks \(([\d, ]*)\)")
    found = [form.fullmatch(line) for line in lines]
    assert all(found), lines
    assert {match[1] for match in found if match} == {"0", "1"}
    # The first step's longest sample needs all four ranks.
    assert any(match[1] == "0" and match[3] == "0, 1, 2, 3" for match in found if match)
    assert [each for each in threading.enumerate() if each.name == "dynapar-planner"] == []


def test_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = peers.megatron("megatron.core.datasets.data_schedule")
    monkeypatch.setattr(schedule, "BalancedCPScheduler", schedule.BalancedCPScheduler)
    run("Megatron Core: hybrid context parallelism (0.16)")
    assert schedule.BalancedCPScheduler is our_megatron.BalancedCPScheduler


def test_megatrons_development_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.16 has no such class, which the snippet allows for; then one is stood in for."""
    schedule = peers.megatron("megatron.core.datasets.data_schedule")
    run("Megatron Core, development branch")
    theirs = type("DefaultDynamicCPScheduler", (), {})
    monkeypatch.setattr(schedule, "DefaultDynamicCPScheduler", theirs, raising=False)
    run("Megatron Core, development branch")
    assert vars(theirs)["get_groups_and_subsamples"] is our_megatron.get_groups_and_subsamples


def test_verl() -> None:
    with peers.verl() as modules:
        run("verl")
        adapter, balancing = modules["dynamic_cp_scheduler"], modules["seqlen_balancing"]
        scheduler = adapter.get_megatron_dynamic_cp_scheduler_cls()
        assert scheduler is our_megatron.DefaultDynamicCPScheduler
        assert balancing.get_seqlen_balanced_partitions is our_verl.get_seqlen_balanced_partitions
        assert balancing.calculate_workload is our_verl.calculate_workload


def test_the_page_names_the_settings_that_there_are() -> None:
    from dynapar.planner import PlannerConfig

    names = re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE)
    assert set(names) <= set(PlannerConfig.__dataclass_fields__)
    assert len(names) == 5
