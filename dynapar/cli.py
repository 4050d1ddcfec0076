"""The program `dynapar`: what its commands take, and how mistakes look.

Each command imports what it runs when it is called, so that help loads neither torch nor
transformers. An error is one line on standard error; the exit code is 2 for bad use and 1 for a
check that failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol, cast

import typer

import dynapar
from dynapar.cli_bench import bench
from dynapar.cli_calibrate import calibrate
from dynapar.cli_doctor import check_order, doctor
from dynapar.cli_lengths import inspect, verify_lengths
from dynapar.cli_options import (
    PLAN_NEEDS,
    AsJson,
    Capacity,
    ClusterText,
    Compared,
    ConfigFile,
    CostsFile,
    DegreeKind,
    Degrees,
    DeviceName,
    Draws,
    EncoderCapacity,
    EqualCounts,
    Gate,
    GlobalBatch,
    GroupBy,
    MaxDegree,
    Memory,
    ModelName,
    PeerBudget,
    Picture,
    PlansIn,
    PlanSource,
    PlansOut,
    Recompute,
    SchedulerName,
    Seed,
    Sharding,
    Shuffle,
    SimulateSource,
    Slow,
    Steps,
    Sweep,
    Sync,
    SyncChoice,
    WindowKind,
    Windows,
    budget_request,
    ring_rules,
)
from dynapar.cli_report import report
from dynapar.console import first_to_say
from dynapar.errors import ConfigError, DynaparError

app = typer.Typer(
    help="Per-step switching between context and data parallelism, with the exact gradient.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Bad use of the command line: click's error, or that of the copy of click inside newer typers."""


class _Usage(Protocol):
    """What both have."""

    ctx: typer.Context | None

    def format_message(self) -> str: ...


class Dtype(StrEnum):
    """In what a check computes."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BF16 = "bf16"


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    del debug  # `main` looks for it wherever it stands.
    if version:
        typer.echo(f"dynapar {dynapar.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def index(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A conversation file (.jsonl, .json) or webdataset shards "
            "(shards-{000..007}.tar).",
        ),
    ],
    model: Annotated[str, typer.Option(metavar="M", help="A model's folder, with tokenizer.")],
    out: Annotated[Path, typer.Option(metavar="X.parquet", help="The index to write.")],
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out and name samples that cannot be read.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Read the lengths of a source's samples from headers alone."""
    from dynapar.index_command import index_command

    index_command(source, model=model, out=out, skip_bad=skip_bad, json=json)


@app.command()
def plan(
    source: PlanSource = None,
    cluster: ClusterText = None,
    capacity: Capacity = None,
    encoder_capacity: EncoderCapacity = None,
    memory: Memory = None,
    recompute: Recompute = None,
    sharding: Sharding = None,
    sync: SyncChoice = Sync.STEP,
    global_batch: GlobalBatch = None,
    steps: Steps = 1,
    seed: Seed = 0,
    shuffle: Shuffle = True,
    model: ModelName = None,
    costs: CostsFile = None,
    scheduler: SchedulerName = "dynamic",
    gate: Gate = 0.0,
    max_degree: MaxDegree = None,
    degrees: DegreeKind = Degrees.ANY,
    windows: WindowKind = Windows.ANY,
    peer_budget: PeerBudget = "64",
    equal_counts: EqualCounts = False,
    group_by: GroupBy = None,
    out: PlansOut = None,
    check: PlansIn = None,
    json: AsJson = False,
) -> None:
    """Plan the steps of a source without running them, or check a file of plans."""
    if check is not None:
        from dynapar.plan_check import check_command

        if source is not None:
            raise ConfigError("plan takes SOURCE or --check, not both. See `dynapar plan --help`")
        check_command(check, costs=costs, json=json)
        return
    from dynapar.plan_command import plan_command

    if source is None or cluster is None or global_batch is None:
        raise ConfigError(PLAN_NEEDS)
    if memory is None and (capacity is None or encoder_capacity is None):
        raise ConfigError(PLAN_NEEDS)
    plan_command(
        source,
        cluster=cluster,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
        budget=budget_request(memory, recompute, sharding),
        sync=sync.value,
        global_batch=global_batch,
        steps=steps,
        seed=seed,
        shuffle=shuffle,
        model=model,
        costs=costs,
        scheduler=scheduler,
        gate=gate,
        rings=ring_rules(degrees, windows, peer_budget, max_degree),
        equal_counts=equal_counts,
        group_by=group_by,
        out=out,
        json=json,
    )


