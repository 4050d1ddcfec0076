"""Open what a report is about: a file of plans, or the folder of a run with its measurements.

Plans are gone through line by line, as often as is needed; only the measurements stay in memory.
What does not fit together is left out and said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynapar.costs import REFERENCE, SHIPPED, Costs, load_costs
from dynapar.errors import SourceError
from dynapar.plan import StepPlan
from dynapar.report.clocks import Clocks, read_clocks, unfit
from dynapar.report.lines import Line, LinesFile, open_lines, read_plan

PLANS, METRICS, COSTS = "plans.jsonl", "metrics.jsonl", "costs.json"
"""What a run's folder holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Plans, and what was measured of them."""

    path: Path
    plans: LinesFile
    lines: dict[int, Line]
    """Where each step's plan is, in the order of the file."""
    clocks: dict[int, Clocks]
    """Measurements by step; empty for a file of plans. Those that do not fit a plan are taken out
    when it is first read."""
    run: bool
    """Whether it is the folder of a run."""
    notes: list[str]
    """What was left out."""

    def plan(self, step: int) -> StepPlan:
        """Read one step again."""
        line = self.lines[step]
        return read_plan(self.plans, line, self.plans.read(line))

    def __iter__(self) -> Iterator[StepPlan]:
        """All steps, in order; checks the measurements of each against its plan.

        Raises:
            SourceError: A line is no plan as dynapar wrote it; it is named.
        """
        for line, values in self.plans:
            plan = read_plan(self.plans, line, values)
            clocks = self.clocks.get(plan.step)
            if clocks and (why := unfit(clocks, plan, str(values["digest"]))):
                del self.clocks[plan.step]
                self.notes.append(f"The measurements of step {plan.step} are left out: {why}.")
            yield plan


def open_source(path: Path) -> Source:
    """Open a file of plans or the folder of a run.

    Args:
        path: The file or folder.

    Raises:
        SourceError: It is not there, holds no step, holds a step twice, or a line of it is not as
            dynapar wrote it.
    """
    run = path.is_dir()
    if run and not (path / PLANS).exists():
        raise SourceError(
            f"{path} has no {PLANS}; expected the folder of a run, in which `dynapar train` writes "
            "it with the first step. Give that folder, or a file of plans itself"
        )
    plans = open_lines(path / PLANS if run else path)
    if not plans.lines:
        left_out = f" ({plans.note})" if plans.note else ""
        raise SourceError(
            f"{plans.path} has no {'finished step' if run else 'plan'}{left_out}; expected one a "
            f"line. "
            + ("Let the run finish a step first" if run else "`dynapar plan --out` writes such")
        )
    notes = [f"{plans.note}."] if plans.note else []
    lines: dict[int, Line] = {}
    for line, values in plans:
        step = values.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise SourceError(
                f"{plans.path}, line {line.number} has step {step!r}; expected a number: give a "
                f"file of plans, as `dynapar plan --out` writes, or the folder of a run"
            )
        if step in lines:
            raise SourceError(
                f"{plans.path} holds step {step} twice, in lines {lines[step].number} and "
                f"{line.number}; expected each step once: report on each run's file by itself"
            )
        lines[step] = line
    clocks = _clocks(path / METRICS, lines, notes) if run else {}
    return Source(path=path, plans=plans, lines=lines, clocks=clocks, run=run, notes=notes)


def _clocks(path: Path, plans: dict[int, Line], notes: list[str]) -> dict[int, Clocks]:
    if not path.exists():
        notes.append(f"{path} is not there: the run has plans, but no measurements.")
        return {}
    file = open_lines(path)
    if file.note:
        notes.append(f"{file.note}.")
    found: dict[int, Clocks] = {}
    for line, row in file:
        where = f"{path}, line {line.number}"
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise SourceError(
                f"{where} has step {step!r}; expected a number. Give the file as `dynapar train` "
                f"wrote it"
            )
        if step in found:
            raise SourceError(f"{where} is the second one of step {step}; expected one. Remove it")
        found[step] = read_clocks(row, where)
    if extra := [step for step in found if step not in plans]:
        notes.append(
            f"Steps without a plan are left out ({_few(extra)}): {path.name} has them, {PLANS} "
            f"does not."
        )
    if missing := [step for step in plans if step not in found]:
        notes.append(f"Steps without measurements: {_few(missing)}; only their plan is shown.")
    return {step: clocks for step, clocks in found.items() if step in plans}


def _few(steps: list[int]) -> str:
    text = ", ".join(map(str, steps[:8]))
    return f"{text} and {len(steps) - 8} more" if len(steps) > 8 else text


def choose_costs(source: Source, given: Path | None, named: str) -> tuple[Costs, str]:
    """What to price with, and what to say about it.

    Args:
        source: What the report is about.
        given: A cost file; None for the run's own, or shipped ones.
        named: Name of the costs that the plans were made with.

    Returns:
        The costs; a note where they may not be those of the plans, else empty.

    Raises:
        CostsError: The costs cannot be read.
    """
    own = source.path / COSTS
    if given is not None:
        costs = load_costs(given)
    elif source.run and own.exists():
        costs = load_costs(own)
    elif named in SHIPPED:
        costs = load_costs(named)
    else:
        return load_costs(None), (
            f"The plans were made with costs {named!r}, which were not given: all that is priced "
            f"here (the work of encoders and LLM, idle time, static and padded layouts) is priced "
            f"with the reference costs {REFERENCE}. Give the plans' own by --costs."
        )
    if costs.name != named:
        return costs, (
            f"The plans were made with costs {named!r}; what is priced here is priced with "
            f"{costs.name!r}."
        )
    return costs, ""
