"""What `dynapar report` does, free of the command line's library."""

from __future__ import annotations

import json as json_text
import shlex
import sys
from pathlib import Path

from dynapar.console import progress, show_json
from dynapar.errors import ConfigError
from dynapar.report.gather import Question, gather
from dynapar.report.model import Report
from dynapar.report.page import page
from dynapar.report.record import report_to_json, summary
from dynapar.report.source import Source, open_source
from dynapar.report.trace import write_trace
from dynapar.report.units import plural
from dynapar.report.words import in_short, pricing


def report_command(
    path: Path,
    *,
    out: Path | None = None,
    data: Path | None = None,
    trace: Path | None = None,
    costs: Path | None = None,
    show: str = "",
    compare: int = 100,
    json: bool = False,
) -> None:
    """Write a report on plans or on a run, and print what it says in short.

    Args:
        path: A file of plans, or the folder of a run.
        out: The page; None for report.html in the run's folder, or beside the plans under their
            name.
        data: Where the report's data go as one JSON object; None to write none.
        trace: Where a Chrome trace goes; None to write none.
        costs: As `Question.costs`.
        show: Steps to draw, with commas between; empty for a choice.
        compare: As `Question.compare`.
        json: Print JSON instead of sentences.

    Raises:
        DynaparError: The plans or the run cannot be reported on; the message says why.
    """
    source = open_source(path)
    question = Question(costs=costs, show=_steps(show), compare=compare)
    with progress(f"reporting on {path}") as advance:
        report = gather(source, question, lambda what, done, total: advance(done, total))
    target = out or _beside(source)
    _refuse_source(source, target, data, trace)
    command = shlex.join(["dynapar", "report", str(path), *_changed(costs, show, compare)])
    target.write_text(page(report, command=command), encoding="utf-8")
    if data is not None:
        data.write_text(json_text.dumps(report_to_json(report), allow_nan=False), encoding="utf-8")
    lines = [f"report written to {target}"]
    if data is not None:
        lines.append(f"data written to {data}")
    if trace is not None:
        written = write_trace(source, trace)
        left_out = f"; {written.left_out:,} later steps left out" if written.left_out else ""
        lines.append(
            f"trace of {plural(written.steps, 'step')} written to {trace}{left_out}: open it in "
            f"ui.perfetto.dev or chrome://tracing"
        )
    if json:
        show_json({"page": str(target), **summary(report)})
        return
    _print(report, lines)


def _print(report: Report, lines: list[str]) -> None:
    for figure, text in in_short(report):
        print(f"{figure} {text}")
    print(pricing(report))
    for line in lines:
        print(line)
    sys.stdout.flush()
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)


def _steps(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdecimal()]:
        raise ConfigError(
            f"--show has {wrong[0]!r}; expected steps with commas between, for example 0,5,12"
        )
    return tuple(map(int, parts))


def _beside(source: Source) -> Path:
    return source.path / "report.html" if source.run else source.path.with_suffix(".html")


def _refuse_source(source: Source, *targets: Path | None) -> None:
    """Nothing that is reported on is overwritten, and no two files are written to one place."""
    seen = {source.plans.path.resolve()}
    if source.run:
        seen |= {each.resolve() for each in source.path.glob("*.jsonl")}
    for target in targets:
        if target is None:
            continue
        if target.resolve() in seen:
            raise ConfigError(
                f"{target} is read by the report, or written twice; expected a file of its own: "
                f"give --out, --data and --trace other names"
            )
        seen.add(target.resolve())


def _changed(costs: Path | None, show: str, compare: int) -> list[str]:
    """Options that are not at their defaults, to make the same report again."""
    found = ["--costs", str(costs)] if costs is not None else []
    found += ["--show", show] if show else []
    return found + (["--compare", str(compare)] if compare != 100 else [])
