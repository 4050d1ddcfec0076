"""The command `dynapar inspect`: what a file or a sample becomes and costs, and why."""

from __future__ import annotations

import json as json_library
import mimetypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.console import Cell, show_json, show_table
from dynapar.costs import Costs, load_costs
from dynapar.data.media import media_size
from dynapar.data.records import MediaFile
from dynapar.devices import costs_for
from dynapar.errors import ConfigError, SampleError, SourceError
from dynapar.flops import PARTS, Part, TrainingWork
from dynapar.inspection import (
    AtDegree,
    Item,
    Subject,
    choose,
    degrees,
    describe_media,
    training_work,
)
from dynapar.meta import KINDS, IntArray, SampleTable, media_by_size, read_metadata_line
from dynapar.rings import RingRules, allowed_degrees, narrowing
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, VIDEO_KIND, MediaTokens, ModelShape

if TYPE_CHECKING:
    from dynapar.planner import PlannerConfig

NAMES = {IMAGE_KIND: "image", VIDEO_KIND: "video", AUDIO_KIND: "audio clip"}


def inspect_command(
    target: str,
    *,
    model: str,
    index: Path | None = None,
    among: str | None = None,
    cluster: str = "1x8",
    capacity: int = 16_384,
    encoder_capacity: int = 65_536,
    priced: Callable[[Costs], Costs] = lambda costs: costs,
    global_batch: int = 64,
    costs: Path | None = None,
    device: str = "H100",
    frozen: Sequence[str] = (),
    rings: RingRules | None = None,
    json: bool = False,
) -> None:
    """Explain an image, video or audio file, a metadata line, or a sample of an index.

    Args:
        target: A media file, a metadata line (a JSON object), or, with `index`, a sample's id.
        model: A model's folder, or the name of a preset.
        index: Where the id is looked up.
        among: A source whose samples fill the step that is planned: a workload, an index or a
            metadata file. None: no step is planned, memory alone decides.
        cluster: NODESxRANKS.
        capacity: LLM tokens of a rank in a microbatch.
        encoder_capacity: Encoder tokens of a rank in a microbatch.
        priced: Makes of the costs those under the recompute policy of all microbatches.
        global_batch: Samples of the planned step.
        costs: A cost file; None: from the peak rates of `device`.
        device: A100, H100 or H200.
        frozen: Parts that are not trained.
        rings: What narrows the degrees; None for the planner's own rules.
        json: Print JSON instead of text.

    Raises:
        DynaparError: The target, the model or a setting cannot be used.
    """
    shape = load_model_shape(model)
    parts = _parts(frozen)
    ranks = Cluster.parse(cluster)
    used = priced(load_costs(costs) if costs is not None else costs_for(shape, device))
    subject = read_subject(target, shape, index)
    work = training_work(shape, subject, parts)
    rules = rings or RingRules()
    table = degrees(
        subject,
        cluster=ranks,
        costs=used,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
        rings=rules,
    )
    degree, why = choose(
        table,
        subject,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
        narrowed=narrowing(ranks, rules),
    )
    step = None
    if among is not None and degree:
        from dynapar.planner import PlannerConfig

        config = PlannerConfig(
            capacity=capacity, encoder_capacity=encoder_capacity, **asdict(rules)
        )
        step = _step(subject, among, model, ranks, used, config, global_batch)
    report = _report(shape, subject, work, table, degree, why, used, step)
    if json:
        show_json(report)
    else:
        _print(report, shape, subject, work, table)


def read_subject(target: str, shape: ModelShape, index: Path | None) -> Subject:
    """What a target stands for.

    Raises:
        SourceError: There is no such file or id, or the file is of no known kind.
        SampleError: It has no size, or the model cannot take it.
    """
    if index is not None:
        return _from_index(target, shape, index)
    if target.lstrip().startswith("{"):
        return _from_line(target, shape)
    path = Path(target)
    if not path.is_file():
        raise SourceError(
            f"{target!r} is no file; expected an image, video or audio file, a metadata line "
            '({"id": ..., "text_tokens": ...}), or an id together with --index X.parquet'
        )
    label, tokens = _from_file(path, shape)
    return Subject(id=path.name, text_tokens=tokens.boundary_tokens, items=(Item(label, tokens),))


def _from_file(path: Path, shape: ModelShape) -> tuple[str, MediaTokens]:
    kind = (mimetypes.guess_type(path.name)[0] or "").partition("/")[0]
    kind = {".opus": "audio", ".mkv": "video", ".webp": "image"}.get(path.suffix.lower(), kind)
    if kind == "audio":
        from dynapar.data.audio import audio_seconds

        seconds = audio_seconds(MediaFile(AUDIO_KIND, "file", path, 0, -1))
        return f"audio of {seconds:g} seconds", shape.audio(seconds)
    if kind not in ("image", "video"):
        raise SourceError(
            f"{str(path)!r} is of no known kind; expected the suffix of an image, a video or an "
            "audio file"
        )
    item = MediaFile(IMAGE_KIND if kind == "image" else VIDEO_KIND, "file", path, 0, -1)
    size = media_size(item)
    label = f"{kind} of {size.height:,} x {size.width:,} pixels"
    if kind == "image":
        return label, shape.image(size.height, size.width)
    label += f", {size.frames:,} frames at {size.fps:.4g} a second"
    return label, shape.video(size.frames, size.fps, size.height, size.width)


