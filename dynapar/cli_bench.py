"""What `dynapar bench` takes; `dynapar.cli` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(
    help="Measure on this machine: attention of a ring, or steps of a run.",
    no_args_is_help=True,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@bench.command()
def attention(
    lengths: Annotated[
        str,
        typer.Option(
            metavar="N,N", help="Tokens of each sequence; N*M: M of N; M~N: M, log-normal around N."
        ),
    ] = "2600,1200,297",
    degrees: Annotated[str, typer.Option(metavar="D,D", help="Ranks of a ring.")] = "1,2,3,4",
    mask: Annotated[
        str, typer.Option(metavar="M", help="causal, full, window:N, chunked:N or prefix:N.")
    ] = "causal",
    dtype: Annotated[str, typer.Option(metavar="T", help="float32, float64 or bf16.")] = "float32",
    heads: Annotated[
        str, typer.Option(metavar="Q,K,W", help="Query heads, key/value heads, width.")
    ] = "8,2,64",
    scheme: Annotated[
        str, typer.Option(metavar="S", help="auto, staged, ulysses or hybrid.")
    ] = "auto",
    turns: Annotated[int, typer.Option(metavar="N", min=1, help="Times each is run.")] = 9,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also run other rings that are installed.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Price a ring's attention on real ranks against one device, and other rings."""
    from dynapar.bench.attention_command import attention_command

    attention_command(
        lengths=lengths,
        degrees=degrees,
        mask=mask,
        dtype=dtype,
        heads=heads,
        scheme=scheme,
        turns=turns,
        peers=peers,
        json=json,
    )


@bench.command()
def step(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="A run's configuration.")],
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps to compare.")] = 8,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Times each is run.")] = 2,
    ranks: Annotated[int, typer.Option(metavar="N", min=1, help="Processes.")] = 4,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the samples' order.")] = 0,
    json: AsJson = False,
) -> None:
    """Compare layouts of a run's steps on real ranks: dynapar's, one best degree, padded."""
    from dynapar.bench.step_command import step_command

    step_command(config, steps=steps, repeats=repeats, ranks=ranks, seed=seed, json=json)
