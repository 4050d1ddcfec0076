"""Draw what a run measured: steps and microbatches against their prediction, throughput, ranks."""

from __future__ import annotations

from statistics import median

from dynapar.report.draw_steps import Curve, pointers, series, step_axis, values_tip
from dynapar.report.model import Measured
from dynapar.report.plot import (
    Axis,
    dot,
    figure,
    frame,
    legend,
    linear,
    logarithmic,
    pairs,
    path,
    rule,
    thinned,
)
from dynapar.report.units import count, percent, plural, seconds, times

_SECONDS = [
    (10.0**k, text)
    for k, text in zip(
        range(-5, 4),
        ("10 us", "0.1 ms", "1 ms", "10 ms", "0.1 s", "1 s", "10 s", "100 s", "1,000 s"),
        strict=True,
    )
]


def run_figures(measured: Measured) -> list[str]:
    """The charts of what was measured."""
    found = [_steps(measured)]
    if measured.pairs:
        found.append(_pairs(measured))
    found += [*pairs([_throughput(measured), _loss(measured)]), _ranks(measured)]
    if any(step.least_speed != 1 for step in measured.steps):
        found.append(_speeds(measured))
    return found


def _left_out(measured: Measured) -> str:
    if not measured.warm_up:
        return ""
    return " The first step, in which everything warms up, does not count."


def _timed(measured: Measured) -> str:
    """How microbatches are timed."""
    if measured.cpu:
        return (
            "Measured is the CPU time of each rank, waiting not included, against what its own "
            "part was predicted to take."
        )
    return (
        "A ring's measured time is that of its last rank to arrive, since a prediction begins when "
        "the ring is complete."
    )


def _steps(measured: Measured) -> str:
    steps = [step.step for step in measured.steps]
    predicted = {step.step: step.predicted for step in measured.steps}
    curves = [
        Curve(
            kind="l-bound",
            name=f"{times(measured.scale)} x predicted",
            values={step: measured.scale * predicted[step] for step in steps},
        ),
        Curve(kind="l-dynapar", name="predicted", values={step: predicted[step] for step in steps}),
        Curve(
            kind="l-measured",
            name="measured",
            values={step.step: step.makespan for step in measured.steps},
        ),
    ]
    x = step_axis(steps)
    most = max(value for curve in curves for value in curve.values.values())
    y = linear(1.05 * most or 1.0, "seconds")
    shapes = [series(x, y, steps, curve) for curve in curves]
    shapes += pointers(x, steps, values_tip(steps, curves, seconds))
    return figure(
        "Measured against predicted, step by step",
        f"Makespan as planned, and the longest time that a rank spent in its microbatches. The "
        f"median step takes {times(measured.scale)} times its prediction; beside this common "
        f"factor, steps stray by {percent(measured.step_error)} in the median."
        f"{_left_out(measured)}",
        legend([(curve.kind, curve.name) for curve in curves])
        + frame(shapes, x, y, height=220, label="Measured and predicted makespan of each step"),
        name="prediction",
    )


def _pairs(measured: Measured) -> str:
    values = [value for cell in measured.pairs for value in (cell.x, cell.y)]
    low, high = min(values) / 2, max(values) * 2
    marks = thinned([mark for mark in _SECONDS if low <= mark[0] <= high], 5)
    x = logarithmic(low, high, "predicted", marks)
    y = logarithmic(low, high, "measured", marks)
    most = max(cell.amount for cell in measured.pairs)
    scale = measured.microbatch_scale
    shapes = [
        path([(x.at(low), y.at(low)), (x.at(high), y.at(high))], "l-equal"),
        path(
            [(x.at(v), y.at(v * scale)) for v in (max(low, low / scale), min(high, high / scale))],
            "l-bound",
        ),
    ]
    for cell in sorted(measured.pairs, key=lambda cell: -cell.amount):
        what = "of one rank" if cell.kind == "single" else "of a ring"
        tip = (
            f"{cell.amount:,} {'microbatch' if cell.amount == 1 else 'microbatches'} {what}\n"
            f"predicted about {seconds(cell.x)}, measured about {seconds(cell.y)}"
        )
        size = 5 + 13 * (cell.amount / most) ** 0.5
        shapes.append(dot(x.at(cell.x), y.at(cell.y), f"p-{cell.kind}", width=size, tip=tip))
    return figure(
        "Measured against predicted, microbatch by microbatch",
        f"A dot stands for the microbatches whose times are alike. {_timed(measured)} "
        f"Beside the common factor of {times(scale)}, microbatches stray by "
        f"{percent(measured.microbatch_error)} in the median, 9 of 10 by at most "
        f"{percent(measured.microbatch_error_90)}.{_left_out(measured)}",
        legend(
            [
                ("p-single", "one rank"),
                ("p-ring", "ring"),
                ("l-equal", "as predicted"),
                ("l-bound", f"{times(scale)} x predicted"),
            ]
        )
        + frame(shapes, x, y, height=260, label="Measured against predicted microbatch seconds"),
    )


