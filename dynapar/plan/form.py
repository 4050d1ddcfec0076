"""The JSON form of a plan, one step a line, and its digest.

Times are seconds from the step's start; they are whole microseconds, so reading a plan back gives
the same ticks. The digest covers everything but itself and `plan_seconds`; it is taken of the
columns, so that ranks need no records to compare plans.

A plan in which microbatches recompute, or that follows from a budget of bytes, is of version 2,
which adds `memory`, and `recompute` to every microbatch; all others are of version 1, as before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import cast

import numpy as np

from dynapar.errors import ConfigError, PlanError
from dynapar.memory.policies import POLICIES, Policy
from dynapar.meta import AUDIO, IMAGE, VIDEO, SampleTable
from dynapar.plan.budgetform import MEMORY, memory_from_json, memory_to_json
from dynapar.plan.columns import PlanColumns
from dynapar.plan.model import StepPlan, Sync
from dynapar.plan.records import MicroBatch, Parts, Placement, Wave
from dynapar.plan.schema import MOST, Json, Schema, fault_of, first_difference, form_fault
from dynapar.plan.treeform import TREE, tree_to_json, trees_from_json
from dynapar.prefixes import Trees
from dynapar.rings import RingRules

VERSION, RECOMPUTE_VERSION = 1, 2
TICKS_PER_SECOND = 1_000_000
MODALITIES = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


class PlanFormError(PlanError):
    """What was read is no plan at all: a key is missing or holds another kind of value."""


def _seconds(ticks: int) -> float:
    return ticks / TICKS_PER_SECOND


def _samples(table: SampleTable) -> Iterable[Json]:
    offsets = table.unit_offsets.tolist()
    units = table.unit_tokens.tolist()
    columns = zip(
        table.ids,
        table.llm_tokens.tolist(),
        table.text_tokens.tolist(),
        table.label_tokens.tolist(),
        table.modalities.tolist(),
        strict=True,
    )
    for row, (identifier, llm, text, label, bits) in enumerate(columns):
        own = units[offsets[row] : offsets[row + 1]]
        yield {
            "id": identifier,
            "llm_tokens": llm,
            "text_tokens": text,
            "label_tokens": label,
            "modalities": [name for name, bit in MODALITIES.items() if bits & bit],
            "encoder_tokens": sum(own),
            "encoder_units": own,
            **tree_to_json(table.trees, row),
        }


def encoder_calls(micro: MicroBatch, table: SampleTable) -> dict[str, int]:
    """Calls of each encoder in a microbatch: one where any of its ranks encodes, else absent."""
    bits = 0
    for place in micro.placements:
        if place.encoders:
            bits |= int(table.modalities[place.sample])
    calls = {}
    if any(micro.encoder_tokens_per_rank):
        if bits & (IMAGE | VIDEO) or not bits:
            calls["vision"] = 1
        if bits & AUDIO:
            calls["audio"] = 1
    return calls


def version_of(plan: StepPlan) -> int:
    """`RECOMPUTE_VERSION` of a plan that says something of memory, else `VERSION`."""
    recomputes = plan.memory is not None or plan.columns.recompute.any()
    return RECOMPUTE_VERSION if recomputes else VERSION


def _microbatch(number: int, micro: MicroBatch, table: SampleTable, version: int) -> Json:
    again: dict[str, Json] = {"recompute": micro.recompute} if version > VERSION else {}
    return {
        "id": number,
        "ranks": list(micro.ranks),
        "samples": [
            {
                "id": table.ids[place.sample],
                "ranks": list(place.ranks),
                "encoders": list(place.encoders),
            }
            for place in micro.placements
        ],
        "tokens_per_rank": list(micro.tokens_per_rank),
        "encoder_tokens_per_rank": list(micro.encoder_tokens_per_rank),
        "encoder_calls": cast(Json, encoder_calls(micro, table)),
        **again,
        "seconds": _seconds(micro.ticks),
        "start": _seconds(micro.start),
        "parts": {key: _seconds(value) for key, value in micro.parts._asdict().items()},
    }


def _head(plan: StepPlan) -> dict[str, Json]:
    """What a plan says of the whole step."""
    version = version_of(plan)
    memory: dict[str, Json] = {}
    if version > VERSION:
        memory["memory"] = memory_to_json(plan.memory)
    return {
        "version": version,
        "step": plan.step,
        "sync": plan.sync,
        "ranks": plan.ranks,
        "ranks_per_node": plan.ranks_per_node,
        "capacity": plan.capacity,
        "encoder_capacity": plan.encoder_capacity,
        **memory,
        "rings": asdict(plan.rings),
        "equal_counts": plan.equal_counts,
        "costs": plan.costs,
    }


def _tail(plan: StepPlan) -> dict[str, Json]:
    """How good the plan is."""
    return {
        "makespan": _seconds(plan.makespan),
        "lower_bound": _seconds(plan.lower_bound),
        "gap": plan.gap,
        "optimal": plan.optimal,
        "homogeneous": {
            "degree": plan.homogeneous_degree,
            "makespan": _seconds(plan.homogeneous_makespan),
        },
        "chosen": plan.chosen,
    }


def _body(plan: StepPlan) -> dict[str, Json]:
    """Everything that the digest covers."""
    body: dict[str, Json] = {
        **_head(plan),
        "samples": list(_samples(plan.samples)),
        "microbatches": [
            _microbatch(number, micro, plan.samples, version_of(plan))
            for number, micro in enumerate(plan.microbatches)
        ],
        "queues": [list(queue) for queue in plan.queues],
        **_tail(plan),
    }
    if plan.sync == "microbatch":
        body["waves"] = [
            {
                "start": _seconds(wave.start),
                "seconds": _seconds(wave.encoder + wave.llm),
                "encoder": _seconds(wave.encoder),
                "llm": _seconds(wave.llm),
            }
            for wave in plan.waves
        ]
    return body


def plan_digest(plan: StepPlan) -> str:
    """SHA-256, in hex, of all that ranks must agree on: equal for equal plans, on any machine.

    Of a JSON line of the values of the whole step, and of each column of the samples and of the
    plan: its name, its shape, its entries as little-endian int64.
    """
    digest = hashlib.sha256(_text({**_head(plan), **_tail(plan)}))
    parts: list[SampleTable | Trees | PlanColumns] = [plan.samples, plan.columns]
    if plan.samples.trees is not None:
        parts.append(plan.samples.trees)
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name == "recompute" and version_of(plan) == VERSION:
                continue
            if field.name in ("prefixes", "trees"):
                continue
            if isinstance(value, np.ndarray):
                digest.update(_text([field.name, *value.shape]))
                digest.update(np.ascontiguousarray(value, "<i8").tobytes())
            else:
                digest.update(_text([field.name, value]))
    return digest.hexdigest()


def _text(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def plan_to_json(plan: StepPlan) -> dict[str, Json]:
    """The JSON form of a plan, ready for `json.dumps`."""
    return {**_body(plan), "digest": plan_digest(plan), "plan_seconds": plan.plan_seconds}


def plan_from_json(values: Mapping[str, Json]) -> StepPlan:
    """Read the JSON form of a plan; `validate` then says whether it is a good one.

    Args:
        values: One parsed line of a plans file.

    Raises:
        PlanFormError: It is of another version, lacks a key, or a key holds another kind of value.
        PlanError: It names an unknown sample, has a key too many, or holds a value or a digest
            that is not that of its other content; the first such key is named.
    """
    version = values.get("version")
    if version not in (VERSION, RECOMPUTE_VERSION):
        raise PlanFormError(
            f"the plan has version {version!r}; expected {VERSION} or {RECOMPUTE_VERSION}: plan "
            "again"
        )
    if fault := form_fault(values, _more(values)):
        raise PlanFormError(
            f"step {values.get('step')!r}: the plan's form is broken: {fault}. `dynapar plan` "
            f"writes all keys: plan again"
        )
    for number, record in enumerate(cast(list[dict[str, Json]], values["samples"])):
        if record.keys() & TREE.keys() and (fault := fault_of(record, TREE, f"samples[{number}]")):
            raise PlanFormError(
                f"step {values['step']!r}: the plan's form is broken: {fault}. A tree has a prefix "
                f"and members: plan again"
            )
    plan = _read(cast(dict[str, object], values))
    body = _body(plan)
    left_out = ("digest", "plan_seconds")
    written = {key: value for key, value in values.items() if key not in left_out}
    if fault := first_difference(written, body):
        raise PlanError(
            f"step {plan.step}: {fault} by the rest of the plan; the line was changed after it was "
            f"written: plan again"
        )
    digest = plan_digest(plan)
    if values["digest"] != digest:
        raise PlanError(
            f"step {plan.step}: the plan's digest is {str(values['digest'])[:12]}, its "
            f"content's is {digest[:12]}; the line was changed after it was written: plan again"
        )
    return plan


def _more(values: Mapping[str, Json]) -> dict[str, Schema]:
    """What version 2 adds."""
    if values["version"] == VERSION:
        return {}
    more: dict[str, Schema] = {"microbatches": [{"recompute": frozenset(POLICIES)}]}
    return more | ({"memory": MEMORY} if values.get("memory") is not None else {})


def _ticks(value: object) -> int:
    ticks = round(float(cast(float, value)) * TICKS_PER_SECOND)
    if abs(ticks) > MOST:
        raise PlanFormError(
            f"the plan has a time of {value} seconds; expected at most {MOST / TICKS_PER_SECOND}, "
            f"which is exact in microseconds: plan again"
        )
    return ticks


def _table(rows: list[dict[str, object]]) -> SampleTable:
    def column(key: str) -> list[int]:
        return [int(cast(int, row[key])) for row in rows]

    units = [cast(list[int], row["encoder_units"]) for row in rows]
    bits = [sum(MODALITIES[name] for name in cast(list[str], row["modalities"])) for row in rows]
    for row, own in zip(rows, units, strict=True):
        if sum(own) != row["encoder_tokens"]:
            raise PlanError(
                f"sample {row['id']!r} has {row['encoder_tokens']} encoder_tokens; its "
                f"encoder_units sum to {sum(own)}"
            )
    counts = [len(own) for own in units]
    return SampleTable(
        ids=tuple(str(row["id"]) for row in rows),
        llm_tokens=np.array(column("llm_tokens"), np.int64),
        text_tokens=np.array(column("text_tokens"), np.int64),
        label_tokens=np.array(column("label_tokens"), np.int64),
        modalities=np.array(bits, np.uint8),
        unit_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        unit_tokens=np.array([unit for own in units for unit in own], np.int64),
        trees=trees_from_json(rows),
    )


def _read_microbatch(values: dict[str, object], rows: Mapping[str, int]) -> MicroBatch:
    placements = []
    for entry in cast(list[dict[str, object]], values["samples"]):
        identifier = str(entry["id"])
        if identifier not in rows:
            raise PlanError(
                f"microbatch {values['id']} runs sample {identifier!r}; expected one of the "
                f"plan's {len(rows)} samples"
            )
        placements.append(
            Placement(
                sample=rows[identifier],
                ranks=tuple(cast(list[int], entry["ranks"])),
                encoders=tuple(cast(list[int], entry["encoders"])),
            )
        )
    parts = cast(dict[str, object], values["parts"])
    return MicroBatch(
        ranks=tuple(cast(list[int], values["ranks"])),
        placements=tuple(placements),
        tokens_per_rank=tuple(cast(list[int], values["tokens_per_rank"])),
        encoder_tokens_per_rank=tuple(cast(list[int], values["encoder_tokens_per_rank"])),
        ticks=_ticks(values["seconds"]),
        start=_ticks(values["start"]),
        parts=Parts(**{key: _ticks(parts[key]) for key in Parts._fields}),
        recompute=cast(Policy, values.get("recompute", "none")),
    )


def _rings(values: dict[str, Json]) -> RingRules:
    def limit(key: str) -> int | None:
        return None if values[key] is None else int(cast(int, values[key]))

    try:
        return RingRules(
            degrees="pow2" if values["degrees"] == "pow2" else "any",
            windows="aligned" if values["windows"] == "aligned" else "any",
            peer_budget=limit("peer_budget"),
            max_degree=limit("max_degree"),
        )
    except ConfigError as error:
        raise PlanError(f"the plan's rings.{error}: plan again") from None


def _read(values: dict[str, object]) -> StepPlan:
    table = _table(cast(list[dict[str, object]], values["samples"]))
    rows = {identifier: row for row, identifier in enumerate(table.ids)}
    entries = cast(list[dict[str, object]], values["microbatches"])
    if [entry["id"] for entry in entries] != list(range(len(entries))):
        raise PlanError("microbatch ids are not 0, 1, 2, ... in order; the order is the global one")
    homogeneous = cast(dict[str, object], values["homogeneous"])
    sync: Sync = "microbatch" if values["sync"] == "microbatch" else "step"
    waves = cast(list[dict[str, object]], values["waves"] if sync == "microbatch" else [])

    def number(key: str) -> int:
        return int(cast(int, values[key]))

    return StepPlan(
        step=number("step"),
        sync=sync,
        ranks=number("ranks"),
        ranks_per_node=number("ranks_per_node"),
        capacity=number("capacity"),
        encoder_capacity=number("encoder_capacity"),
        samples=table,
        columns=PlanColumns.from_records(
            microbatches=[_read_microbatch(entry, rows) for entry in entries],
            queues=cast(list[list[int | None]], values["queues"]),
            waves=[
                Wave(*(_ticks(wave[key]) for key in ("start", "encoder", "llm"))) for wave in waves
            ],
        ),
        makespan=_ticks(values["makespan"]),
        lower_bound=_ticks(values["lower_bound"]),
        homogeneous_degree=int(cast(int, homogeneous["degree"])),
        homogeneous_makespan=_ticks(homogeneous["makespan"]),
        chosen="dynamic" if values["chosen"] == "dynamic" else "homogeneous",
        plan_seconds=float(cast(float, values["plan_seconds"])),
        costs=str(values["costs"]),
        rings=_rings(cast(dict[str, Json], values["rings"])),
        equal_counts=values["equal_counts"] is True,
        optimal=values["optimal"] is True,
        memory=memory_from_json(cast(Json, values.get("memory"))),
    )
