"""What `dynapar inspect` and `dynapar verify-lengths` take; `dynapar.cli` registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynapar.cli_options import (
    Capacity,
    DegreeKind,
    Degrees,
    EncoderCapacity,
    MaxDegree,
    Memory,
    PeerBudget,
    Recompute,
    Sharding,
    WindowKind,
    Windows,
    budget_request,
    ring_rules,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ModelName = Annotated[
    str, typer.Option(metavar="M", help="A model's folder, or the name of a preset.")
]


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_SAMPLE",
            help="An image, video or audio file, a metadata line, or an id with --index.",
        ),
    ],
    model: ModelName,
    index: Annotated[
        Path | None, typer.Option(metavar="X.parquet", help="The index that has the id.")
    ] = None,
    among: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Plan a step of it and samples of SOURCE: a workload, an index, a metadata file.",
        ),
    ] = None,
    cluster: Annotated[str, typer.Option(metavar="NODESxRANKS", help="The ranks.")] = "1x8",
    capacity: Capacity = None,
    encoder_capacity: EncoderCapacity = None,
    memory: Memory = None,
    recompute: Recompute = None,
    sharding: Sharding = None,
    global_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Samples of the planned step.")
    ] = 64,
    costs: Annotated[
        Path | None, typer.Option(metavar="F", help="A cost file; else the peak rates of --device.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="D", help="A100, H100 or H200.")] = "H100",
    frozen: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="vision, audio, merger or llm; may be repeated."),
    ] = None,
    max_degree: MaxDegree = None,
    degrees: DegreeKind = Degrees.ANY,
    windows: WindowKind = Windows.ANY,
    peer_budget: PeerBudget = "64",
    json: AsJson = False,
) -> None:
    """Explain a sample: its tokens, its FLOPs, and the degree that it needs."""
    from dynapar.cluster import Cluster
    from dynapar.inspect_command import inspect_command
    from dynapar.memory_command import room_under_one

    rings = ring_rules(degrees, windows, peer_budget, max_degree)
    room = room_under_one(
        budget_request(memory, recompute, sharding),
        model,
        cluster=Cluster.parse(cluster),
        sync="step" if sharding != "full" else "microbatch",
        rings=rings,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
    )
    inspect_command(
        target,
        model=model,
        index=index,
        among=among,
        cluster=cluster,
        capacity=room.capacity,
        encoder_capacity=room.encoder_capacity,
        priced=room.priced,
        global_batch=global_batch,
        costs=costs,
        device=device,
        frozen=frozen or (),
        rings=rings,
        json=json,
    )


def verify_lengths(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A conversation file (.jsonl, .json) or webdataset shards.",
        ),
    ],
    model: Annotated[str, typer.Option(metavar="M", help="A model's folder.")],
    n: Annotated[int, typer.Option("--n", metavar="N", min=1, help="Samples to compare.")] = 200,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of their choice.")] = 0,
    index: Annotated[
        Path | None, typer.Option(metavar="X.parquet", help="Compare its rows, not new headers.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Compare planned lengths with those of the model's own processor."""
    from dynapar.verify_lengths import verify_lengths_command

    verify_lengths_command(source, model=model, samples=n, seed=seed, index=index, json=json)
