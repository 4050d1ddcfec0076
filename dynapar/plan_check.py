"""Check files of plans: what `dynapar plan --check` does."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from pathlib import Path

from dynapar.console import show_json
from dynapar.costs import Costs, load_costs
from dynapar.errors import CheckFailedError, PlanError, SourceError
from dynapar.plan import PlanFormError, plan_from_json, validate
from dynapar.plan.schema import Json


def _lines(path: str | Path) -> Iterator[tuple[int, dict[str, Json]]]:
    """The objects of a file of JSON lines, each with the number of its line.

    Raises:
        SourceError: The file is missing or no text, or a line is no object; the line is named.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; give a file of plans") from None
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 ({error}); give a file of plans") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json_text.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{path}, line {number} is not JSON ({error}); expected one plan a line, as "
                f"`dynapar plan --out` writes"
            ) from None
        if not isinstance(values, dict):
            raise SourceError(
                f"{path}, line {number} is not a JSON object; expected one plan a line, as "
                f"`dynapar plan --out` writes"
            )
        yield number, values


def check_plans(path: str | Path, costs: Costs | None = None) -> int:
    """Validate a file of plans.

    Args:
        path: The file.
        costs: What the plans were made with; then each microbatch is priced anew. Without them
            the shipped costs are used for the plans that name them, and the others' times must
            only agree among themselves.

    Returns:
        How many plans it holds.

    Raises:
        SourceError: The file is missing or has no plans, or a line is no plan; the line and the
            key are named.
        CheckFailedError: Some plans are not valid; each is named, with its faults.
    """
    reference = load_costs(None)
    faults, count = [], 0
    for number, values in _lines(path):
        count += 1
        try:
            plan = plan_from_json(values)
            validate(plan, costs or (reference if plan.costs == reference.name else None))
        except PlanFormError as error:
            raise SourceError(f"{path}, line {number}: {error}") from None
        except PlanError as error:
            faults.append(f"{path}, line {number}: {error}")
    if not count:
        raise SourceError(f"{path} has no plans; expected one a line: dynapar plan --out writes it")
    if faults:
        raise CheckFailedError("\n".join(faults))
    return count


def check_command(path: Path, *, costs: Path | None = None, json: bool = False) -> None:
    """Validate a file of plans, and say so.

    Raises:
        SourceError: As `check_plans`.
        CheckFailedError: As `check_plans`.
    """
    count = check_plans(path, None if costs is None else load_costs(costs))
    if json:
        show_json({"plans": count, "valid": True})
    else:
        print(f"{path}: {count} plan{'s' if count != 1 else ''}, all valid")
