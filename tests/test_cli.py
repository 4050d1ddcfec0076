"""The program's surface: commands, help, errors of one line, exit codes, tables and progress."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynapar import __version__
from dynapar.cli import main
from dynapar.console import Cell, first_to_say, progress, show_table
from dynapar.runtime.order import OrderLog
from tests.test_architecture import heavy_after

COMMANDS = (
    "index",
    "plan",
    "simulate",
    "inspect",
    "verify-lengths",
    "train",
    "verify",
    "check-order",
    "doctor",
)


def call(*arguments: str | Path) -> int:
    """The exit code of the program in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def failed(capsys: pytest.CaptureFixture[str], code: int, *arguments: str | Path) -> str:
    """The one line of a call that must end with `code`."""
    assert call(*arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"dynapar {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f" {name} " not in text] == []
    assert call() == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "-h") == 0
    assert f"dynapar {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_no_torch(command: str) -> None:
    arguments = [*command.split(), "--help"]
    code = f"""
import contextlib
from dynapar.cli import main
with contextlib.suppress(SystemExit):
    main({arguments!r})
"""
    assert heavy_after(code) == []


def test_the_module_is_the_program() -> None:
    command = [sys.executable, "-m", "dynapar", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"dynapar {__version__}\n"


def test_bad_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = failed(capsys, 2, "plane")
    assert line.startswith("error: No such command 'plane'")
    assert line.endswith("See `dynapar --help`")
    line = failed(capsys, 2, "train")
    assert line == "error: Missing argument 'CONFIG'. See `dynapar train --help`"
    line = failed(capsys, 2, "verify", "run.yaml", "--dtype", "half")
    assert "'half' is not one of 'float32', 'float64', 'bf16'" in line
    assert line.endswith("See `dynapar verify --help`")


def test_a_tracebacks_place_is_behind_debug(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynapar", "check-order", str(tmp_path)]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert plain.returncode == 2
    assert plain.stderr.startswith(f"error: {tmp_path} has no order_RANK.jsonl; expected")
    assert plain.stderr.count("\n") == 1
    debug = subprocess.run([*command, "--debug"], capture_output=True, text=True, check=False)
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr
    assert "SourceError" in debug.stderr


def test_a_missing_package_is_one_line() -> None:
    code = """
import sys
sys.modules["torch"] = None
from dynapar.cli import main
main(["train", "run.yaml"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: torch cannot be imported (import of torch halted; None in ")
    assert line.endswith(
        "Run `dynapar doctor --quick`, which says what is missing and how to install it"
    )


def test_a_mistake_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("modell: m\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*launcher, "-m", "dynapar", "train", str(config)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "has no key 'modell'; the nearest is 'model'" in line
    assert "exitcode  : 2" in done.stderr


def test_ranks_say_different_things_each(tmp_path: Path) -> None:
    ranks = []
    for rank in ("0", "1"):
        (tmp_path / "attempt_0" / rank).mkdir(parents=True)
        reply = tmp_path / "attempt_0" / rank / "error.json"
        ranks.append({"TORCHELASTIC_ERROR_FILE": str(reply)})
    assert first_to_say("a", ranks[1])
    assert not first_to_say("a", ranks[0])
    assert first_to_say("b", ranks[0])
    for _ in range(2):
        assert first_to_say("a", {})
        assert first_to_say("a", {"TORCHELASTIC_ERROR_FILE": ""})
        assert first_to_say("a", {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "gone" / "0" / "e")})


def test_plan_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    line = failed(capsys, 2, "plan", "docs", "--cluster", "1x4")
    assert line.startswith("error: plan needs SOURCE --cluster --capacity --encoder-capacity")
    line = failed(capsys, 2, "plan", "docs", "--check", "plans.jsonl")
    assert line.startswith("error: plan takes SOURCE or --check, not both")


def save_logs(folder: Path, *, crossed: bool) -> None:
    """Two ranks that exchange on two communicators, in one order or in opposite ones."""
    for rank in range(2):
        log = OrderLog(rank=rank)
        names = ["exchange", "closing"]
        for name in reversed(names) if crossed and rank else names:
            peer = [(1 - rank, 64)]
            log.record(communicator=name, operation="rows", sends=peer, receives=peer)
        log.save(folder / f"order_{rank}.jsonl")


def test_check_order_of_a_run_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_logs(tmp_path, crossed=False)
    assert call("check-order", tmp_path) == 0
    assert "the order holds" in capsys.readouterr().out
    assert call("check-order", tmp_path, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    expected = {"operations": 2, "messages": 4, "bytes sent": 128}
    assert rows == [{"rank": 0} | expected, {"rank": 1} | expected]


def test_check_order_names_a_cycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_logs(tmp_path, crossed=True)
    line = failed(capsys, 1, "check-order", tmp_path)
    assert line.startswith("error: ranks wait for each other under NCCL's order: rank 0 is at")


def test_check_order_of_no_order_log_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "order_0.jsonl").write_text("[]\n")
    line = failed(capsys, 2, "check-order", tmp_path)
    assert "order_0.jsonl is not an order log" in line


def test_check_of_no_plans_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans.jsonl"
    assert "No such file" in failed(capsys, 2, "plan", "--check", path)
    path.write_text("")
    assert "has no plans" in failed(capsys, 2, "plan", "--check", path)
    path.write_text('\n{"version": 1, "step": 0}\n')
    line = failed(capsys, 2, "plan", "--check", path)
    assert "line 2: step 0: the plan's form is broken: sync is missing" in line


def test_a_table_in_a_pipe_is_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[b]" + "x" * 200
    row: dict[str, Cell] = {"name": name, "tokens": 1234567, "gap": 0.01234567, "ms": 118034.5}
    show_table("wide [not markup]", [row])
    title, *_, shown, _ = capsys.readouterr().out.splitlines()
    assert title.strip() == "wide [not markup]"
    assert shown.split()[1::2] == [name, "1,234,567", "0.01235", "118,034"]


def test_a_table_without_rows_is_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("nothing", [])
    assert capsys.readouterr().out == "nothing\n"


def test_progress_is_a_line_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("indexing") as advance:
        advance(0, 0)
        for done in range(1, 2001):
            advance(done, 2000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"indexing: {200 * tenth:,} of 2,000" for tenth in range(1, 11)]


def test_progress_on_a_terminal_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("indexing") as advance:
        advance(1, 0)
        advance(1500, 2000)
    text = capsys.readouterr().err
    assert "1500/2000" in text
    assert "of 2,000" not in text
