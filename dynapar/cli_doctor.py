"""What `dynapar doctor` and `dynapar check-order` take; `dynapar.cli` registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynapar.cli_lengths import AsJson


def doctor(
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Ranks that a run will have on this machine; else the launcher's, or one a GPU.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the self-checks, which start two ranks.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Look at versions, kernels, ranks, limits and settings, and check attention at degree 2."""
    from dynapar.doctor.command import doctor_command

    doctor_command(ranks=ranks, quick=quick, json=json)


def check_order(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="With the ranks' order logs.")],
    json: AsJson = False,
) -> None:
    """Replay what the ranks of a run issued under NCCL's rule of one order for all."""
    from dynapar.order_command import check_order_command

    check_order_command(run_dir, json=json)
