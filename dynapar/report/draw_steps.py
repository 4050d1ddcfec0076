"""Draw what was planned, step by step: makespans, gains, gaps, degrees, and where time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from dynapar.report.model import Compared, LayoutFigures, PlannedStep
from dynapar.report.plot import (
    Axis,
    Bar,
    Part,
    apart,
    bars,
    figure,
    frame,
    legend,
    linear,
    logarithmic,
    path,
    rect,
)
from dynapar.report.units import percent, plural, seconds, times

COLUMNS = 200
"""Steps drawn apart; more are drawn by the mean of neighbours."""
SPENT = (
    ("llm", "LLM"),
    ("encoder", "encoders"),
    ("exchange", "exchange"),
    ("fixed", "fixed costs"),
)
"""Keys of `LayoutFigures.shares` that are work, and their names."""
IDLE = {
    "idle in ring": "idle: waiting for a slower rank of the same microbatch",
    "idle for ring": "idle: waiting for the other ranks of a ring",
    "idle at end": "idle: own queue is empty, others still run",
    "idle in llm": "idle in the LLM part of a wave",
    "idle in encoder": "idle in the encoder part of a wave",
}
_RATIOS = [
    (k, f"{k:g}x") for k in (0.5, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
]


def step_axis(steps: Sequence[int]) -> Axis:
    """Steps from left to right, each in the middle of its own column."""
    low, high = steps[0] - 0.5, steps[-1] + 0.5
    span = steps[-1] - steps[0]
    found = linear(high, "step", low=low, marks=min(6, max(1, span)))
    whole = tuple((v, f"{round(v):,}") for v, _ in found.marks if abs(v - round(v)) < 1e-6)
    return Axis(low=low, high=high, title="step", marks=whole)


def columns(steps: Sequence[int]) -> list[slice]:
    """Neighbouring steps that are drawn as one."""
    each = -(-len(steps) // COLUMNS)
    return [slice(at, at + each) for at in range(0, len(steps), each)]


Values = Mapping[int, float]
"""By step; steps may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line over the steps."""

    kind: str
    """Its class."""
    name: str
    values: Values
    sum_up: Callable[[Sequence[float]], float] = fmean
    """What stands for neighbours that are drawn as one."""

    def value(self, steps: Sequence[int]) -> float | None:
        """Of those of the steps that have one; None where none has."""
        found = [self.values[step] for step in steps if step in self.values]
        return self.sum_up(found) if found else None


def series(x: Axis, y: Axis, steps: Sequence[int], curve: Curve) -> str:
    """A line over the steps; where they are many, of the mean of neighbours."""
    points = []
    for part in columns(steps):
        value = curve.value(steps[part])
        if value is not None:
            points.append((x.at(fmean(steps[part])), y.at(value)))
    if len(points) == 1:
        at, value = points[0]
        points = [(at - 0.2, value), (at + 0.2, value)]
    return path(points, curve.kind)


def values_tip(
    steps: Sequence[int], curves: Sequence[Curve], text: Callable[[float], str]
) -> Callable[[slice], str]:
    """What `pointers` shows of some curves."""

    def tip(part: slice) -> str:
        means = [(curve.name, curve.value(steps[part])) for curve in curves]
        return "\n".join(f"{name}: {text(mean)}" for name, mean in means if mean is not None)

    return tip


def pointers(x: Axis, steps: Sequence[int], tip: Callable[[slice], str]) -> list[str]:
    """Columns without colour that show the figures of their steps when pointed at."""
    return [
        rect(x.at(steps[part][0] - 0.5), x.at(steps[part][-1] + 0.5), 0.0, 1.0, "hit",
             f"{_named(steps[part])}\n{tip(part)}")
        for part in columns(steps)
    ]  # fmt: skip


def _named(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}, mean"


def step_figures(planned: Sequence[PlannedStep], compared: Compared | None) -> list[str]:
    """The charts of the plans."""
    found = [_makespans(planned, compared)]
    if compared is not None:
        found.append(_gains(planned, compared))
    return [*found, _gaps(planned), _degrees(planned)]


def _layout(compared: Compared | None, name: str) -> LayoutFigures | None:
    layouts = compared.layouts if compared else ()
    return next((layout for layout in layouts if layout.name == name), None)


def _makespans(planned: Sequence[PlannedStep], compared: Compared | None) -> str:
    steps = [step.step for step in planned]
    curves = [
        Curve(
            kind="l-homogeneous",
            name="best single degree of the step",
            values={s.step: s.homogeneous for s in planned if s.homogeneous_degree},
        ),
        Curve(kind="l-dynapar", name="dynapar", values={s.step: s.makespan for s in planned}),
        Curve(kind="l-bound", name="lower bound", values={s.step: s.lower_bound for s in planned}),
    ]
    static = _layout(compared, "static")
    # Beside means of neighbours, single steps would seem to be above or below them.
    if compared and static and len(compared.steps) == len(planned):
        values = dict(zip(compared.steps, static.makespans, strict=True))
        name = f"static, degree {static.degrees[0]}"
        curves.insert(0, Curve(kind="l-static", name=name, values=values))
    x = step_axis(steps)
    most = max(value for curve in curves for value in curve.values.values())
    y = linear(1.05 * most or 1.0, "seconds")
    shapes = [series(x, y, steps, curve) for curve in curves]
    shapes += pointers(x, steps, values_tip(steps, curves, seconds))
    return figure(
        "How long each step takes",
        "Predicted makespan: from the start of a step's first microbatch to the end of its last. "
        "No plan under the same costs can be shorter than the lower bound.",
        legend([(curve.kind, curve.name) for curve in curves])
        + frame(shapes, x, y, height=220, label="Makespan of each step with its bounds"),
        name="makespans",
    )


def _gains(planned: Sequence[PlannedStep], compared: Compared) -> str:
    ratios = {
        step.step: step.homogeneous / step.makespan
        for step in planned
        if step.step in set(compared.steps) and step.homogeneous_degree and step.makespan
    }
    curves = []
    ours = compared.layouts[0].makespans
    for layout in compared.layouts[1:]:
        rows = zip(compared.steps, layout.makespans, ours, strict=True)
        curves.append(
            Curve(
                kind=f"l-{layout.name}",
                name=f"{layout.name}, degree {layout.degrees[0]}",
                values={step: other / own for step, other, own in rows if own},
            )
        )
    single = Curve(kind="l-homogeneous", name="best single degree of the step", values=ratios)
    curves.append(single)
    steps = compared.steps
    x = step_axis(steps)
    values = [value for curve in curves for value in curve.values.values()]
    low, high = min([0.98, *values]), max([1.3, *(1.05 * value for value in values)])
    marks = [mark for mark in _RATIOS if low <= mark[0] <= high]
    y = apart(logarithmic(low, high, "times dynapar's makespan", marks), 0.09)
    shapes = [rect(0, 1, 0, y.at(1.0), "below")]
    shapes += [series(x, y, steps, curve) for curve in curves]
    shapes += pointers(x, steps, values_tip(steps, curves, lambda ratio: f"{times(ratio)} x"))
    return figure(
        "What others would make of the same samples",
        "How many times dynapar's makespan each of them takes, on a logarithmic axis; below 1 they "
        "would be faster. Static: the one degree that is best for all steps, each step balanced as "
        "well as it can be. Padded: batches of like length, padded to their longest, at the least "
        "degree that holds the longest sample, every rank of a ring encoding all its media; "
        "untuned, as many people run it (`dynapar simulate --compare all` also has it tuned).",
        legend([(curve.kind, curve.name) for curve in curves])
        + frame(shapes, x, y, height=200, label="Makespans of others as multiples of dynapar's"),
        name="gains",
    )


def _gaps(planned: Sequence[PlannedStep]) -> str:
    steps = [step.step for step in planned]
    curve = Curve(kind="l-dynapar", name="mean gap", values={s.step: 100 * s.gap for s in planned})
    curves = [curve]
    if len(columns(steps)) < len(steps):
        curves.append(replace(curve, kind="l-equal", name="largest gap", sum_up=max))
    largest = max(curve.values.values())
    x, y = step_axis(steps), linear(max(1.0, 1.1 * largest), "% above the bound", marks=4)
    worst = max(planned, key=lambda step: step.gap)
    dealt = (
        " Steps dealt for ranks of unequal speed stand here as if ranks were equal."
        if any(step.dealt for step in planned)
        else ""
    )
    shapes = [series(x, y, steps, each) for each in curves]
    shapes += pointers(x, steps, values_tip(steps, curves, lambda gap: f"{gap:.2f} %"))
    return figure(
        "Gap to the lower bound",
        f"Makespan over lower bound, minus 1. Part of it may be the bound's own weakness: the true "
        f"optimum lies in between. The largest is {percent(worst.gap)}, in step "
        f"{worst.step}.{dealt}",
        (legend([(each.kind, each.name) for each in curves]) if len(curves) > 1 else "")
        + frame(shapes, x, y, height=130, label="Gap of each step"),
        name="gaps",
    )


def _degrees(planned: Sequence[PlannedStep]) -> str:
    steps = [step.step for step in planned]
    used = sorted({degree for step in planned for degree in step.tokens_by_degree})
    x, y = step_axis(steps), linear(100.0, "% of the tokens", marks=4)
    shapes = []
    for part in columns(steps):
        held = planned[part]
        whole = sum(step.tokens for step in held) or 1
        base = 0.0
        for degree in used:
            tokens = sum(step.tokens_by_degree.get(degree, 0) for step in held)
            if not tokens:
                continue
            top = base + 100 * tokens / whole
            samples = sum(step.samples_by_degree.get(degree, 0) for step in held)
            tip = (
                f"{_named(steps[part])}\ndegree {degree}: {percent(tokens / whole)} of the tokens, "
                f"{samples:,} samples"
            )
            left, right = x.at(steps[part][0] - 0.5), x.at(steps[part][-1] + 0.5)
            shapes.append(rect(left, right, y.at(base), y.at(top), f"d{degree} gap", tip))
            base = top
    return figure(
        "Degrees in use",
        "Share of each step's tokens whose sample is shared by so many ranks. Degree 1 is data "
        "parallel; all others are context parallel.",
        legend([(f"d{degree}", str(degree)) for degree in used])
        + frame(
            shapes,
            x,
            y,
            height=180,
            label="Share of tokens by degree, step by step",
            fine=len(columns(steps)) > 60,
        ),
        name="degrees",
    )


def time_figure(compared: Compared) -> str:
    """Where the ranks' time goes, for each layout."""
    kinds = dict(SPENT) | {
        key: name for key, name in IDLE.items() if key in compared.layouts[0].shares
    }
    kinds = {
        key: name
        for key, name in kinds.items()
        if any(layout.shares[key] > 0 for layout in compared.layouts)
    }
    longest = max(fmean(layout.makespans) for layout in compared.layouts)
    rows = []
    for layout in compared.layouts:
        mean = fmean(layout.makespans)
        rows.append(
            Bar(
                name=layout.name,
                figure=f"{seconds(mean)}, {percent(layout.shares['idle'])} idle",
                parts=tuple(
                    Part(
                        share=layout.shares[key] * mean / longest if longest else 0.0,
                        kind=f"u-{key.replace(' ', '-')}",
                        tip=f"{layout.name}: {name}\n{percent(layout.shares[key])} of all ranks' "
                        f"time, {seconds(layout.shares[key] * mean)} a step",
                    )
                    for key, name in kinds.items()
                ),
            )
        )
    entries = [(f"u-{key.replace(' ', '-')}", name) for key, name in kinds.items()]
    return figure(
        "Where the ranks' time goes",
        f"Mean predicted makespan over {plural(len(compared.steps), 'step')}, cut by what all "
        "ranks together spend it on. The closing pass is not part of it.",
        legend(entries) + bars(rows),
        name="time",
    )