@app.command()
def simulate(
    source: SimulateSource,
    cluster: Annotated[str, typer.Option(metavar="NODESxRANKS", help="The ranks, as 8x8.")],
    global_batch: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of a step.")],
    capacity: Capacity = None,
    encoder_capacity: EncoderCapacity = None,
    memory: Memory = None,
    recompute: Recompute = None,
    sharding: Sharding = None,
    sync: SyncChoice = Sync.STEP,
    steps: Steps = 5,
    seed: Seed = 0,
    shuffle: Shuffle = True,
    model: ModelName = None,
    costs: CostsFile = None,
    device: DeviceName = None,
    max_degree: MaxDegree = None,
    degrees: DegreeKind = Degrees.ANY,
    windows: WindowKind = Windows.ANY,
    peer_budget: PeerBudget = "64",
    equal_counts: EqualCounts = False,
    group_by: GroupBy = None,
    compare: Compared = "all",
    draws: Draws = 64,
    slow: Slow = None,
    sweep: Sweep = None,
    picture: Picture = None,
    json: AsJson = False,
) -> None:
    """Compare what several schedulers would make of a source's steps, without running them."""
    from dynapar.simulate_command import simulate_command

    simulate_command(
        source,
        cluster=cluster,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
        budget=budget_request(memory, recompute, sharding),
        sync=sync.value,
        global_batch=global_batch,
        steps=steps,
        seed=seed,
        shuffle=shuffle,
        model=model,
        costs=costs,
        device=device,
        rings=ring_rules(degrees, windows, peer_budget, max_degree),
        equal_counts=equal_counts,
        group_by=group_by,
        compare=compare,
        draws=draws,
        slow=slow or (),
        sweep=sweep,
        picture=picture,
        json=json,
    )


app.command()(inspect)
app.command()(verify_lengths)
app.command()(report)
app.command()(calibrate)
app.add_typer(bench, name="bench")


@app.command()
def train(config: ConfigFile) -> None:
    """Train as CONFIG says, as one rank of `torchrun ... -m dynapar train CONFIG`."""
    from dynapar.train.loop import train_command

    train_command(config)


@app.command()
def verify(
    config: ConfigFile,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Compute in it instead of in CONFIG's precision.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Compare the gradient of CONFIG's steps with that of one process, sample by sample."""
    from dynapar.verify.command import verify_command

    verify_command(config, dtype=None if dtype is None else dtype.value, json=json)


app.command()(check_order)
app.command()(doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and leave the interpreter with its exit code.

    Args:
        arguments: What follows the program's name; None for the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    rest = [argument for argument in given if argument != "--debug"]
    try:
        code = app(rest, prog_name="dynapar", standalone_mode=False)
    except (DynaparError, OSError, ImportError, _USAGE_ERROR) as error:
        ours = isinstance(error, ImportError) and (error.name or "dynapar").startswith("dynapar")
        if ours or len(rest) < len(given):
            raise
        line = f"error: {_message(error)}"
        if first_to_say(line, os.environ):  # not once a rank
            typer.echo(line, err=True)
        code = error.exit_code if isinstance(error, DynaparError) else 2
    except typer.Abort:
        code = 130
    sys.exit(code)


def _message(error: Exception) -> str:
    """What an error says, on one line; after bad use also whose help to read."""
    text = str(error)
    if isinstance(error, ImportError):
        text = (
            f"{error.name} cannot be imported ({text}); expected it installed for this command. "
            "Run `dynapar doctor --quick`, which says what is missing and how to install it"
        )
    if isinstance(error, _USAGE_ERROR):
        usage = cast(_Usage, error)
        command = usage.ctx.command_path if usage.ctx else "dynapar"
        text = f"{usage.format_message().rstrip('.')}. See `{command} --help`"
    return " ".join(text.split())
