"""Draw a comparison: where the time of all ranks goes, and what ranks do in the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dynapar.costs import TICKS_PER_SECOND
from dynapar.errors import ConfigError
from dynapar.simulate.compare import OURS, Comparison, Run, gains

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPENT = (
    ("LLM", "#3b6fb6", (0,)),
    ("encoder", "#5aa469", (1,)),
    ("exchange", "#e3a33b", (2,)),
    ("fixed", "#8c6bb1", (3,)),
    ("idle", "#d9d9d9", (4, 5, 6)),
)
"""Name, colour and entries of `Timeline.spent`."""
SHOWN = ("static", "padded")
"""Whose first step is drawn above dynapar's."""
MAP = "viridis"


def draw_comparison(comparison: Comparison, path: Path, *, title: str) -> None:
    """Write a picture of a comparison.

    Above, a bar a scheduler: mean makespan, cut by what all ranks together spend it on; the line
    is the lower bound. Below, the first step of static, padded and dynapar: a box a microbatch,
    coloured by the number of its ranks.

    Args:
        comparison: The comparison.
        path: The picture; its ending says of what kind (.png, .svg, .pdf).
        title: What was compared.

    Raises:
        ConfigError: matplotlib is not installed, or it knows no such kind of file.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "pictures need matplotlib, which is not installed; pip install 'dynapar[report]'"
        ) from None
    runs = comparison.runs
    below = [run for run in runs if run.label in SHOWN] + [runs[0]]
    bars = 0.35 * len(runs) + 0.8
    panel = 1.5
    figure = Figure(figsize=(9.5, bars + panel * len(below) + 1.6), layout="constrained")
    axes = figure.subplots(1 + len(below), 1, height_ratios=[bars, *[panel] * len(below)])
    figure.suptitle(title, fontsize=10)
    _bars(axes[0], comparison)
    most = max(run.timelines[0].makespan for run in below) / TICKS_PER_SECOND
    widest = max(max(run.schedules[0].degrees, default=1) for run in below)
    for place, run in enumerate(below):
        _rows(axes[1 + place], run, widest, most)
        if place + 1 < len(below):
            axes[1 + place].set_xticklabels([])
    axes[-1].set_xlabel("seconds of the first step")
    drawn = {width for run in below for width in run.schedules[0].layout.width.tolist()}
    _key(axes[1:], sorted(drawn), widest)
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise ConfigError(
            f"picture {str(path)!r} has the ending {path.suffix!r}; expected one of "
            f"{', '.join(sorted(kinds))}"
        )
    figure.savefig(path, dpi=150)


def _bars(axes: Axes, comparison: Comparison) -> None:
    runs = comparison.runs[::-1]
    left = np.zeros(len(runs))
    for name, colour, entries in SPENT:
        width = np.array([_seconds(run, entries) for run in runs])
        axes.barh(range(len(runs)), width, left=left, color=colour, label=name, height=0.72)
        left += width
    for row, run in enumerate(runs):
        if run.label == OURS:
            text = " "
        else:
            found = np.median(gains(run, comparison.runs[0]))
            text = f" x{found:.2f}"
        axes.text(left[row], row, text, va="center", fontsize=8)
    bound = float(np.mean(comparison.bounds)) / TICKS_PER_SECOND
    axes.axvline(bound, color="black", linewidth=1, linestyle=":", label="lower bound")
    axes.set_yticks(range(len(runs)), [run.label for run in runs], fontsize=8)
    axes.set_xlim(0, float(left.max()) * 1.1)
    axes.set_xlabel("mean makespan, seconds; x: how many times dynapar's, median step")
    axes.legend(fontsize=7, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _seconds(run: Run, entries: Sequence[int]) -> float:
    spent = sum(int(timeline.spent[list(entries)].sum()) for timeline in run.timelines)
    return spent / run.schedules[0].ranks / len(run.timelines) / TICKS_PER_SECOND


def _rows(axes: Axes, run: Run, widest: int, most: float) -> None:
    """A box a microbatch: on which ranks it runs when, in the first step."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    schedule, timeline = run.schedules[0], run.timelines[0]
    boxes, shades = [], []
    columns = (schedule.layout.first, schedule.layout.width, timeline.starts, timeline.ends)
    for first, width, start, end in zip(*(column.tolist() for column in columns), strict=True):
        left, right = start / TICKS_PER_SECOND, end / TICKS_PER_SECOND
        top, below = first, first + width
        boxes.append([(left, top), (left, below), (right, below), (right, top)])
        shades.append(_shade(width, widest))
    colours = colormaps[MAP](shades)
    edge = 0.3 if schedule.ranks <= 64 else 0.0
    axes.add_collection(
        PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=edge)
    )
    axes.set_xlim(0, most)
    axes.set_ylim(schedule.ranks, 0)
    axes.set_ylabel(f"{run.label}\nrank", fontsize=8)
    axes.tick_params(labelsize=7)


def _shade(degree: int, widest: int) -> float:
    """Degrees on a logarithmic scale, from 0 to 1."""
    return float(np.log2(degree) / np.log2(widest)) if widest > 1 else 0.0


def _key(axes: Sequence[Axes], drawn: Sequence[int], widest: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    patches = [
        Patch(color=colormaps[MAP](_shade(width, widest)), label=str(width)) for width in drawn
    ]
    axes[0].legend(
        handles=patches,
        title="ranks of the microbatch",
        fontsize=7,
        title_fontsize=7,
        ncols=len(patches),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
