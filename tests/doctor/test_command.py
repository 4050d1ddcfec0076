"""The whole command: its table, its JSON, its exit code, and a machine without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynapar.doctor import command
from dynapar.doctor.finding import Finding, fail, ok, warn
from dynapar.errors import CheckFailedError
from tests.test_cli import call

ROWS = [
    ok("python", "3.12"),
    warn("allocator", "it fragments", "set it", source="https://example.org/a"),
    fail("torch", "not installed", "pip install torch"),
]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    found = list(ROWS)
    monkeypatch.setattr(command, "examine", lambda environ, **options: iter(found))
    return found


def test_the_table_says_what_to_do(rows: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckFailedError) as caught:
        command.doctor_command(ranks=None, quick=True, json=False)
    assert str(caught.value) == (
        "1 of 3 checks failed: torch. Do what the table says, and look again"
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "WARN allocator: set it (https://example.org/a)",
        "FAIL torch: pip install torch",
        "1 ok, 1 warn, 1 fail",
    ]
    assert [line.split()[1:4:2] for line in lines[4:7]] == [
        ["ok", "python"],
        ["WARN", "allocator"],
        ["FAIL", "torch"],
    ]


def test_json_has_every_field(rows: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("doctor", "--json") == 1
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert said["passed"] is False
    assert said["findings"][1] == {
        "check": "allocator",
        "status": "warn",
        "found": "it fragments",
        "do": "set it",
        "source": "https://example.org/a",
    }
    assert captured.err == (
        "error: 1 of 3 checks failed: torch. Do what the table says, and look again\n"
    )
    del rows[2]
    assert call("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_one_rank_of_a_machine_looks(
    rows: list[Finding], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    command.doctor_command(ranks=None, quick=True, json=False)
    assert capsys.readouterr().out == ""


def test_this_machine_passes() -> None:
    environ = {"OMP_NUM_THREADS": "1"}
    found = {row.check: row for row in command.examine(environ, ranks=1, quick=True)}
    assert [row for row in found.values() if row.status == "fail"] == []
    assert {"python", "torch", "ranks", "allocator", "attention", "compiled planner"} <= set(found)
    assert "planner" not in found
    assert "attention at degree 2" not in found


def test_slow_checks_are_announced_and_broken_ones_become_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("first line\ncannot cache function: no locator")

    monkeypatch.setattr(command, "plan_twice", broken)
    monkeypatch.setattr(command, "_attend_on_ranks", lambda check: ok(check, "they agree"))
    found = {row.check: row for row in command.examine({}, ranks=1)}
    assert found["planner"].status == "fail"
    assert found["planner"].found == (
        "could not be run (RuntimeError: cannot cache function: no locator)"
    )
    assert found["attention at degree 2"].status == "ok"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "checking planner (the first time it is compiled, for a minute)",
        "checking attention at degree 2 (starting two ranks)",
    ]


def test_the_environment_that_is_handed_in_is_the_one_that_counts() -> None:
    environ = {"NUMBA_DISABLE_JIT": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    found = {row.check: row for row in command.examine(environ, quick=True)}
    assert found["NUMBA_DISABLE_JIT"].status == "fail"
    assert found["ranks"].found == "4, 2 of them on this machine"


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The doctor in an interpreter that has no such module."""
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        f"from dynapar.cli import main; main(['doctor', '--json', *{arguments!r}])"
    )
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root
    )


def test_without_torch_it_says_so_and_still_plans() -> None:
    done = without("torch")
    assert done.returncode == 1, done.stderr
    found = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    assert found["planner"]["status"] == "ok"
    assert found["attention"]["status"] == "fail"
    assert found["attention"]["found"].startswith("torch cannot be loaded (ModuleNotFoundError: ")
    assert "attention at degree 2" not in found
    assert "\nerror: 1 of " in done.stderr


def test_without_numba_the_planner_fails() -> None:
    done = without("numba", "--quick")
    assert done.returncode == 0, done.stderr
    done = without("numba")
    assert done.returncode == 1
    found = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    assert found["planner"]["status"] == "fail"
    assert found["planner"]["found"].startswith("could not be run (ModuleNotFoundError: ")
