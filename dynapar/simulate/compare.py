"""Set schedulers side by side on the same steps, under the same costs and the same noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from types import MappingProxyType

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import TICKS_PER_SECOND, Costs
from dynapar.errors import ConfigError, PlanError
from dynapar.meta import SampleTable
from dynapar.planner import PlannerConfig, homogeneous_plan, plan_step
from dynapar.planner.grouping import saved
from dynapar.planner.problem import Candidate, Problem, make_problem
from dynapar.simulate.noise import Noise, expected_makespan, slow_factors
from dynapar.simulate.padded import dividing_degrees, fixed_degree, padded_schedule
from dynapar.simulate.peers import PEERS, PeerMissingError, peer, plan_with
from dynapar.simulate.replay import (
    AFTER,
    BEFORE,
    ENCODER,
    EXCHANGE,
    FIXED,
    INSIDE,
    LLM,
    Timeline,
    replay,
)
from dynapar.simulate.schedule import Schedule, from_layout, from_plan
from dynapar.simulate.static import static_layouts

OURS = "dynapar"
"""The scheduler that all others are held against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What every scheduler is given."""

    batches: tuple[SampleTable, ...]
    """The samples of each step, 1 or more steps."""
    cluster: Cluster
    costs: Costs
    config: PlannerConfig
    noise: Noise | None = None
    """None: times are as predicted, but for slow ranks there are none."""

    def problems(self) -> tuple[Problem, ...]:
        """Each step as arrays."""
        return tuple(
            make_problem(
                samples, step=step, cluster=self.cluster, costs=self.costs, config=self.config
            )
            for step, samples in enumerate(self.batches)
        )


Layouts = Mapping[str, Sequence[Schedule | str]]
"""For each label, such as "static" or "static 4", one schedule a step, or why there is none."""


def _dynapar(scene: Scene) -> Layouts:
    plans = (
        plan_step(samples, step=step, cluster=scene.cluster, costs=scene.costs, config=scene.config)
        for step, samples in enumerate(scene.batches)
    )
    return {OURS: [from_plan(plan, scene.costs) for plan in plans]}


def _homogeneous(scene: Scene) -> Layouts:
    plans = (
        homogeneous_plan(
            samples,
            degree=None,
            step=step,
            cluster=scene.cluster,
            costs=scene.costs,
            config=scene.config,
        )
        for step, samples in enumerate(scene.batches)
    )
    return {"homogeneous": [from_plan(plan, scene.costs) for plan in plans]}


def _static(scene: Scene) -> Layouts:
    problems = scene.problems()
    found = static_layouts(problems)
    return {"static": _schedules(problems, found.layouts[found.degree])}


def _every_static(scene: Scene) -> Layouts:
    problems = scene.problems()
    found = static_layouts(problems, every=True)
    best = {"static": _schedules(problems, found.layouts[found.degree])}
    others = {
        f"static {degree}": _schedules(problems, layouts)
        for degree, layouts in found.layouts.items()
        if degree != found.degree
    }
    return best | others


def _padded(scene: Scene) -> Layouts:
    longest = max(int(samples.llm_tokens.max(initial=1)) for samples in scene.batches)
    degree = fixed_degree(longest, capacity=scene.config.capacity, cluster=scene.cluster)
    return {"padded": [padded_schedule(problem, degree=degree) for problem in scene.problems()]}


def _best_padded(scene: Scene) -> Layouts:
    problems = scene.problems()
    longest = max(int(samples.llm_tokens.max(initial=1)) for samples in scene.batches)
    least = fixed_degree(longest, capacity=scene.config.capacity, cluster=scene.cluster)
    tried = [
        [padded_schedule(problem, degree=degree, budget=budget) for problem in problems]
        for degree in dividing_degrees(scene.cluster)
        if degree >= least
        for budget in (scene.config.capacity >> halvings for halvings in range(HALVINGS))
    ]
    totals = [sum(replay(schedule).makespan for schedule in schedules) for schedules in tried]
    return {"padded-best": tried[totals.index(min(totals))]}


def _peer(name: str, scene: Scene) -> Layouts:
    outcomes = plan_with(name, scene.problems(), cluster=scene.cluster)
    return {
        name: [found.reason if found.schedule is None else found.schedule for found in outcomes]
    }


def _schedules(problems: Sequence[Problem], layouts: Sequence[Candidate]) -> list[Schedule]:
    schedules = []
    for problem, found in zip(problems, layouts, strict=True):
        tokens = int(problem.samples.llm_tokens.sum())
        schedules.append(
            from_layout(
                found.layout,
                found.loads,
                sync=problem.config.sync,
                ranks=problem.limits.ranks,
                costs=problem.costs,
                constants=problem.constants,
                tokens=tokens,
                computed_tokens=tokens,
            )
        )
    return schedules


SCHEDULERS: Mapping[str, Callable[[Scene], Layouts]] = MappingProxyType(
    {
        OURS: _dynapar,
        "homogeneous": _homogeneous,
        "static": _static,
        "static-all": _every_static,
        "padded": _padded,
        "padded-best": _best_padded,
        **{name: partial(_peer, name) for name in PEERS},
    }
)
"""Who can be compared. "static-all" also shows the degrees that were not the best; "padded" runs at
the least degree that holds the longest sample and fills batches up to the capacity, "padded-best"
at the degree and up to the part of the capacity that have the least total time. Peers, from
"megatron" on, are other people's schedulers (see `dynapar.simulate.peers`)."""

