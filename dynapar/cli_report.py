"""What `dynapar report` takes; `dynapar.cli` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR_OR_PLANS",
            help="The folder of a run, or a file of plans from `dynapar plan --out`.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="R.html", help="The page; else RUN_DIR/report.html, or PLANS with .html."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="D.json", help="Write the report's data as one JSON.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="T.json", help="Write a Chrome trace, which Perfetto opens."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="F",
            help="What work costs; else the run's own, or the shipped costs that the plans name.",
        ),
    ] = None,
    show: Annotated[
        str, typer.Option(metavar="STEP,STEP", help="Steps to draw rank by rank; else a choice.")
    ] = "",
    compare: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Steps, evenly spread, to compare with static and padded layouts.",
        ),
    ] = 100,
    json: Annotated[
        bool, typer.Option("--json", help="Print what it says in short as JSON.")
    ] = False,
) -> None:
    """Write a page on plans or on a run, to be read by someone who was not there."""
    from dynapar.report.command import report_command

    report_command(
        path,
        out=out,
        data=data,
        trace=trace,
        costs=costs,
        show=show,
        compare=compare,
        json=json,
    )
