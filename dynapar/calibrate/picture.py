"""Draw predicted against measured times as an SVG of a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynapar.calibrate.steps import Checked

SIDE, EDGE = 420, 48
COLOURS = {"one rank": "#3b6fb6", "ring": "#c8762b", "step": "#4a4a4a"}


def draw(micros: Sequence[Checked], steps: Sequence[Checked]) -> str:
    """Both axes logarithmic seconds; the band is 10 % either way.

    Args:
        micros: Microbatches on their ranks.
        steps: Whole steps.
    """
    every = [*micros, *steps]
    low = math.log10(min(min(c.predicted, c.measured) for c in every) / 1.2)
    high = math.log10(max(max(c.predicted, c.measured) for c in every) * 1.2)

    def at(seconds: float) -> float:
        return (math.log10(seconds) - low) / (high - low) * (SIDE - 2 * EDGE) + EDGE

    def point(measured: float, predicted: float) -> str:
        return f"{at(measured):.1f},{SIDE - at(predicted):.1f}"

    least, most = 10**low, 10**high
    corners = [(least, least * 1.1), (most / 1.1, most), (most, most / 1.1), (least * 1.1, least)]
    band = " ".join(point(*corner) for corner in corners)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{SIDE}" height="{SIDE}" fill="#fff"/>',
        f'<polygon points="{band}" fill="#e6ecf4"/>',
    ]
    for name, found in (
        ("one rank", [c for c in micros if c.degree == 1]),
        ("ring", [c for c in micros if c.degree > 1]),
        ("step", steps),
    ):
        for c in found:
            x, y = point(c.measured, c.predicted).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{COLOURS[name]}"/>')
    for place, (name, colour) in enumerate(COLOURS.items()):
        line = EDGE + 16 * place
        parts.append(f'<circle cx="{EDGE + 8}" cy="{line - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{EDGE + 18}" y="{line}">{name}</text>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        tick = at(10**power)
        parts.append(f'<text x="{tick:.0f}" y="{SIDE - EDGE + 16}">{10**power:g} s</text>')
        parts.append(f'<text x="6" y="{SIDE - tick:.0f}">{10**power:g} s</text>')
    parts.append(f'<text x="{SIDE / 2 - 60:.0f}" y="{SIDE - 10}">measured, CPU time</text>')
    parts.append('<text x="6" y="16">predicted; the band is 10 % either way</text></svg>')
    return "\n".join(parts) + "\n"