def _from_line(line: str, shape: ModelShape) -> Subject:
    where = "the metadata line"
    row = read_metadata_line(line, where, shape)
    media = json_library.loads(line).get("media", [])
    images = sum(1 for item in media if item["kind"] == "image")
    items = []
    for place, item in enumerate(media):
        spot = f"{where}, media[{place}]"
        items.append(_item(item, spot, shape, images))
    return Subject(id=row.id, text_tokens=row.text, items=tuple(items))


def _item(item: dict[str, object], where: str, shape: ModelShape, images: int) -> Item:
    kind = str(item["kind"])
    if "llm_tokens" not in item:
        tokens = media_by_size(kind, item, where, shape, images)
        sizes = {key: value for key, value in item.items() if key != "kind"}
        return Item(f"{kind} of {', '.join(f'{k} {v}' for k, v in sizes.items())}", tokens)
    units = item.get("encoder_units", [item["encoder_tokens"]])
    sizes_of = [int(unit) for unit in units] if isinstance(units, list) else []
    if len(set(sizes_of)) > 1:
        raise SampleError(
            f"{where} has encoder_units of different sizes {sizes_of[:4]}; inspect expected equal "
            "ones, or sizes in pixels or seconds"
        )
    number = {1: IMAGE_KIND, 2: VIDEO_KIND, 4: AUDIO_KIND}[KINDS[kind]]
    unit = sizes_of[0] if sizes_of else 0
    llm = int(str(item["llm_tokens"]))
    return Item(
        f"{kind}, tokens given",
        MediaTokens(number, (0, 0), (len(sizes_of), 1, unit), llm, (), 0.0),
    )


def _from_index(name: str, shape: ModelShape, path: Path) -> Subject:
    from dynapar.data.indexfile import media_tokens, read_index

    index = read_index(path)
    if name not in index.table.ids:
        raise SourceError(
            f"index {path} has no sample {name!r}; its {len(index):,} ids start with "
            f"{', '.join(map(repr, index.table.ids[:3]))}"
        )
    row = index.table.ids.index(name)
    items = []
    media = index.media(row)
    for medium, tokens in zip(media, media_tokens(media, shape), strict=True):
        label = f"{NAMES[medium.kind]} of {medium.height:,} x {medium.width:,} pixels"
        if medium.kind == VIDEO_KIND:
            label += f", {medium.frames:,} frames at {medium.fps:.4g} a second"
        if medium.kind == AUDIO_KIND:
            label = f"audio of {medium.seconds:g} seconds"
        items.append(Item(label, tokens))
    return Subject(id=name, text_tokens=int(index.table.text_tokens[row]), items=tuple(items))


def _parts(names: Sequence[str]) -> list[Part]:
    known = {str(part): part for part in PARTS}
    for name in names:
        if name not in known:
            raise ConfigError(f"frozen is {name!r}; expected some of {', '.join(PARTS)}")
    return [known[name] for name in names]


def _step(
    subject: Subject,
    among: str,
    model: str,
    cluster: Cluster,
    costs: Costs,
    config: PlannerConfig,
    global_batch: int,
) -> dict[str, Cell]:
    """Plan one step of the sample and others, and say what the sample got."""
    from dynapar.data.sampler import Sampler
    from dynapar.planner import plan_step
    from dynapar.planning import read_source
    from dynapar.workloads import WORKLOADS, draw

    others = global_batch - 1
    if among in WORKLOADS:
        largest = allowed_degrees(cluster, config.rings)[-1]
        table = draw(among, others, seed=0, longest=largest * config.capacity)
    else:
        whole = read_source(among, model=model)
        rows = Sampler(len(whole), global_batch=global_batch, seed=0).rows(0)
        table = whole.draw(rows[:others])
    plan = plan_step(_joined(subject, table), step=0, cluster=cluster, costs=costs, config=config)
    batch = next(b for b in plan.microbatches if any(p.sample == 0 for p in b.placements))
    (placed,) = (p for p in batch.placements if p.sample == 0)
    return {
        "among": among,
        "samples": global_batch,
        "degree": len(placed.ranks),
        "microbatch_ranks": len(batch.ranks),
        "makespan_seconds": plan.makespan / 1e6,
    }


