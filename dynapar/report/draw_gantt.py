"""Draw steps rank by rank, as planned and as measured, with degrees as colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from dynapar.report.gantt import shown_degrees
from dynapar.report.model import Box, Gantt, MicrobatchFigures
from dynapar.report.plot import Axis, frame, group, legend, linear, rect, rule
from dynapar.report.units import percent, plural, seconds

ALIKE = 2.0
"""Planned and measured times up to so many times apart are drawn on one scale."""
LEAST_HEIGHT, MOST_HEIGHT = 150, 460
"""Of an area, pixels."""


def gantt_section(gantts: Sequence[Gantt]) -> str:
    """All chosen steps, one at a time where scripts run, else one below another."""
    entries = [(f"d{degree}", str(degree)) for degree in shown_degrees(gantts)]
    if any(box.part == "encoder" for gantt in gantts for box in gantt.planned):
        entries.append((f"d{shown_degrees(gantts)[0]} enc", "encoder part (lighter)"))
    entries.append(("l-bound", "lower bound"))
    measured = any(gantt.measured for gantt in gantts)
    if measured:
        entries.append(("closing", "closing pass and waiting at the end"))
    buttons = "".join(
        f'<button type="button" data-step="g{gantt.step}">step {gantt.step} '
        f"<small>{escape(gantt.why)}</small></button>"
        for gantt in gantts
    )
    panels = "".join(_panel(gantt) for gantt in gantts)
    return (
        f'<div class="steps" role="tablist">{buttons}</div>'
        '<p class="legend-title">Colour: the largest degree of a sample in the microbatch. '
        "Height: the ranks that run it.</p>"
        f"{legend(entries)}{panels}"
    )


def _panel(gantt: Gantt) -> str:
    ends = [box.start + box.seconds for box in gantt.measured] + list(gantt.measured_steps)
    planned_end, measured_end = max(gantt.makespan, 1e-9), max(ends, default=0.0)
    one = measured_end and 1 / ALIKE <= measured_end / planned_end <= ALIKE
    both = max(planned_end, measured_end)
    parts = [
        f'<div class="panel" id="g{gantt.step}"><h3>Step {gantt.step}, as planned</h3>',
        _planned(gantt, both if one else planned_end),
    ]
    if gantt.measured:
        parts.append(f"<h3>Step {gantt.step}, as measured</h3>")
        parts.append(_measured(gantt, both if one else measured_end))
    parts.append(f"<p class=caption>{escape(_caption(gantt, measured_end, bool(one)))}</p></div>")
    return "".join(parts)


def _caption(gantt: Gantt, measured_end: float, one: bool) -> str:
    idle = _idle(gantt)
    text = (
        f"Predicted makespan {seconds(gantt.makespan)}, lower bound {seconds(gantt.lower_bound)}; "
        f"{len(gantt.microbatches):,} microbatch{'' if len(gantt.microbatches) == 1 else 'es'}; "
        f"{percent(idle)} of the ranks' time up to then lies outside of any microbatch."
    )
    if gantt.shown_ranks < gantt.ranks:
        text += f" Only the first {gantt.shown_ranks:,} of {gantt.ranks:,} ranks are drawn."
    if gantt.measured:
        text += f" Measured: {seconds(measured_end)} with the closing pass."
        if not one:
            text += " The two pictures have different time axes."
        text += (
            " In the measured picture a microbatch of several ranks begins on each of them when "
            "that rank is ready; until the last one has come, the others wait inside it."
        )
    return text


def _idle(gantt: Gantt) -> float:
    """Share of rank time up to the makespan in which a rank has no microbatch."""
    room = gantt.makespan * gantt.shown_ranks
    busy = sum(
        micro.seconds * min(micro.width, gantt.shown_ranks - micro.first)
        for micro in gantt.microbatches.values()
    )
    return max(0.0, 1 - busy / room) if room else 0.0


def _height(gantt: Gantt) -> int:
    return max(LEAST_HEIGHT, min(MOST_HEIGHT, 6 * gantt.shown_ranks))


def _rank_axis(gantt: Gantt) -> Axis:
    """Rank 0 on top; a label in the middle of each rank's lane."""
    ranks, node = gantt.shown_ranks, gantt.ranks_per_node
    step = 1
    for size in (1, 2, 4, node, 2 * node, 4 * node, 8 * node, 16 * node, 32 * node, 64 * node):
        step = size
        if ranks / step <= 8:
            break
    marks = tuple((ranks - rank - 0.5, f"{rank:,}") for rank in range(0, ranks, step))
    return Axis(low=0.0, high=float(ranks), title="rank", marks=marks)


