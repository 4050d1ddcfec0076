"""The command `dynapar verify`: compare, print a table, fail above the tolerance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from dynapar.console import Cell, show_json, show_table
from dynapar.errors import CheckFailedError, ConfigError
from dynapar.train.config import Precision, RunConfig, read_run_config
from dynapar.verify.findings import TOLERANCE, Finding, Findings
from dynapar.verify.run import compare, in_precision, say

PRECISIONS: Mapping[str, Precision] = {
    "float32": "float32",
    "float64": "float64",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
"""What `--dtype` takes."""


def verify_command(config_path: Path, *, dtype: str | None, json: bool) -> None:
    """Compare the gradient of planned and of random layouts with that of one process.

    Progress goes to standard error, the table or the JSON to standard output.

    Args:
        config_path: Of a run; the ranks are started here, without torchrun.
        dtype: "float32", "float64" or "bf16"; None for the configuration's own precision.
        json: Print one JSON object instead of the table.

    Raises:
        CheckFailedError: A difference is above the tolerance, or the order of communication does
            not hold; the table has been printed. Or there is nothing to compare.
        ConfigError: The configuration or `dtype` is wrong.
    """
    config = read_run_config(config_path)
    own = config.precision
    if dtype is not None:
        if dtype not in PRECISIONS:
            raise ConfigError(f"dtype is {dtype!r}; expected one of {', '.join(PRECISIONS)}")
        recompute = config.recompute
        config = in_precision(config, PRECISIONS[dtype])
        if recompute and not config.recompute:
            say("recompute is off: in float64 recomputed layers would round to float32")
    if config.costs is None:
        say("no costs are given: planning with the reference that dynapar ships (an H100)")
    given = config.verify.tolerance if config.precision == own else None
    tolerance = TOLERANCE[config.precision] if given is None else given
    findings = compare(config)
    if json:
        show_json(to_json(findings, config, tolerance))
    else:
        show(findings, config, tolerance)
    if not findings.passed(tolerance):
        raise CheckFailedError(failure(findings, tolerance))


def failure(findings: Findings, tolerance: float) -> str:
    """What failed, in one line."""
    if findings.order:
        return f"the order of communication does not hold: {findings.order}"
    bad = [finding for finding in findings.trials if not finding.score <= tolerance]
    worst = max(bad, key=lambda finding: finding.score)
    batch, apart = worst.trial.batch, worst.gradient
    return (
        f"{len(bad)} of {len(findings.trials)} plans are above the tolerance of {tolerance:g}: "
        f"step {batch.step}, {worst.trial.name}, is {worst.loss:.1e} apart in the loss, "
        f"{apart.whole:.1e} in the whole gradient, {apart.worst:.1e} in {apart.parameter}. "
        "Do not train with this model in this version; please report it with this table"
    )


def show(findings: Findings, config: RunConfig, tolerance: float) -> None:
    """Print what was compared and what came out, on standard output."""
    title = f"{config.precision}: planned layouts against one process"
    show_table(title, [_cells(finding, tolerance) for finding in findings.trials])
    for line in _lines(findings, config, tolerance):
        print(line)


def _cells(finding: Finding, tolerance: float) -> dict[str, Cell]:
    apart, alone = finding.gradient, finding.trial.batch.one_process
    cells: dict[str, Cell] = {
        "step": finding.trial.batch.step,
        "plan": finding.trial.name,
        "degree x samples": counts_text(finding.degrees),
        "rings": counts_text(finding.rings) or "none",
        "loss": f"{finding.loss:.1e}",
        "gradient": f"{apart.whole:.1e}",
        "worst parameter": f"{apart.worst:.1e} {apart.parameter}",
    }
    if alone is not None:
        cells |= {"one process": f"{alone.whole:.1e}", "ratio": f"{finding.score:.2f}"}
    return {**cells, "": "pass" if finding.score <= tolerance else "FAIL"}


def counts_text(counts: Mapping[int, int] | Mapping[str, int]) -> str:
    """Counts of what there is, as text.

    >>> counts_text({1: 20, 3: 2})
    '1x20 3x2'
    """
    return " ".join(f"{what}x{count}" for what, count in counts.items())


def _lines(findings: Findings, config: RunConfig, tolerance: float) -> list[str]:
    held: Counter[str] = Counter()
    for batch in findings.batches:
        held.update(batch.modalities)
    samples = ", ".join(f"{count} {name}" for name, count in sorted(held.items()))
    tokens = sum(batch.tokens for batch in findings.batches)
    targets = sum(batch.targets for batch in findings.batches)
    stubs = [reason for batch in findings.batches for reason in batch.stubs.values()]
    meaning = (
        f"distance to the float32 reference at most {tolerance:g} times that of one process"
        if config.precision == "bfloat16"
        else f"relative difference at most {tolerance:g}, of loss, whole gradient and each "
        "parameter (small ones against a thousandth of the largest)"
    )
    return [
        f"compared: {len(findings.batches)} global batches ({samples}; {tokens:,} tokens, "
        f"{targets:,} targets) on {config.verify.ranks} ranks",
        f"tolerance: {meaning}",
        "dropout: "
        + (f"switched off in {len(findings.dropout)} places" if findings.dropout else "none")
        + "; it would draw other numbers in each layout",
        f"order: {findings.order or f'{findings.messages:,} operations replayed, none blocks'}",
        *(f"not loaded, so without a loss: {reason}" for reason in stubs),
        "passed" if findings.passed(tolerance) else "FAILED",
    ]


def to_json(findings: Findings, config: RunConfig, tolerance: float) -> dict[str, object]:
    """The same as the table, for programs."""
    return {
        "precision": config.precision,
        "ranks": config.verify.ranks,
        "tolerance": tolerance,
        "passed": findings.passed(tolerance),
        "order": findings.order or "holds",
        "operations": findings.messages,
        "dropout_switched_off": list(findings.dropout),
        "batches": [
            {
                "step": batch.step,
                "samples": batch.modalities,
                "tokens": batch.tokens,
                "targets": batch.targets,
                "loss": _finite(batch.loss),
                "stubs": list(batch.stubs.values()),
            }
            for batch in findings.batches
        ],
        "plans": [_plan_json(finding, tolerance) for finding in findings.trials],
    }


def _plan_json(finding: Finding, tolerance: float) -> dict[str, object]:
    alone = finding.trial.batch.one_process
    return {
        "step": finding.trial.batch.step,
        "plan": finding.trial.name,
        "degrees": {str(degree): count for degree, count in finding.degrees.items()},
        "rings": dict(finding.rings),
        "loss": _finite(finding.loss),
        "gradient": _finite(finding.gradient.whole),
        "worst": _finite(finding.gradient.worst),
        "worst_parameter": finding.gradient.parameter,
        "one_process": None if alone is None else alone.whole,
        "passed": finding.score <= tolerance,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if isfinite(value) else None