def _joined(subject: Subject, others: SampleTable) -> SampleTable:
    """The sample, as row 0, before others."""
    bits = 0
    for item in subject.items:
        bits |= {IMAGE_KIND: 1, VIDEO_KIND: 2, AUDIO_KIND: 4}[item.tokens.kind]
    units = subject.units

    def front(first: int, column: IntArray) -> IntArray:
        return np.concatenate([np.array([first], column.dtype), column])

    return SampleTable(
        ids=(f"{subject.id} (inspected)", *others.ids),
        llm_tokens=front(subject.llm_tokens, others.llm_tokens),
        text_tokens=front(subject.text_tokens, others.text_tokens),
        label_tokens=front(max(subject.text_tokens - 1, 0), others.label_tokens),
        modalities=np.concatenate([np.array([bits], np.uint8), others.modalities]),
        unit_offsets=front(0, others.unit_offsets + len(units)),
        unit_tokens=np.concatenate([np.array(units, np.int64), others.unit_tokens]),
    )


def _report(
    shape: ModelShape,
    subject: Subject,
    work: Sequence[TrainingWork],
    table: Sequence[AtDegree],
    degree: int,
    why: str,
    costs: Costs,
    step: dict[str, Cell] | None,
) -> dict[str, object]:
    """All that is known of a sample, as JSON."""
    used = next((row for row in table if row.degree == degree), None)
    report: dict[str, object] = {
        "id": subject.id,
        "model": shape.name,
        "llm_tokens": subject.llm_tokens,
        "text_tokens": subject.text_tokens,
        "encoder_tokens": sum(subject.units),
        "encoder_units": len(subject.units),
        "media": [
            {
                "source": item.label,
                "size": list(item.tokens.size),
                "grid": list(item.tokens.grid),
                "llm_tokens": item.tokens.llm_tokens,
                "boundary_tokens": item.tokens.boundary_tokens,
                "encoder_tokens": item.tokens.units * item.tokens.unit_tokens,
                "frames": len(item.tokens.frames),
                "steps": list(describe_media(shape, item)),
            }
            for item in subject.items
        ],
        "flops": [row._asdict() for row in work],
        "flops_total": sum(row.forward + row.backward for row in work),
        "encoder_share": _encoder_share(work),
        "degree": degree,
        "why": why,
        "seconds": None if used is None else used.seconds,
        "degrees": [row._asdict() for row in table],
        "costs": costs.name,
        "measured": costs.measured,
    }
    if step is not None:
        spent = 0.0
        for row in table:
            if row.degree == step["degree"]:
                spent = row.seconds * row.degree
        ranks = table[-1].degree
        whole = float(step["makespan_seconds"]) * ranks
        report["step"] = {**step, "share": spent / whole if whole else 0.0}
    return report


def _encoder_share(work: Sequence[TrainingWork]) -> float:
    total = sum(row.forward + row.backward for row in work)
    encoders = sum(row.forward + row.backward for row in work if row.part != "llm")
    return encoders / total if total else 0.0


def _print(
    report: dict[str, object],
    shape: ModelShape,
    subject: Subject,
    work: Sequence[TrainingWork],
    table: Sequence[AtDegree],
) -> None:
    print("\n".join(_lines(report, shape, subject)))
    rows: list[dict[str, Cell]] = [
        {
            "part": row.part,
            "module": row.module,
            "forward GFLOP": round(row.forward / 1e9, 2),
            "backward GFLOP": round(row.backward / 1e9, 2),
        }
        for row in work
    ]
    show_table("FLOPs", rows)
    show_table(
        f"By degree, {report['costs']}{'' if report['measured'] else ' (not measured)'}",
        [
            {
                "degree": row.degree,
                "LLM tokens a rank": row.tokens,
                "encoder tokens a rank": row.encoder_tokens,
                "ms": round(1e3 * row.seconds, 2),
                "fits": "yes" if row.fits else "no",
            }
            for row in table
        ],
    )


def _lines(report: dict[str, object], shape: ModelShape, subject: Subject) -> Iterator[str]:
    yield (
        f"{subject.id}, by {shape.name}: {subject.llm_tokens:,} LLM tokens "
        f"({subject.text_tokens:,} of text), {sum(subject.units):,} encoder tokens in "
        f"{len(subject.units):,} unit{'' if len(subject.units) == 1 else 's'}"
    )
    for item in subject.items:
        yield f"  {item.label}"
        for line in describe_media(shape, item) if item.tokens.size != (0, 0) else ():
            yield f"    -> {line}"
    share = report["encoder_share"]
    yield f"  {100 * float(str(share)):.1f} % of its FLOPs are spent before the language model"
    degree = report["degree"]
    yield (
        f"Degree {degree} at least: {report['why']}."
        if degree
        else f"It does not fit: {report['why']}"
    )
    step = report.get("step")
    if isinstance(step, dict):
        yield (
            f"In a step of {step['samples']} samples among {step['among']}: degree "
            f"{step['degree']} in a microbatch of {step['microbatch_ranks']} ranks, "
            f"{100 * step['share']:.2f} % of the step's {step['makespan_seconds']:.3f} s on all "
            "ranks."
        )