HALVINGS = 5
"""Token budgets that "padded-best" tries: the capacity, its half, its quarter, ..."""

ALL = (OURS, "homogeneous", "static-all", "padded", "padded-best", *PEERS)
"""What "all" stands for; peers that are not installed are noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one scheduler made of all steps; of a peer, of those that it has a plan for."""

    label: str
    steps: tuple[int, ...]
    """Numbers of these steps, ascending, 1 or more."""
    schedules: tuple[Schedule, ...]
    timelines: tuple[Timeline, ...]
    """Without noise; slow ranks count."""
    expected: tuple[float, ...]
    """Mean makespan of each step under noise, in ticks; empty where none was asked for."""

    @property
    def makespans(self) -> tuple[int, ...]:
        """Of each step, in ticks."""
        return tuple(timeline.makespan for timeline in self.timelines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All schedulers that could run, and why others could not."""

    runs: tuple[Run, ...]
    """dynapar first."""
    bounds: tuple[int, ...]
    """The proven lower bound of each step, in ticks; without slow ranks."""
    notes: tuple[str, ...]


def compare(
    scene: Scene,
    schedulers: Sequence[str] = ALL,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Run schedulers on the same steps.

    Args:
        scene: The steps.
        schedulers: Names from `SCHEDULERS`; dynapar is always run.
        advance: Called with (done, total) schedulers.

    Raises:
        ConfigError: A name is unknown, there are no steps, or a slow rank is not there.
        PlanError: dynapar cannot place a sample.
    """
    for name in schedulers:
        if name not in SCHEDULERS:
            raise ConfigError(
                f"scheduler {name!r} is unknown; expected all, or some of {', '.join(SCHEDULERS)}"
            )
    if not scene.batches:
        raise ConfigError("there are no steps to compare; give 1 or more")
    runs, notes = [], list(_grouping(scene.batches))
    names = list(dict.fromkeys((OURS, *schedulers)))
    for name in filter(PEERS.__contains__, names):
        peer(name).start()  # is imported while others plan
    for done, name in enumerate(names):
        advance(done, len(names))
        try:
            layouts = SCHEDULERS[name](scene)
        except (PlanError, PeerMissingError) as error:
            if name == OURS:
                raise
            notes.append(f"{name}: {error}")
            continue
        for label, found in layouts.items():
            notes += _failures(label, found)
            if any(isinstance(step, Schedule) for step in found):
                runs.append(_run(scene, label, found))
    advance(len(names), len(names))
    return Comparison(
        runs=tuple(runs),
        bounds=tuple(problem.bound() for problem in scene.problems()),
        notes=tuple(notes),
    )


def _grouping(batches: Sequence[SampleTable]) -> Iterator[str]:
    """What trees leave out, against the same samples apart."""
    found = [saved(samples) for samples in batches]
    if not any(each.trees for each in found):
        return
    parts = []
    for what in ("llm_tokens", "encoder_tokens"):
        less = sum(getattr(each, what) for each in found)
        whole = less + sum(int(getattr(samples, what).sum()) for samples in batches)
        share = 100 * less / max(1, whole)
        parts.append(
            f"{whole - less:,} instead of {whole:,} {what.replace('_', ' ')} (-{share:.1f} %)"
        )
    yield (
        f"{sum(each.members for each in found):,} samples are grouped into "
        f"{sum(each.trees for each in found):,} trees by prefix, which every scheduler is given: "
        f"{', '.join(parts)}"
    )


def _failures(label: str, found: Sequence[Schedule | str]) -> Iterator[str]:
    reasons = {step: reason for step, reason in enumerate(found) if isinstance(reason, str)}
    if reasons:
        step, reason = next(iter(reasons.items()))
        yield (
            f"{label}: failed at {len(reasons)} of {len(found)} steps, which its row leaves out; "
            f"step {step}: {reason}"
        )


def _run(scene: Scene, label: str, found: Sequence[Schedule | str]) -> Run:
    made = {step: one for step, one in enumerate(found) if isinstance(one, Schedule)}
    noise = scene.noise
    slow = slow_factors(scene.cluster.ranks, noise.slow if noise else ())
    expected = [
        expected_makespan(schedule, noise, step=step)
        for step, schedule in made.items()
        if noise is not None
    ]
    return Run(
        label=label,
        steps=tuple(made),
        schedules=tuple(made.values()),
        timelines=tuple(replay(schedule, rank_factors=slow) for schedule in made.values()),
        expected=tuple(expected),
    )


def gains(run: Run, ours: Run) -> list[float]:
    """For each of its steps, how many times as long as ours; 1 where there is nothing to do."""
    own = [ours.makespans[step] for step in run.steps]
    return [there / here if here else 1.0 for there, here in zip(run.makespans, own, strict=True)]


Row = dict[str, str | int | float]


def rows(comparison: Comparison) -> Iterator[Row]:
    """One row a scheduler: seconds are means over its steps, shares are of rank time.

    "gain" is how many times as long as dynapar its makespans are (median over the steps, and the
    worst step for dynapar); "with closing" is the same for whole steps, all together.
    """
    ours = comparison.runs[0]
    for run in comparison.runs:
        found = gains(run, ours)
        bounds = [comparison.bounds[step] for step in run.steps]
        own = [_steps(ours)[step] for step in run.steps]
        row: Row = {
            "scheduler": run.label,
            "degree": _degrees(run),
            "step s": _seconds(fmean(_steps(run))),
            "makespan s": _seconds(fmean(run.makespans)),
            "gap %": _percent(sum(run.makespans) / max(1, sum(bounds)) - 1),
            "gain": round(median(found), 4),
            "worst": round(min(found), 4),
            "with closing": round(sum(_steps(run)) / max(1.0, sum(own)), 4),
        }
        if run.expected:
            row["noisy s"] = _seconds(fmean(run.expected))
        yield (
            row
            | shares(run)
            | {
                "padding %": _percent(
                    1 - _sum(run, "tokens") / max(1, _sum(run, "computed_tokens"))
                ),
                "tokens/s": round(
                    _sum(run, "tokens") * TICKS_PER_SECOND / max(1.0, sum(_steps(run)))
                ),
            }
        )


def shares(run: Run) -> dict[str, float]:
    """Where the time of all ranks goes, in percent; the last three add up to all waiting."""
    spent = np.sum([timeline.spent for timeline in run.timelines], axis=0)
    whole = max(1, int(spent.sum()))
    lockstep = run.schedules[0].sync == "microbatch"
    names = {
        "llm %": spent[LLM],
        "encoder %": spent[ENCODER],
        "exchange %": spent[EXCHANGE],
        "fixed %": spent[FIXED],
        "idle %": spent[INSIDE] + spent[BEFORE] + spent[AFTER],
        "idle in llm %" if lockstep else "idle in ring %": spent[INSIDE],
        "idle in encoder %" if lockstep else "idle for ring %": spent[BEFORE],
    }
    if not lockstep:
        names["idle at end %"] = spent[AFTER]
    return {name: _percent(int(value) / whole) for name, value in names.items()}


def traffic_share(run: Run) -> float:
    """Share of the waves whose LLM part lasts as long as its traffic; 0 under sync "step"."""
    waves = sum(len(timeline.waves) for timeline in run.timelines)
    return sum(timeline.traffic_waves for timeline in run.timelines) / max(1, waves)


def _steps(run: Run) -> list[float]:
    """Ticks of whole steps, the closing pass included."""
    pairs = zip(run.timelines, run.schedules, strict=True)
    return [float(timeline.makespan + schedule.closing) for timeline, schedule in pairs]


def _sum(run: Run, name: str) -> int:
    return sum(int(getattr(schedule, name)) for schedule in run.schedules)


def _degrees(run: Run) -> str:
    used = sorted({degree for schedule in run.schedules for degree in schedule.degrees})
    return f"{used[0]}..{used[-1]}" if len(used) > 1 else "".join(map(str, used))


def _seconds(ticks: float) -> float:
    return round(ticks / TICKS_PER_SECOND, 6)


def _percent(share: float) -> float:
    return round(100 * share, 3)
