"""Follow how fast each rank is, by what its microbatches took against what they were to take.

A long batch is long in the prediction as well; a slow rank is slow against its own prediction. So
what is followed is the ratio of the two, by rank, and a rank is slow only against the other ranks'
ratios. (Told apart in this way by ResiHP, arXiv 2605.06374, with a two-term prediction; here it is
the planner's own.)

All of it is + - * / and comparisons on numbers that the control plane gave to every rank, so that
all ranks know the same speeds without another message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from dynapar.costs import TICKS_PER_SECOND, Costs, coefficients
from dynapar.errors import CostsError
from dynapar.plan import StepPlan
from dynapar.plan.pricing import price_layout

FULL = 1000
"""The published speed of the fastest rank."""
GAIN = 0.5
"""Part of a deviation that is taken over at once."""
MOST_CHANGE = 1.25
"""Factor by which a rank's ratio may change in a step."""
LEAST_NOISE = 0.10
"""Share within which nobody is called slow, however small the spread."""
DEVIATIONS = 5.0
"""Mean deviations that are still noise: some four standard deviations of what ranks differ by."""
STAYS = 0.5
"""Part of the noise within which a rank that was called slow is as fast as the others again."""
FIRST_SPREAD = 0.05
"""Before anything is known."""
SAID_AGAIN = 0.25
"""Change of a slow rank's speed that is worth another line."""


class Pace(NamedTuple):
    """What a rank did in a finished step; seconds."""

    predicted: float
    """By the costs, at full speed."""
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What is known of all ranks; the same on each of them, and kept in checkpoints by value."""

    ratios: tuple[float, ...]
    """By rank, measured over predicted seconds."""
    published: tuple[int, ...]
    """By rank, the speed that plans count with, in thousandths of the fastest rank's."""
    said: tuple[int, ...]
    """By rank, the speed that the last line about it named; `FULL` without one."""
    spread: float
    """Mean deviation of a rank's step from its ratio, as a share; of the middle rank."""
    steps: int
    """Observed."""

    @classmethod
    def equal(cls, ranks: int, *, scale: float = 1.0) -> Speeds:
        """Nothing known but a common scale."""
        full = (FULL,) * ranks
        return cls(ratios=(scale,) * ranks, published=full, said=full, spread=FIRST_SPREAD, steps=0)

    @property
    def scale(self) -> float:
        """Measured over predicted seconds of a rank of full speed."""
        at_full = [
            ratio * speed / FULL for ratio, speed in zip(self.ratios, self.published, strict=True)
        ]
        return _middle(at_full)

    @property
    def digest(self) -> str:
        """What ranks compare beside a plan's digest: empty for equal speeds."""
        slow = any(speed != FULL for speed in self.published)
        return f" at speeds {list(self.published)}" if slow else ""

    @property
    def noise(self) -> float:
        """Share within which deviations mean nothing."""
        return max(LEAST_NOISE, DEVIATIONS * self.spread)

    def to_state(self) -> dict[str, object]:
        """JSON values for a checkpoint."""
        return {
            "ratios": list(self.ratios),
            "published": list(self.published),
            "said": list(self.said),
            "spread": self.spread,
            "steps": self.steps,
        }

    @classmethod
    def from_state(cls, state: object, *, ranks: int) -> Speeds:
        """Read a checkpoint's; on another number of ranks the scale alone stays.

        Args:
            state: From `to_state`; None for none.
            ranks: Of the run.
        """
        if state is None:
            return cls.equal(ranks)
        kept = cast(Mapping[str, list[float]], state)
        found = cls(
            ratios=tuple(map(float, kept["ratios"])),
            published=tuple(map(int, kept["published"])),
            said=tuple(map(int, kept["said"])),
            spread=float(cast(float, kept["spread"])),
            steps=int(cast(int, kept["steps"])),
        )
        same = len(found.ratios) == ranks
        return found if same else cls.equal(ranks, scale=found.scale)


def follow(state: Speeds, paces: Sequence[Pace]) -> Speeds:
    """What is known after one more step.

    Ratios change by at most `MOST_CHANGE` a step. That a rank is slow must be beyond the noise; how
    slow it is, is followed closer: a published speed stays within a mean deviation. The first step
    sets the common scale alone: it warms up.

    Args:
        state: Before.
        paces: By rank; predicted 0 where a rank had nothing to do or measured nothing.

    Raises:
        CostsError: A time is not finite, or below 0; its rank is named.
    """
    for rank, pace in enumerate(paces):
        if not all(0 <= seconds < math.inf for seconds in pace):
            raise CostsError(
                f"rank {rank} measured {pace.measured} seconds for {pace.predicted} predicted "
                "ones; expected finite times of 0 or more. Look at that rank's clock and device"
            )
    seen = {
        rank: pace.measured / pace.predicted
        for rank, pace in enumerate(paces)
        if pace.predicted > 0 and pace.measured > 0
    }
    if not seen:
        return state
    if not state.steps:
        fresh = Speeds.equal(len(state.ratios), scale=_middle(list(seen.values())))
        return Speeds(
            ratios=fresh.ratios,
            published=state.published,
            said=state.said,
            spread=state.spread,
            steps=1,
        )
    off = {rank: ratio / state.ratios[rank] - 1 for rank, ratio in seen.items()}
    ratios = tuple(
        ratio * min(max(1 + GAIN * off.get(rank, 0.0), 1 / MOST_CHANGE), MOST_CHANGE)
        for rank, ratio in enumerate(state.ratios)
    )
    strayed = min(_middle([abs(share) for share in off.values()]), 1.0)
    spread = state.spread + 0.2 * (strayed - state.spread)
    noise = max(LEAST_NOISE, DEVIATIONS * spread)
    return Speeds(
        ratios=ratios,
        published=_publish(ratios, state.published, noise, settled=max(LEAST_NOISE, spread)),
        said=state.said,
        spread=spread,
        steps=state.steps + 1,
    )


