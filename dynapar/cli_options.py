"""The options that several commands take, and how each is described."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynapar.errors import ConfigError

if TYPE_CHECKING:
    from dynapar.memory_command import BudgetRequest
    from dynapar.rings import RingRules

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]


class Sync(StrEnum):
    """Where ranks meet."""

    STEP = "step"
    MICROBATCH = "microbatch"


class GroupKind(StrEnum):
    """What samples are grouped by."""

    PREFIX = "prefix"


class Degrees(StrEnum):
    """Which degrees samples may have."""

    ANY = "any"
    POW2 = "pow2"


class Windows(StrEnum):
    """Where a ring may start."""

    ANY = "any"
    ALIGNED = "aligned"


def budget_request(
    memory: str | None, recompute: str | None, sharding: str | None
) -> BudgetRequest | None:
    """The budget that the options ask for; None without --memory.

    Raises:
        ConfigError: What only means something in a budget is given without one.
    """
    if memory is None:
        for name, value in (("recompute", recompute), ("sharding", sharding)):
            if value is not None:
                raise ConfigError(
                    f"--{name} is {value!r} without --memory; expected both, since it says what "
                    "fills the memory. Give --memory, as 80GB, or leave it out"
                )
        return None
    from dynapar.memory_command import BudgetRequest

    return BudgetRequest(memory=memory, recompute=recompute, sharding=sharding)


def ring_rules(
    degrees: Degrees, windows: Windows, peer_budget: str, max_degree: int | None
) -> RingRules:
    """What the options about rings say.

    Raises:
        ConfigError: The peer budget is neither a number nor none.
    """
    from dynapar.rings import RingRules

    if peer_budget != "none" and not peer_budget.isdecimal():
        raise ConfigError(
            f"--peer-budget is {peer_budget!r}; expected a whole number, 0 or more, or none"
        )
    return RingRules(
        degrees=degrees.value,
        windows=windows.value,
        peer_budget=None if peer_budget == "none" else int(peer_budget),
        max_degree=max_degree,
    )


PLAN_NEEDS = (
    "plan needs SOURCE --cluster --capacity --encoder-capacity --global-batch (or --memory --model "
    "instead of capacities), or --check plans.jsonl. See `dynapar plan --help`"
)
PlanSource = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="An index (.parquet), a metadata file (.jsonl), or a workload's name.",
    ),
]
ClusterText = Annotated[str | None, typer.Option(metavar="NODESxRANKS", help="The ranks, as 8x8.")]
Capacity = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="LLM tokens of a rank in a microbatch (inspect, simulate: 16384)."
    ),
]
EncoderCapacity = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Encoder tokens of a rank in a microbatch (there: 65536)."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES", help="Of a rank's device, as 80GB; capacities of --model then follow."
    ),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        metavar="POLICIES",
        help="What microbatches may recompute in --memory: none, selective, full, offload.",
    ),
]
Sharding = Annotated[
    str | None,
    typer.Option(metavar="S", help="Of states in --memory: ddp, zero1, gathered, full."),
]
SyncChoice = Annotated[
    Sync, typer.Option(help="Where ranks meet: DDP step, sharded parameters microbatch.")
]
GlobalBatch = Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples of a step.")]
Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Steps to plan.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the order of samples.")]
Shuffle = Annotated[
    bool, typer.Option("--shuffle/--no-shuffle", help="Or keep the source's own order.")
]
ModelName = Annotated[
    str | None,
    typer.Option(metavar="M", help="Folder or name of the model that metadata's sizes are for."),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="F", help="A cost file, or the shipped costs `harder`; else the shipped reference."
    ),
]
GroupBy = Annotated[
    GroupKind | None,
    typer.Option(help="Deal samples of one prefix into one step, as one tree."),
]
SchedulerName = Annotated[
    str, typer.Option(metavar="NAME", help="dynamic, homogeneous[:DEGREE] or random.")
]
Gate = Annotated[
    float,
    typer.Option(metavar="SHARE", min=0.0, help="Keep one degree unless this share is gained."),
]
MaxDegree = Annotated[int | None, typer.Option(metavar="N", min=1, help="The largest degree.")]
DegreeKind = Annotated[Degrees, typer.Option(help="Any degree, or powers of two alone.")]
WindowKind = Annotated[
    Windows, typer.Option(help="A ring starts at any rank, or at multiples of its size.")
]
PeerBudget = Annotated[
    str, typer.Option(metavar="N|none", help="Other ranks that a rank may meet in a whole run.")
]
EqualCounts = Annotated[
    bool, typer.Option("--equal-counts", help="All ranks run equally many microbatches.")
]
PlansOut = Annotated[
    Path | None, typer.Option(metavar="plans.jsonl", help="Write the plans, one a line.")
]
PlansIn = Annotated[
    Path | None, typer.Option(metavar="plans.jsonl", help="Validate a file of plans instead.")
]

SimulateSource = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="An index (.parquet), a metadata file (.jsonl), or a workload's name.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(metavar="D", help="Costs of --model on A100, H100 or H200, from peak rates."),
]
Compared = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="all, or with commas between: homogeneous, static, static-all, padded, padded-best, "
        "and other people's schedulers: megatron, verl, dhp, entrain.",
    ),
]
Draws = Annotated[int, typer.Option(metavar="N", min=0, help="Of the noise; 0 for none.")]
Slow = Annotated[
    list[str] | None,
    typer.Option(metavar="RANK:FACTOR", help="A rank that is always slower; may be repeated."),
]
Sweep = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=V,V", help="One row a value of ranks (NODESxRANKS), capacity or batch."
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(metavar="P.png", help="Draw the comparison (needs dynapar[report])."),
]
