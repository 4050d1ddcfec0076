"""Make charts of HTML and inline SVG that fit any width: shapes stretch, text and strokes do not.

A chart is a frame of three parts: labels of the y axis, an area, labels of the x axis. The area is
an SVG of SIZE x SIZE units that is stretched to the space that is there; all text is HTML beside
it, placed in percent. All that comes from data is escaped here, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

SIZE = 10_000
"""Units of an area, both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Values from `low` to `high`, which differ, along one side."""

    low: float
    high: float
    title: str
    marks: tuple[tuple[float, str], ...]
    """Values that are labelled, and their text."""
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value is, from 0 to 1; values outside are at the ends."""
        if self.log:
            span = math.log(self.high / self.low)
            place = math.log(max(value, self.low) / self.low) / span
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, place))


def linear(high: float, title: str, *, low: float = 0.0, unit: str = "", marks: int = 5) -> Axis:
    """An axis of equal steps that ends at `high` or a little above, with round labels."""
    span = high - low if high > low else 1.0
    rough = span / marks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor((low + span) / step + 1e-9)
    values = [step * k for k in range(first, last + 1)]
    return Axis(
        low=low,
        high=low + span,
        title=title,
        marks=tuple((value, f"{number(value, step)}{unit}") for value in values),
    )


def number(value: float, step: float) -> str:
    """A label with as many decimals as its step needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if step * 10**decimals % 1 > 1e-6:  # 2.5
        decimals += 1
    return f"{value:,.{decimals}f}"


def logarithmic(low: float, high: float, title: str, marks: Sequence[tuple[float, str]]) -> Axis:
    """An axis of equal ratios; labels outside of it are left out."""
    shown = tuple((value, text) for value, text in marks if low <= value <= high * 1.0001)
    return Axis(low=low, high=high, title=title, marks=shown, log=True)


def thinned(marks: Sequence[tuple[float, str]], most: int) -> list[tuple[float, str]]:
    """Every k-th label, so that at most so many are left."""
    return list(marks[:: max(1, -(-len(marks) // most))])


def apart(axis: Axis, least: float) -> Axis:
    """The same axis without labels that are nearer to the one before than `least`, of 1."""
    kept: list[tuple[float, str]] = []
    for value, text in axis.marks:
        if not kept or axis.at(value) - axis.at(kept[-1][0]) >= least:
            kept.append((value, text))
    return replace(axis, marks=tuple(kept))


def _x(place: float) -> int:
    return round(SIZE * place)


def _y(place: float) -> int:
    return round(SIZE * (1 - place))


def rect(left: float, right: float, bottom: float, top: float, kind: str, tip: str = "") -> str:
    """A box between places from 0 to 1; `kind` is its class, `tip` shows when pointed at."""
    x, y = _x(left), _y(top)
    width, height = max(1, _x(right) - x), max(1, _y(bottom) - y)
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="{kind}"{tip_of(tip)}/>'


def path(points: Iterable[tuple[float, float]], kind: str) -> str:
    """A line through places from 0 to 1."""
    text = " ".join(f"{_x(x)},{_y(y)}" for x, y in points)
    return f'<polyline points="{text}" class="line {kind}"/>'


def dot(x: float, y: float, kind: str, *, width: float = 5.0, tip: str = "") -> str:
    """A round dot of so many pixels: a line of no length, so that stretching leaves it round."""
    return (
        f'<path d="M{_x(x)} {_y(y)}h0" class="dot {kind}" stroke-width="{width:.3g}"{tip_of(tip)}/>'
    )


def rule(place: float, kind: str, *, upright: bool = False, tip: str = "") -> str:
    """A straight line across the whole area, upright or level."""
    at = f"M{_x(place)} 0V{SIZE}" if upright else f"M0 {_y(place)}H{SIZE}"
    return f'<path d="{at}" class="rule {kind}"{tip_of(tip)}/>'


def group(inner: str, tip: str) -> str:
    """Shapes that show one tip."""
    return f"<g{tip_of(tip)}>{inner}</g>"


def tip_of(tip: str) -> str:
    """The attribute that makes a thing show text when pointed at; lines stay lines."""
    return f' data-tip="{escape(tip)}"' if tip else ""


def frame(
    shapes: Iterable[str], x: Axis, y: Axis, *, height: int, label: str, fine: bool = False
) -> str:
    """An area with its axes.

    Args:
        shapes: What `rect`, `path` and the others made, from back to front.
        x: Below.
        y: On the left, ascending.
        height: Of the area, in pixels.
        label: What the picture shows, for those who cannot see it.
        fine: Whether boxes are so many that the gaps between them have to be hair lines.
    """
    grid = "".join(rule(y.at(value), "grid") for value, _ in y.marks)
    inner = "".join(shapes)
    lefts = "".join(_label("top", 1 - y.at(value), text) for value, text in y.marks)
    belows = "".join(_label("left", x.at(value), text) for value, text in x.marks)
    return (
        f'<div class="frame"><div class="ytitle">{escape(y.title)}</div>'
        f'<div class="yaxis">{lefts}</div>'
        f'<div class="area{" fine" if fine else ""}" style="height:{height}px">'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{grid}{inner}</svg></div>'
        f'<div class="xaxis">{belows}</div><div class="xtitle">{escape(x.title)}</div></div>'
    )


def _label(side: str, place: float, text: str) -> str:
    edge = ' class="last"' if side == "left" and place > 0.94 else ""
    return f'<span{edge} style="{side}:{100 * place:.2f}%">{escape(text)}</span>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a bar."""

    share: float
    """Of the whole width, from 0 to 1."""
    kind: str
    """Its class."""
    tip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A level bar with a name before and a figure behind it."""

    name: str
    figure: str
    parts: tuple[Part, ...]


def bars(rows: Sequence[Bar]) -> str:
    """Level bars, one below another, all on one scale."""
    return '<div class="bars">' + "".join(_bar(row) for row in rows) + "</div>"


def _bar(row: Bar) -> str:
    parts = "".join(
        f'<i class="{part.kind}" style="width:{100 * part.share:.3f}%"{tip_of(part.tip)}></i>'
        for part in row.parts
        if part.share > 0
    )
    return (
        f'<div class="row"><div class="name">{escape(row.name)}</div>'
        f'<div class="bar">{parts}</div><div class="figure">{escape(row.figure)}</div></div>'
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What colours and lines mean: (class, text)."""
    shown = "".join(f'<li><i class="{kind}"></i>{escape(text)}</li>' for kind, text in entries)
    return f'<ul class="legend">{shown}</ul>'


def figure(title: str, caption: str, body: str, *, name: str = "") -> str:
    """A chart with its title above and its caption below.

    Args:
        title: What is seen, in a few words.
        caption: How to read it; plain text.
        body: Legends, frames and bars.
        name: Id of the element, for links.
    """
    anchor = f' id="{escape(name)}"' if name else ""
    return (
        f"<figure{anchor}><h3>{escape(title)}</h3>{body}"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>"
    )


def pairs(figures: Sequence[str]) -> list[str]:
    """Figures two by two, side by side where there is room."""
    return [
        f'<div class="pair">{"".join(figures[at : at + 2])}</div>'
        for at in range(0, len(figures), 2)
    ]
