"""Set what a run measured beside what was predicted.

Where ranks measure the CPU time of each microbatch apart from waiting, it is held against what each
rank's own part was predicted to take. Else wall clocks are: a microbatch's predicted time runs from
when its ring is complete, so its measured time is that of its last rank to arrive, the least over
its ranks; and a rank's speed is judged by the microbatches that it ran alone. Either way each is
taken against the median rank of its own step, so that a long step, a warm-up or a wrong common
scale makes nobody a straggler.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapar.costs import TICKS_PER_SECOND
from dynapar.meta import IntArray
from dynapar.plan import StepPlan
from dynapar.report.clocks import Clocks
from dynapar.report.mix import CELLS_PER_DECADE
from dynapar.report.model import Cell, Measured, MeasuredStep, RankFigures

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

WARM_UP = 1
"""First steps of a run that scale and errors leave out, where others are left."""
LEAST_SLOW = 0.10
"""A rank that takes no longer than this above the others is none to worry about."""
DEVIATIONS = 4.0
"""Standard errors of a rank's median beyond which it is no noise."""
GRID = 2 * CELLS_PER_DECADE
"""Squares a decade of predicted against measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """n measured times of a step that can be held against a prediction."""

    rank: IntArray
    """(n,) by whom; of a ring's wall clock, its first."""
    ring: BoolArray
    """(n,) whether it is of a ring."""
    predicted: FloatArray
    """(n,) seconds."""
    measured: FloatArray
    """(n,) seconds."""
    judges: BoolArray
    """(n,) whether it tells how fast that rank is."""
    pace: float
    """Measured over predicted time of the step's median rank."""


def observe(plan: StepPlan, clocks: Clocks) -> Observed:
    """The times of one step that a prediction can be held against.

    Args:
        plan: The step.
        clocks: Measurements that fit it.
    """
    width = np.diff(plan.columns.rank_offsets)
    if clocks.busy:
        counts = [len(times) for times in clocks.busy]
        rank = np.repeat(np.arange(plan.ranks), counts)
        entries = [entry for own in plan.queues for entry in own if entry is not None]
        ring = width[np.array(entries, np.int64)] > 1
        predicted = np.array([value for times in clocks.predicted for value in times], np.float64)
        measured = np.array([value for times in clocks.busy for value in times], np.float64)
        judges = np.ones(len(rank), np.bool_)
        pace = _median_rank(rank, predicted, measured, plan.ranks)
    else:
        rank = plan.columns.ranks[plan.columns.rank_offsets[:-1]]
        ring = width > 1
        predicted = plan.columns.ticks / TICKS_PER_SECOND
        measured = microbatch_seconds(plan, clocks)
        judges = ~ring
        pace = step_pace(plan, measured)
    known = (predicted > 0) & (measured > 0)
    return Observed(
        rank=rank[known],
        ring=ring[known],
        predicted=predicted[known],
        measured=measured[known],
        judges=judges[known],
        pace=pace,
    )


class MeasuredBuilder:
    """Adds up what was measured, step by step."""

    def __init__(self) -> None:
        self._steps: list[MeasuredStep] = []
        self._pairs: Counter[tuple[str, int, int]] = Counter()
        self._ratios: list[FloatArray] = []
        self._relative: list[tuple[int, float]] = []
        self._last: Counter[int] = Counter()
        self._ranks = 0
        self._cpu = False
        self._speeds: tuple[float, ...] = ()

    def add(self, plan: StepPlan, clocks: Clocks) -> None:
        """Add a step whose measurements fit its plan."""
        totals = [sum(times) for times in clocks.microbatches]
        makespan = max(totals)
        predicted = clocks.paced_makespan or plan.makespan / TICKS_PER_SECOND
        self._ranks = max(self._ranks, plan.ranks)
        self._last[int(np.argmax(totals))] += 1
        self._speeds = clocks.speeds
        self._steps.append(
            MeasuredStep(
                step=plan.step,
                seconds=clocks.seconds,
                tokens_per_second=int(plan.samples.llm_tokens.sum()) / max(clocks.seconds, 1e-9),
                makespan=makespan,
                step_seconds=max(clocks.steps),
                waited=max(clocks.waited),
                predicted=predicted,
                error=makespan / predicted - 1 if predicted else 0.0,
                loss=clocks.loss,
                gradient_norm=clocks.gradient_norm,
                least_speed=min(clocks.speeds, default=1.0),
            )
        )
        seen = observe(plan, clocks)
        self._cpu = bool(clocks.busy)
        self._ratios.append(seen.measured / seen.predicted)
        logs = np.log10(np.column_stack([seen.predicted, seen.measured]) * TICKS_PER_SECOND)
        squares = np.floor(logs * GRID).astype(np.int64)
        for ring, (x, y) in zip(seen.ring.tolist(), squares.tolist(), strict=True):
            self._pairs["ring" if ring else "single", x, y] += 1
        own = (seen.measured / seen.predicted / seen.pace)[seen.judges]
        self._relative += zip(seen.rank[seen.judges].tolist(), own.tolist(), strict=True)

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
            cpu=self._cpu,
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
                RankFigures(
                    rank=rank,
                    factor=factor,
                    limit=limit,
                    microbatches=len(ratios),
                    last=self._last[rank],
                    straggler=factor > limit,
                    speed=self._speeds[rank] if rank < len(self._speeds) else 1.0,
                )
            )
        return tuple(found)


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
    return _median_vote(votes)


def _median_rank(rank: IntArray, predicted: FloatArray, measured: FloatArray, ranks: int) -> float:
    """Measured over predicted time of the median rank."""
    took = np.bincount(rank, weights=measured, minlength=ranks)
    due = np.bincount(rank, weights=predicted, minlength=ranks)
    votes = np.full(ranks, np.nan)
    votes[due > 0] = took[due > 0] / due[due > 0]
    return _median_vote(votes)


def _median_vote(votes: FloatArray) -> float:
    """The median of those above 0, of two middle ones the lower: of two ranks the faster one.

    1 without any.
    """
    votes = np.sort(votes[votes > 0])
    return float(votes[(len(votes) - 1) // 2]) if len(votes) else 1.0


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
