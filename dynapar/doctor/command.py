"""The command `dynapar doctor`: look at everything, print a table, fail where a run would."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import dynapar
from dynapar.console import Cell, show_json, show_table
from dynapar.doctor.finding import Finding, Status, fail
from dynapar.doctor.gpus import DRIVER, Gpu, check_gpus, find_gpus
from dynapar.doctor.kernels import check_kernels, refusals
from dynapar.doctor.machine import cache_folders, check_cache, check_limits, find_limits
from dynapar.doctor.place import check_place, find_place
from dynapar.doctor.selfcheck import check_attention, check_planner, plan_twice
from dynapar.doctor.settings import check_settings, nccl_files
from dynapar.doctor.versions import check_versions, installed
from dynapar.errors import CheckFailedError, DynaparError

MARKS: Mapping[Status, str] = MappingProxyType({"ok": "ok", "warn": "WARN", "fail": "FAIL"})

SLOW: Mapping[str, str] = MappingProxyType(
    {
        "planner": "(the first time it is compiled, for a minute)",
        "attention at degree 2": "(starting two ranks)",
    }
)
"""What people wait for, so that they are told."""

BROKEN = (ImportError, OSError, RuntimeError, DynaparError)
"""What loading or running a broken installation raises."""


def doctor_command(*, ranks: int | None, quick: bool, json: bool) -> None:
    """Look at the installation and the machine, and print what was found.

    Under torchrun the first rank of each machine looks, and the others end at once.

    Args:
        ranks: That a run will have on this machine; None for the launcher's, or one a GPU.
        quick: Leave out the self-checks.
        json: Print one JSON object instead of the table.

    Raises:
        CheckFailedError: Something would keep a run from working; the table has been printed.
    """
    environ = os.environ
    if environ.get("LOCAL_RANK", "0") != "0":
        return
    findings = list(examine(environ, ranks=ranks, quick=quick))
    show_json(to_json(findings)) if json else show(findings)
    if failed := [finding.check for finding in findings if finding.status == "fail"]:
        raise CheckFailedError(
            f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}. Do what the "
            "table says, and look again"
        )


def examine(
    environ: Mapping[str, str], *, ranks: int | None = None, quick: bool = False
) -> Iterator[Finding]:
    """Every check in turn, on this machine.

    Args:
        environ: The environment variables.
        ranks: As for `doctor_command`.
        quick: As for `doctor_command`.
    """
    yield from check_versions(installed(), python=platform.python_version())
    gpus, broken = _load_torch()
    place = find_place(environ, gpus=len(gpus), ranks=ranks)
    limits = find_limits()
    yield from check_place(place, environ, cores=limits.cores)
    if broken is None:
        build, nccl = _build()
        yield from check_gpus(gpus, place, driver=DRIVER.exists(), build=build, nccl=nccl)
    files = nccl_files(environ, home=Path.home())
    yield from check_settings(environ, place, cores=limits.cores, files=files)
    yield from check_limits(limits, place, environ)
    yield check_cache(cache_folders(environ, home=Path.home()))
    if not quick:
        yield _attempt("planner", lambda _: check_planner(plan_twice()))
    if broken is not None:
        yield broken
        return
    device = "cuda" if gpus else "cpu"
    yield from check_kernels(refusals(device), device=device)
    if not quick:
        yield _attempt("attention at degree 2", _attend_on_ranks)
    if not quick and gpus:
        yield _attempt("attention on a GPU", _attend_on_gpu)


def _load_torch() -> tuple[Sequence[Gpu], Finding | None]:
    """The GPUs, or why torch cannot say."""
    try:
        return find_gpus(), None
    except BROKEN as error:
        return (), fail(
            "attention",
            f"torch cannot be loaded ({_reason(error)}): plans can be made here, but GPUs, "
            "kernels and attention could not be looked at, and nothing can be trained",
            "pip install 'torch>=2.10', in the build for this machine",
        )


def _build() -> tuple[str, bool]:
    """What torch was built for, and whether NCCL is in it."""
    import torch
    import torch.distributed

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return build, torch.distributed.is_nccl_available()


def _attend_on_ranks(check: str) -> Finding:
    from dynapar.doctor.ring import measure

    return check_attention(measure(), check=check, who="two gloo ranks")


def _attend_on_gpu(check: str) -> Finding:
    from dynapar.attention.exchange import Transport
    from dynapar.doctor.ring import compare

    error = compare(Transport(), degree=1, dtype="bfloat16", device="cuda")
    return check_attention({"bfloat16": error}, check=check, who="the first GPU")


def _attempt(check: str, run: Callable[[str], Finding]) -> Finding:
    print(f"checking {check} {SLOW.get(check, '')}".rstrip(), file=sys.stderr, flush=True)
    try:
        return run(check)
    except BROKEN as error:
        return fail(
            check,
            f"could not be run ({_reason(error)})",
            "mend what failed above first; else report it with the versions above",
        )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def show(findings: Sequence[Finding]) -> None:
    """Print the table, what to do, and a count, on standard output."""
    rows: list[dict[str, Cell]] = [
        {"": MARKS[finding.status], "check": finding.check, "found": finding.found}
        for finding in findings
    ]
    show_table(f"dynapar {dynapar.__version__}", rows)
    for finding in findings:
        if finding.do:
            source = f" ({finding.source})" if finding.source else ""
            print(f"{MARKS[finding.status]} {finding.check}: {finding.do}{source}")
    counts = Counter(finding.status for finding in findings)
    print(", ".join(f"{counts[status]} {status}" for status in MARKS))


def to_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The same as the table, for programs."""
    return {
        "passed": all(finding.status != "fail" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