def _lane(y: Axis, first: int, width: int) -> tuple[float, float]:
    """Bottom and top of some ranks."""
    return y.at(y.high - first - width), y.at(y.high - first)


def _nodes(gantt: Gantt, y: Axis) -> list[str]:
    node = gantt.ranks_per_node
    if gantt.shown_ranks // node > 64:
        return []
    return [rule(y.at(y.high - rank), "node") for rank in range(node, gantt.shown_ranks, node)]


def _planned(gantt: Gantt, end: float) -> str:
    x, y = linear(end, "seconds from the step's start", marks=5), _rank_axis(gantt)
    shapes = [rect(0, x.at(gantt.makespan), 0, 1, "idle-area"), *_nodes(gantt, y)]
    shapes += [rule(x.at(wave), "wave", upright=True) for wave in gantt.waves]
    for number, boxes in groupby(gantt.planned, key=lambda box: box.microbatch):
        micro = gantt.microbatches[number]
        inner = "".join(_box(box, micro, x, y) for box in boxes)
        shapes.append(group(inner, _planned_tip(number, micro)))
    shapes.append(rule(x.at(gantt.lower_bound), "l-bound", upright=True, tip="lower bound"))
    label = f"Planned microbatches of step {gantt.step} by rank and time"
    return frame(shapes, x, y, height=_height(gantt), label=label, fine=gantt.shown_ranks > 96)


def _box(box: Box, micro: MicrobatchFigures, x: Axis, y: Axis) -> str:
    lighter = " enc" if box.part == "encoder" else ""
    bottom, top = _lane(y, box.first, box.width)
    return rect(
        x.at(box.start), x.at(box.start + box.seconds), bottom, top, f"d{micro.degree} gap{lighter}"
    )


def _planned_tip(number: int, micro: MicrobatchFigures) -> str:
    last = micro.first + micro.width - 1
    where = f"ranks {micro.first} to {last}" if micro.width > 1 else f"rank {micro.first}"
    lines = [
        f"microbatch {number} on {where}",
        f"{seconds(micro.seconds)}, {seconds(micro.encoder_seconds)} of it in the encoders",
        f"{plural(micro.samples, 'sample')}, {micro.tokens:,} tokens, {micro.encoder_tokens:,} "
        f"encoder tokens",
    ]
    if micro.samples:
        lines.append(f"longest: {micro.longest_id}, {micro.longest_tokens:,} tokens")
    if micro.width > 1:
        lines.append(f"largest degree of a sample: {micro.degree}")
    if micro.recompute != "none":
        lines.append(f"recompute: {micro.recompute}")
    return "\n".join(lines)


def _measured(gantt: Gantt, end: float) -> str:
    x, y = linear(end, "seconds from the step's start", marks=5), _rank_axis(gantt)
    shapes = []
    for rank, done in enumerate(gantt.measured_steps):
        bottom, top = _lane(y, rank, 1)
        shapes.append(rect(0, x.at(done), bottom, top, "closing"))
    shapes += _nodes(gantt, y)
    for box in gantt.measured:
        micro = gantt.microbatches[box.microbatch]
        bottom, top = _lane(y, box.first, 1)
        ratio = f"{box.seconds / micro.seconds:.2f} times" if micro.seconds else "none"
        tip = (
            f"rank {box.first}, microbatch {box.microbatch}\n"
            f"measured {seconds(box.seconds)}, predicted {seconds(micro.seconds)} ({ratio})\n"
            f"{plural(micro.samples, 'sample')} on {plural(micro.width, 'rank')}"
        )
        left, right = x.at(box.start), x.at(box.start + box.seconds)
        shapes.append(rect(left, right, bottom, top, f"d{micro.degree} gap", tip))
    label = f"Measured microbatches of step {gantt.step} by rank and time"
    return frame(shapes, x, y, height=_height(gantt), label=label, fine=gantt.shown_ranks > 96)
