"""Put a report's sentences and charts into one HTML file that loads nothing."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from dynapar.report import colours
from dynapar.report.draw_data import data_figures
from dynapar.report.draw_gantt import gantt_section
from dynapar.report.draw_run import run_figures
from dynapar.report.draw_steps import step_figures, time_figure
from dynapar.report.gantt import shown_degrees
from dynapar.report.model import PlannedStep, Report
from dynapar.report.plot import table
from dynapar.report.units import percent, seconds
from dynapar.report.words import cards, in_short, pricing

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Keeps browsers from loading anything, whatever an id or a name may hold."""
MOST_ROWS = 40
"""Steps in the table at the end."""
WORDS = (
    (
        "step",
        "of the optimizer; counted from 0 here and in the files, from 1 where `dynapar train` "
        "prints",
    ),
    ("rank", "one replica of the model; a tensor-parallel group counts as one"),
    ("microbatch", "ranks and the packed samples that they run in one forward and backward"),
    ("ring", "the ranks of a microbatch, when there are two or more of them"),
    ("degree", "how many ranks share a sample by context parallelism; 1 is data parallel"),
    ("makespan", "time from the first microbatch's start to the last one's end"),
    ("lower bound, gap", "a proven bound of the makespan under the same costs; how far above it"),
    ("homogeneous", "the best single degree of one step"),
    ("static", "one degree for all steps, at which every sample fits, balanced as well as can be"),
    ("padded", "batches of like length, padded to their longest, at one degree for all steps"),
    ("closing pass", "the call at the end of a step in which all ranks reduce the gradients"),
    ("wave", 'an index in the queues that all ranks pass together, under sync "microbatch"'),
)


def page(report: Report, *, command: str = "") -> str:
    """The HTML of a report.

    Args:
        report: What it says.
        command: How it was made; empty to leave it out.

    Returns:
        A whole document with its style and script inside.
    """
    folder = files("dynapar.report")
    degrees = {d for step in report.steps for d in step.tokens_by_degree} | set(
        shown_degrees(report.gantts)
    )
    style = folder.joinpath("page.css").read_text("utf-8") + colours.css(degrees)
    script = folder.joinpath("page.js").read_text("utf-8")
    kind = "a run" if report.kind == "run" else "plans"
    title = f"dynapar report on {kind}: {report.source}"
    sections = _sections(report)
    links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escape(text)}</h2>{inner}</section>'
        for name, text, inner in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f'<header><div class="top"><h1>{escape(title)}</h1>'
        f'<button type="button" id="theme" hidden></button></div>'
        f'<p class="lead">{escape(pricing(report))}</p><nav>{links}</nav></header>'
        f"<main>{_notes(report)}{body}</main>"
        f"<footer>{_footer(report, command)}</footer>"
        f'<div id="tip" role="tooltip"></div><script>{script}</script></body></html>\n'
    )


def _notes(report: Report) -> str:
    if not report.notes:
        return ""
    lines = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f'<div class="notes"><b>To know before reading</b><ul>{lines}</ul></div>'


def _sections(report: Report) -> list[tuple[str, str, str]]:
    """(id, title, HTML) of each part."""
    short = "".join(
        f"<li><b>{escape(figure)}</b> {escape(text)}</li>" for figure, text in in_short(report)
    )
    tiles = "".join(
        f"<div><b>{escape(figure)}</b><span>{escape(name)}</span></div>"
        for figure, name in cards(report)
    )
    head = f'<div class="cards">{tiles}</div><ul class="short">{short}</ul>'
    found = [("short", "In short", head)]
    if data := data_figures(report.mix):
        found.append(("data", "The data", "".join(data)))
    plans = "".join(step_figures(report.steps, report.compared))
    if report.compared is not None:
        plans += time_figure(report.compared)
    found.append(("plans", "The plans", plans))
    if report.gantts:
        found.append(("ranks", "Who runs what, when", gantt_section(report.gantts)))
    if report.measured is not None:
        charts = "".join(run_figures(report.measured))
        found.append(("run", "The run", charts))
    found.append(("steps", "Step by step", _table(report)))
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in WORDS)
    found.append(("words", "Words", f"<dl>{words}</dl>"))
    return found


def _table(report: Report) -> str:
    """All steps where they are few; else those with the longest makespans."""
    steps = list(report.steps)
    text = ""
    if len(steps) > MOST_ROWS:
        steps = sorted(steps, key=lambda step: (-step.makespan, step.step))[:MOST_ROWS]
        text = (
            f"<p class=caption>The {MOST_ROWS} steps with the longest makespans, of "
            f"{len(report.steps):,}. `dynapar report --data` writes all.</p>"
        )
    measured = {step.step: step for step in report.measured.steps} if report.measured else {}
    head = ["step", "samples", "tokens", "microbatches", "degrees", "makespan", "gap",
            "best single degree"]  # fmt: skip
    if measured:
        head += ["measured", "tokens/s", "loss"]

    def row(step: PlannedStep) -> list[str]:
        cells = [
            str(step.step),
            f"{step.samples:,}",
            f"{step.tokens:,}",
            f"{step.microbatches:,}",
            " ".join(f"{degree}x{amount}" for degree, amount in step.samples_by_degree.items()),
            seconds(step.makespan),
            "optimal" if step.optimal else percent(step.gap),
            f"{seconds(step.homogeneous)} at {step.homogeneous_degree}"
            if step.homogeneous_degree
            else "-",
        ]
        if measured:
            found = measured.get(step.step)
            cells += (
                [seconds(found.makespan), f"{found.tokens_per_second:,.0f}", f"{found.loss:.4f}"]
                if found
                else ["-", "-", "-"]
            )
        return cells

    note = "Degrees: degree x samples."
    if not all(step.homogeneous_degree for step in steps):
        note += (
            " Best single degree: - where none holds all samples, or where none was looked for, as "
            "in random layouts and in steps dealt for ranks of unequal speed."
        )
    note = f"<p class=caption>{note}</p>"
    return text + table(head, [row(step) for step in steps]) + note


def _footer(report: Report, command: str) -> str:
    text = f"Made by dynapar {escape(report.version)}."
    if command:
        text += f" Command: <code>{escape(command)}</code>"
    return f"<p>{text}</p><p>docs/report.md says what each part means.</p>"
