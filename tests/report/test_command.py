"""`dynapar report` as users call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynapar.cli import main
from dynapar.plan import StepPlan
from tests.report.small import plans, write_plans, write_run


@pytest.fixture(scope="module")
def made() -> list[StepPlan]:
    return plans(2)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_plans_get_a_page_beside_them(
    made: list[StepPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    code, out, _ = call(capsys, "report", path)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("2 steps of 24 samples and ")
    assert lines[-2].startswith('Times were predicted with costs "h100_7b": reference figures')
    assert lines[-1] == f"report written to {tmp_path / 'p.html'}"
    assert f"dynapar report {path}</code>" in (tmp_path / "p.html").read_text()


def test_a_run_gets_its_page_inside_with_data_and_trace(
    made: list[StepPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", made)
    data, trace = tmp_path / "d.json", tmp_path / "t.json"
    code, out, _ = call(
        capsys, "report", folder, "--data", data, "--trace", trace, "--show", "1", "--json"
    )
    assert code == 0
    assert (folder / "report.html").read_text().count('class="panel"') == 1
    said, held = json.loads(out), json.loads(data.read_text())
    assert said["page"] == str(folder / "report.html")
    assert said["in_short"] == held["in_short"]
    assert said["cards"] == held["cards"]
    assert held["form"] == 1
    assert [step["step"] for step in held["steps"]] == [0, 1]
    assert held["steps"][1]["makespan"] == made[1].makespan / 1e6
    assert held["gantts"][0]["measured"][0].keys() >= {"first", "start", "seconds"}
    assert held["measured"]["ranks"][0]["straggler"] is False
    assert json.loads(trace.read_text())["traceEvents"]


def test_notes_go_to_standard_error(
    made: list[StepPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    path.write_bytes(path.read_bytes()[:-9])
    code, out, err = call(capsys, "report", path, "--out", tmp_path / "r.html")
    assert code == 0
    assert "cut off" not in out
    assert f"note: {path}, line 2 was cut off after " in err
    assert "was cut off after" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--show", "1,x"], "--show has 'x'; expected steps with commas between, for example"),
        (["--show", "5"], "step 5 is not there; expected steps from 0 to 1"),
        (["--out", "p.jsonl"], "p.jsonl is read by the report, or written twice; expected a file"),
        (["--data", "a", "--trace", "a"], "a is read by the report, or written twice"),
        (["--costs", "no.json"], "costs 'no.json': No such file or directory"),
        (["--compare", "-1"], "Invalid value for '--compare'"),
    ],
)
def test_bad_use(
    made: list[StepPlan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = write_plans(Path("p.jsonl"), made).read_bytes()
    code, _, err = call(capsys, "report", "p.jsonl", *options)
    assert code == 2
    assert message in err
    assert err.splitlines()[-1].startswith("error: ")
    assert Path("p.jsonl").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"p.jsonl"}


def test_a_report_needs_no_torch(made: list[StepPlan], tmp_path: Path) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from dynapar.report.command import report_command\n"
        f"report_command(Path({str(path)!r}))\n"
        "print(*[name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
