"""Draw predicted against measured times as an SVG of a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynapar.calibrate.steps import Checked

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 64, 52
MOST = 0.3
"""Errors are drawn to 30 %; those beyond lie on the edge."""
COLOURS = {"one rank": "#3b6fb6", "ring": "#c8762b", "step": "#2e7d5b"}


def draw(micros: Sequence[Checked], steps: Sequence[Checked]) -> str:
    """The error over the measured time, which is logarithmic; bars are 1.5 spreads either way.

    Args:
        micros: Microbatches on their ranks.
        steps: Whole steps.
    """
    every = [*micros, *steps]
    low = math.log10(min(c.measured for c in every) / 1.15)
    high = math.log10(max(c.measured for c in every) * 1.15)

    def across(seconds: float) -> float:
        return LEFT + (math.log10(seconds) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def down(error: float) -> float:
        kept = min(max(error, -MOST), MOST)
        return TOP + (MOST - kept) / (2 * MOST) * (HEIGHT - TOP - BOTTOM)

    end = WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<rect x="{LEFT}" y="{down(0.1):.1f}" width="{end - LEFT}" '
        f'height="{down(-0.1) - down(0.1):.1f}" fill="#e6ecf4"/>',
    ]
    for percent in range(-30, 31, 10):
        y, weight = down(percent / 100), 1.2 if percent == 0 else 0.4
        parts.append(
            f'<line x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" stroke="#889" '
            f'stroke-width="{weight}"/><text x="{LEFT - 8}" y="{y + 4:.1f}" '
            f'text-anchor="end">{f"{percent:+d}" if percent else 0} %</text>'
        )
    for seconds in _ticks(low, high):
        x = across(seconds)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}" '
            f'stroke="#889"/><text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="middle">{seconds:g} s</text>'
        )
    groups = {
        "one rank": [c for c in micros if c.degree == 1],
        "ring": [c for c in micros if c.degree > 1],
        "step": list(steps),
    }
    for name, found in groups.items():
        for c in found:
            x, y = across(c.measured), down(c.error)
            top, bottom = down(c.error + 1.5 * c.spread), down(c.error - 1.5 * c.spread)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" '
                f'stroke="{COLOURS[name]}" stroke-opacity="0.35" stroke-width="2"/>'
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[name]}"/>'
            )
    parts.append(
        f'<text x="{LEFT}" y="20" font-size="14">predicted over measured, less 1; bars: 1.5 '
        "spreads of identical shapes; band: 10 %</text>"
    )
    for place, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 8 + 150 * place
        parts.append(f'<circle cx="{x}" cy="42" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 10}" y="46">{name} ({len(groups[name])})</text>')
    parts.append(
        f'<text x="{(LEFT + end) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">measured, CPU '
        "time</text></svg>"
    )
    return "\n".join(parts) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every power of ten between two logarithms."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    every = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [seconds for seconds in every if low <= math.log10(seconds) <= high]