def _throughput(measured: Measured) -> str:
    steps = [step.step for step in measured.steps]
    curve = Curve(
        kind="l-dynapar",
        name="tokens/s",
        values={step.step: step.tokens_per_second for step in measured.steps},
    )
    x = step_axis(steps)
    y = linear(1.05 * max(curve.values.values()), "tokens/s", marks=4)
    middle = median(curve.values.values())
    waited = sum(step.waited for step in measured.steps)
    whole = sum(step.seconds for step in measured.steps) or 1.0
    shapes = [series(x, y, steps, curve)]
    shapes += pointers(x, steps, values_tip(steps, [curve], lambda v: f"{v:,.0f}"))
    return figure(
        "Throughput",
        f"LLM tokens of a step by its wall clock on rank 0, from the end of the step before to its "
        f"own: {count(middle)} tokens/s in the median step. Waiting for the loader is "
        f"{percent(waited / whole)} of the time.",
        frame(shapes, x, y, height=150, label="Tokens per second of each step"),
        name="throughput",
    )


def _loss(measured: Measured) -> str:
    steps = [step.step for step in measured.steps]
    curve = Curve(
        kind="l-dynapar", name="loss", values={step.step: step.loss for step in measured.steps}
    )
    low, high = min(curve.values.values()), max(curve.values.values())
    room = 0.08 * (high - low) or 0.1
    x, y = step_axis(steps), linear(high + room, "loss", low=low - room, marks=4)
    shapes = [series(x, y, steps, curve)]
    shapes += pointers(x, steps, values_tip(steps, [curve], lambda v: f"{v:.4f}"))
    return figure(
        "Loss",
        "Mean loss a target of each step. It does not depend on how the step was laid out.",
        frame(shapes, x, y, height=130, label="Loss of each step"),
    )


def _ranks(measured: Measured) -> str:
    ranks = measured.ranks
    factors = [rank.factor for rank in ranks]
    high, low = max(1.2, 1.08 * max(factors)), min(0.8, 0.95 * min(factors))
    last = len(ranks) - 1
    marks = thinned([(float(rank), f"{rank:,}") for rank in range(len(ranks))], 16)
    x = Axis(low=-0.5, high=last + 0.5, title="rank", marks=tuple(marks))
    y = linear(high, "times the others", low=low, marks=4)
    shapes = [rule(y.at(1.0), "l-equal")]
    for rank in ranks:
        kind = "p-slow" if rank.straggler else "p-single"
        if not rank.microbatches:
            kind = "p-none"
        tip = (
            f"rank {rank.rank}: {times(rank.factor)} times as long as the others\n"
            f"by {rank.microbatches:,} microbatches{'' if measured.cpu else ' that it ran alone'}; "
            f"a straggler above {times(rank.limit)}\nended last in {plural(rank.last, 'step')}\n"
            f"speed in the last plan: {times(rank.speed)}"
        )
        width = 9.0 if len(ranks) <= 128 else 4.0
        shapes.append(dot(x.at(rank.rank), y.at(rank.factor), kind, width=width, tip=tip))
    return figure(
        "Stragglers",
        f"How long each rank takes for the same work: measured over predicted time of "
        f"{'its microbatches' if measured.cpu else 'the microbatches that it ran alone'}, as a "
        "multiple of that of the same step's median rank. A rank is a straggler when it is more "
        "than 10 % slower and more than the noise explains; "
        "a long step makes nobody one.",
        legend([("p-single", "rank"), ("p-slow", "straggler"), ("p-none", "nothing to judge by")])
        + frame(shapes, x, y, height=170, label="Slowness of each rank"),
        name="stragglers",
    )


def _speeds(measured: Measured) -> str:
    """The slowest rank's speed, as the plans followed it."""
    steps = [step.step for step in measured.steps]
    curve = Curve(
        kind="l-dynapar",
        name="slowest rank",
        values={step.step: step.least_speed for step in measured.steps},
    )
    x, y = step_axis(steps), linear(1.0, "speed", marks=4)
    slowest = min(measured.ranks, key=lambda rank: rank.speed)
    shapes = [series(x, y, steps, curve)]
    shapes += pointers(x, steps, values_tip(steps, [curve], times))
    return figure(
        "Speeds that the plans follow",
        f"Speed of the slowest rank as each step was planned; the fastest rank has 1. In the last "
        f"step the slowest is rank {slowest.rank}, at {times(slowest.speed)}.",
        frame(shapes, x, y, height=130, label="Speed of the slowest rank, step by step"),
        name="speeds",
    )