def _publish(
    ratios: tuple[float, ...], before: tuple[int, ...], noise: float, *, settled: float
) -> tuple[int, ...]:
    """A rank that is called slow stays so until it is well inside the noise: no speed flickers."""
    middle = _middle(list(ratios))
    within = [noise if speed == FULL else STAYS * noise for speed in before]
    relative = [
        1.0 if abs(ratio / middle - 1) <= share else ratio / middle
        for ratio, share in zip(ratios, within, strict=True)
    ]
    fastest = min(relative)
    speeds = [max(1, int(FULL * fastest / each + 0.5)) for each in relative]
    kept = [
        old if old < FULL and new < FULL and abs(new / old - 1) <= settled else new
        for new, old in zip(speeds, before, strict=True)
    ]
    return tuple(kept)


def _middle(values: list[float]) -> float:
    """The median; of two middle ones the lower."""
    return sorted(values)[(len(values) - 1) // 2]


def news(state: Speeds, *, step: int, since: int, unused: str = "") -> tuple[Speeds, list[str]]:
    """Lines about ranks whose speed has changed, and the state in which they are said.

    Args:
        state: After `follow`.
        step: That was agreed on when this became known.
        since: The first step that is planned with it.
        unused: Why plans do not follow speeds; empty where they do.
    """
    what = (
        f"plans stay as they are, since {unused}"
        if unused
        else f"planned with that from step {since + 1} on"
    )
    lines, said = [], list(state.said)
    for rank, speed in enumerate(state.published):
        if speed == state.said[rank]:
            continue
        if speed == FULL:
            lines.append(f"step {step + 1}: rank {rank} is as fast as the other ranks again")
            said[rank] = speed
        elif state.said[rank] == FULL or abs(speed / state.said[rank] - 1) > SAID_AGAIN:
            lines.append(
                f"step {step + 1}: rank {rank} takes {FULL / speed:.2f} times as long as the "
                f"fastest rank for the same work (noise {100 * state.noise:.0f} %); {what}. "
                "Look at its device, its clock and what else runs there"
            )
            said[rank] = speed
    return (
        Speeds(
            ratios=state.ratios,
            published=state.published,
            said=tuple(said),
            spread=state.spread,
            steps=state.steps,
        ),
        lines,
    )


class SpeedFollower:
    """The speeds by step: those that a step is planned with are known `lag` steps before it.

    One thread observes; any may ask.
    """

    def __init__(
        self,
        start: Speeds,
        *,
        first: int,
        lag: int,
        report: Callable[[str], None],
        unused: str = "",
    ) -> None:
        """Begin at a checkpoint, or at equal speeds.

        Args:
            start: What is known before step `first`.
            first: The first step.
            lag: Steps from what is observed to the first plan that counts with it: more than the
                steps that are planned ahead.
            report: Gets a line where a rank's speed has changed.
            unused: As in `news`.
        """
        self._known = {first - 1: start}
        self._first, self._lag, self._report, self._unused = first, lag, report, unused

    def at(self, step: int) -> Speeds:
        """What step `step` is planned with."""
        return self.after(max(step - self._lag, self._first - 1))

    def after(self, step: int) -> Speeds:
        """What is known once step `step` is agreed on."""
        return self._known[step]

    def observe(self, step: int, paces: Sequence[Sequence[Pace]]) -> None:
        """Take what the ranks told each other when they agreed on step `step`.

        Args:
            step: One more than the last time.
            paces: By rank, of finished steps.
        """
        state = self._known[step - 1]
        for number in range(max(map(len, paces), default=0)):
            of_step = [each[number] if number < len(each) else Pace(0.0, 0.0) for each in paces]
            state = follow(state, of_step)
        state, lines = news(state, step=step, since=step + self._lag, unused=self._unused)
        for line in lines:
            self._report(line)
        self._known[step] = state
        self._known.pop(step - 2 * self._lag - 2, None)


def predict_ranks(plan: StepPlan, costs: Costs) -> tuple[tuple[float, ...], ...]:
    """What each rank has to do for each microbatch of its queue, by the planner's own pricing.

    Unlike a microbatch's time this is not that of its slowest rank, so it can be held against the
    CPU time of one rank.

    Args:
        plan: Of a step.
        costs: That it was made with.

    Returns:
        For each rank, seconds at full speed, in the order of its queue; 0 for a dummy.
    """
    layout = plan.layout()
    loads = price_layout(
        layout,
        plan.samples,
        costs,
        ranks_per_node=plan.ranks_per_node,
        recompute=plan.columns.recompute,
        memory=plan.memory,
    )
    fixed = coefficients(costs, ranks_per_node=plan.ranks_per_node).fixed
    own = (loads.parts.sum(axis=1) + fixed) / TICKS_PER_SECOND
    return tuple(
        tuple(
            0.0 if b is None else float(own[loads.starts[b] + rank - layout.first[b]])
            for b in queue
        )
        for rank, queue in enumerate(plan.queues)
    )
