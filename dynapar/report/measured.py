"""Read what a run measured, and set it beside what was predicted.

A microbatch's predicted time runs from when its ring is complete; its measured time is therefore
that of its last rank to arrive, the least over its ranks. A rank's speed is judged by the
microbatches that it ran alone, each against the median rank of its own step, so that a long step, a
warm-up or a wrong common scale makes nobody a straggler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapar.costs import TICKS_PER_SECOND
from dynapar.errors import SourceError
from dynapar.plan import StepPlan
from dynapar.plan.schema import Json
from dynapar.report.mix import CELLS_PER_DECADE
from dynapar.report.model import Cell, Measured, MeasuredStep, RankFigures

FloatArray = npt.NDArray[np.float64]

WARM_UP = 1
"""First steps of a run that scale and errors leave out, where others are left."""
LEAST_SLOW = 0.10
"""A rank that takes no longer than this above the others is none to worry about."""
DEVIATIONS = 4.0
"""Standard errors of a rank's median beyond which it is no noise."""


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
    """For each rank, its microbatches in the order of its queue."""


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
    return Clocks(
        seconds=_number(row, "seconds", where),
        loss=_number(row, "loss", where),
        gradient_norm=_number(row, "gradient_norm", where),
        digest=str(row.get("plan_digest", "")),
        steps=tuple(_number(entry, "step", where, name) for entry, name in pairs),
        waited=tuple(_number(entry, "waited", where, name) for entry, name in pairs),
        microbatches=tuple(_numbers(entry, "microbatches", where, name) for entry, name in pairs),
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
    for rank, times in enumerate(clocks.microbatches):
        expected = sum(entry is not None for entry in plan.queue(rank))
        if len(times) != expected:
            return f"rank {rank} measured {len(times)} microbatches, its queue has {expected}"
    named = [
        ("seconds", clocks.seconds),
        ("loss", clocks.loss),
        ("gradient_norm", clocks.gradient_norm),
        *((f"ranks[{rank}].step", value) for rank, value in enumerate(clocks.steps)),
        *((f"ranks[{rank}].waited", value) for rank, value in enumerate(clocks.waited)),
        *(
            (f"ranks[{rank}].microbatches[{place}]", value)
            for rank, times in enumerate(clocks.microbatches)
            for place, value in enumerate(times)
        ),
    ]
    for name, value in named:
        if not math.isfinite(value) or (value < 0 and name != "loss"):
            return f"{name} is {value}, which is no time that can be measured"
    return ""


class MeasuredBuilder:
    """Adds up what was measured, step by step."""

    def __init__(self) -> None:
        self._steps: list[MeasuredStep] = []
        self._pairs: Counter[tuple[str, int, int]] = Counter()
        self._ratios: list[FloatArray] = []
        self._relative: list[tuple[int, float]] = []
        self._last: Counter[int] = Counter()
        self._ranks = 0

    def add(self, plan: StepPlan, clocks: Clocks) -> None:
        """Add a step whose measurements fit its plan."""
        totals = [sum(times) for times in clocks.microbatches]
        makespan, planned = max(totals), plan.makespan / TICKS_PER_SECOND
        self._ranks = max(self._ranks, plan.ranks)
        self._last[int(np.argmax(totals))] += 1
        self._steps.append(
            MeasuredStep(
                step=plan.step,
                seconds=clocks.seconds,
                tokens_per_second=int(plan.samples.llm_tokens.sum()) / max(clocks.seconds, 1e-9),
                makespan=makespan,
                step_seconds=max(clocks.steps),
                waited=max(clocks.waited),
                error=makespan / planned - 1 if planned else 0.0,
                loss=clocks.loss,
                gradient_norm=clocks.gradient_norm,
            )
        )
        measured = microbatch_seconds(plan, clocks)
        predicted = plan.columns.ticks / TICKS_PER_SECOND
        width = np.diff(plan.columns.rank_offsets)
        known = (predicted > 0) & (measured > 0)
        ratios = measured[known] / predicted[known]
        self._ratios.append(ratios)
        squares = np.floor(np.log10(np.column_stack([predicted, measured])[known] * 1e6) * GRID)
        for single, (x, y) in zip(
            (width[known] == 1).tolist(), squares.astype(int).tolist(), strict=True
        ):
            self._pairs["single" if single else "ring", x, y] += 1
        alone = known & (width == 1)
        own = measured[alone] / predicted[alone] / step_pace(plan, measured)
        first = plan.columns.ranks[plan.columns.rank_offsets[:-1]]
        self._relative += zip(first[alone].tolist(), own.tolist(), strict=True)

    def result(self) -> Measured | None:
        """What the run measured; None where no step has measurements."""
        if not self._steps:
            return None
        skipped = WARM_UP if len(self._steps) > 2 else 0
        steps = 1 + np.array([step.error for step in self._steps[skipped:]])
        ratios = np.concatenate(self._ratios[skipped:])
        scale, strayed = _scale(steps)
        own_scale, own_strayed = _scale(ratios)
        return Measured(
            steps=tuple(self._steps),
            warm_up=skipped,
            scale=scale,
            step_error=float(np.median(strayed)),
            microbatch_scale=own_scale,
            microbatch_error=float(np.median(own_strayed)),
            microbatch_error_90=float(np.quantile(own_strayed, 0.9)),
            pairs=tuple(
                Cell(kind, _middle(x), _middle(y), count)
                for (kind, x, y), count in sorted(self._pairs.items())
            ),
            ranks=self._rank_figures(),
        )

    def _rank_figures(self) -> tuple[RankFigures, ...]:
        numbers = np.array([rank for rank, _ in self._relative], np.int64)
        factors = np.array([factor for _, factor in self._relative], np.float64)
        own = [factors[numbers == rank] for rank in range(self._ranks)]
        spread = _spread(own)
        found = []
        for rank, ratios in enumerate(own):
            factor = float(np.median(ratios)) if len(ratios) else 1.0
            noise = DEVIATIONS * 1.2533 * spread / math.sqrt(max(len(ratios), 1))
            limit = 1 + max(LEAST_SLOW, noise)
            found.append(
                RankFigures(rank, factor, limit, len(ratios), self._last[rank], factor > limit)
            )
        return tuple(found)


GRID = 2 * CELLS_PER_DECADE
"""Squares a decade of predicted against measured."""


def _middle(square: int) -> float:
    return float(10.0 ** ((square + 0.5) / GRID) / TICKS_PER_SECOND)


def _spread(groups: list[FloatArray]) -> float:
    """How far values stray inside their own groups: a robust standard deviation.

    From each group's median, of groups of 3 or more; a slow rank is thus no noise itself. Without
    such groups from 1.
    """
    strayed = [np.abs(group / np.median(group) - 1) for group in groups if len(group) > 2]
    strayed = strayed or [np.abs(group - 1) for group in groups if len(group)]
    return 1.4826 * float(np.median(np.concatenate(strayed))) if strayed else 0.0


def _scale(ratios: FloatArray) -> tuple[float, FloatArray]:
    """The median of ratios, and how far each is from it, as a share of it."""
    if not len(ratios):
        return 1.0, np.zeros(1)
    scale = float(np.median(ratios))
    return scale, np.abs(ratios / scale - 1)


def step_pace(plan: StepPlan, measured: FloatArray) -> float:
    """Measured over predicted time of a step's median rank; each rank has one vote.

    A rank votes by the microbatches that it ran alone; where there are none, by its rings, in
    which others may have been the slow ones.

    Args:
        plan: The step.
        measured: (B,) seconds of its microbatches.
    """
    columns = plan.columns
    width = np.diff(columns.rank_offsets)
    rows = np.repeat(np.arange(len(width)), width)
    votes = np.full(plan.ranks, np.nan)
    for chosen in (width > 1, width == 1):
        held = chosen[rows]
        ranks, row = columns.ranks[held], rows[held]
        took = np.bincount(ranks, weights=measured[row], minlength=plan.ranks)
        due = np.bincount(ranks, weights=columns.ticks[row], minlength=plan.ranks)
        votes[due > 0] = took[due > 0] / due[due > 0] * TICKS_PER_SECOND
    votes = votes[votes > 0]
    return float(np.median(votes)) if len(votes) else 1.0


def microbatch_seconds(plan: StepPlan, clocks: Clocks) -> FloatArray:
    """(B,) measured time of each microbatch: that of its last rank to arrive.

    Args:
        plan: The step.
        clocks: Measurements that fit it.
    """
    found = np.full(len(plan.columns.ticks), np.inf)
    for rank, times in enumerate(clocks.microbatches):
        entries = np.array([entry for entry in plan.queue(rank) if entry is not None], np.int64)
        np.minimum.at(found, entries, np.array(times, np.float64))
    return found
