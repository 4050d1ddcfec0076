"""What `dynapar calibrate` takes; `dynapar.cli` registers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    out: Annotated[Path, typer.Option(metavar="COSTS.json", help="The cost file to write.")],
    rounds: Annotated[
        int, typer.Option(metavar="N", min=3, help="Runs of each microbatch, at most.")
    ] = 9,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="Wall clock for all runs, about.")
    ] = 140.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Measure what the model's work costs on this hardware, and write a cost file.

    Starts two CPU ranks, or takes one GPU; under torchrun the ranks of torchrun.
    """
    from dynapar.calibrate.command import calibrate as measure
    from dynapar.calibrate.command import report, write_costs
    from dynapar.train.config import read_run_config

    found = measure(read_run_config(config), rounds=rounds, budget=seconds)
    write_costs(found.costs, out)
    if as_json:
        terms = [term._asdict() for term in found.errors]
        typer.echo(json.dumps({"out": str(out), "rounds": found.rounds, "terms": terms}))
        return
    for line in report(found):
        typer.echo(line)
    typer.echo(f"wrote {out}: set `costs: {out}` in the configuration, or give it as --costs")
