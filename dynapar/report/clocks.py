"""Read what the ranks of a run measured, one line of its metrics a step.

Keys that only newer runs have may be missing; what is there must be of the right kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dynapar.errors import SourceError
from dynapar.plan import StepPlan
from dynapar.plan.schema import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """What the ranks measured in one step; seconds."""

    seconds: float
    loss: float
    gradient_norm: float
    digest: str
    steps: tuple[float, ...]
    """For each rank, microbatches and closing pass."""
    waited: tuple[float, ...]
    """For each rank, until the loader had the step."""
    microbatches: tuple[tuple[float, ...], ...]
    """For each rank, wall clock of its microbatches in the order of its queue."""
    busy: tuple[tuple[float, ...], ...] = ()
    """For each rank, CPU time in each of them, waiting not included; empty where not measured."""
    predicted: tuple[tuple[float, ...], ...] = ()
    """For each rank, what its own part of each of them was to take; empty where `busy` is."""
    speeds: tuple[float, ...] = ()
    """For each rank, the speed that the step was planned with; empty where none was followed."""
    paced_makespan: float = 0.0
    """The plan's makespan on ranks of these speeds; 0 where it is not known."""


def read_clocks(row: Mapping[str, Json], where: str) -> Clocks:
    """The measurements in a line of a run's metrics.

    Raises:
        SourceError: A key is missing or holds another kind of value; it is named.
    """
    ranks = row.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise SourceError(
            f"{where}: ranks is {_shown(ranks)}; expected a list with one object a rank. Give the "
            f"file as `dynapar train` wrote it"
        )
    objects: list[dict[str, Json]] = []
    for number, entry in enumerate(ranks):
        if not isinstance(entry, dict):
            raise SourceError(
                f"{where}: ranks[{number}] is {_shown(entry)}; expected an object. Give the file "
                f"as `dynapar train` wrote it"
            )
        objects.append(entry)
    names = [f"ranks[{number}]." for number in range(len(objects))]
    pairs = list(zip(objects, names, strict=True))

    def lists(key: str) -> tuple[tuple[float, ...], ...]:
        return tuple(_numbers(entry, key, where, name) for entry, name in pairs)

    apart = all("microbatches_busy" in entry and "predicted" in entry for entry in objects)
    return Clocks(
        seconds=_number(row, "seconds", where),
        loss=_number(row, "loss", where),
        gradient_norm=_number(row, "gradient_norm", where),
        digest=str(row.get("plan_digest", "")),
        steps=tuple(_number(entry, "step", where, name) for entry, name in pairs),
        waited=tuple(_number(entry, "waited", where, name) for entry, name in pairs),
        microbatches=lists("microbatches"),
        busy=lists("microbatches_busy") if apart else (),
        predicted=lists("predicted") if apart else (),
        speeds=_numbers(row, "speeds", where, "") if "speeds" in row else (),
        paced_makespan=(_number(row, "paced_makespan", where) if "paced_makespan" in row else 0.0),
    )


def _number(row: Mapping[str, Json], key: str, where: str, prefix: str = "") -> float:
    return _as_number(row.get(key), f"{prefix}{key}", where)


def _numbers(row: Mapping[str, Json], key: str, where: str, prefix: str) -> tuple[float, ...]:
    values = row.get(key)
    if not isinstance(values, list):
        raise SourceError(
            f"{where}: {prefix}{key} is {_shown(values)}; expected a list of numbers. Give the "
            f"file as `dynapar train` wrote it"
        )
    return tuple(
        _as_number(value, f"{prefix}{key}[{place}]", where) for place, value in enumerate(values)
    )


def _as_number(value: Json, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SourceError(
            f"{where}: {name} is {_shown(value)}; expected a number. Give the file as "
            f"`dynapar train` wrote it"
        )
    return float(value)


def _shown(value: Json) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def unfit(clocks: Clocks, plan: StepPlan, digest: str) -> str:
    """Why measurements cannot be held against a plan; empty where they can.

    Args:
        clocks: What was measured.
        plan: The plan of the same step.
        digest: Of the plan.
    """
    if clocks.digest and clocks.digest != digest:
        return f"they are of another plan ({clocks.digest[:12]}, not {digest[:12]})"
    if len(clocks.steps) != plan.ranks:
        return f"they are of {len(clocks.steps)} ranks, the plan is for {plan.ranks}"
    for rank in range(plan.ranks):
        expected = sum(entry is not None for entry in plan.queue(rank))
        for times in (clocks.microbatches, clocks.busy, clocks.predicted):
            if times and len(times[rank]) != expected:
                return (
                    f"rank {rank} measured {len(times[rank])} microbatches, its queue has "
                    f"{expected}"
                )
    for name, value in _named(clocks):
        if not math.isfinite(value) or (value < 0 and name != "loss"):
            least = "" if name == "loss" else " of 0 or more"
            return f"{name} is {value}; expected a finite number{least}"
    return ""


def _named(clocks: Clocks) -> Iterator[tuple[str, float]]:
    """Every measurement by the name that it has in its line."""
    yield "seconds", clocks.seconds
    yield "loss", clocks.loss
    yield "gradient_norm", clocks.gradient_norm
    yield "paced_makespan", clocks.paced_makespan
    for name, values in (("step", clocks.steps), ("waited", clocks.waited)):
        yield from ((f"ranks[{rank}].{name}", value) for rank, value in enumerate(values))
    for name, rows in (
        ("microbatches", clocks.microbatches),
        ("microbatches_busy", clocks.busy),
        ("predicted", clocks.predicted),
    ):
        for rank, times in enumerate(rows):
            for place, value in enumerate(times):
                yield f"ranks[{rank}].{name}[{place}]", value
    yield from ((f"speeds[{rank}]", value) for rank, value in enumerate(clocks.speeds))
