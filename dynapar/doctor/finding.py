"""What a check came to: good, bearable, or in the way of a run; and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
"""All well; a run works but is slower, larger or harder to end; a run would not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the doctor's table."""

    check: str
    """What was looked at."""
    status: Status
    found: str
    """What was seen, with its value."""
    do: str = ""
    """What to do; empty where nothing has to be done."""
    source: str = ""
    """Where others say so: an address, or empty."""


def ok(check: str, found: str) -> Finding:
    """A check that holds."""
    return Finding(check=check, status="ok", found=found)


def warn(check: str, found: str, do: str, *, source: str = "") -> Finding:
    """Something that a run survives."""
    return Finding(check=check, status="warn", found=found, do=do, source=source)


def fail(check: str, found: str, do: str, *, source: str = "") -> Finding:
    """Something that a run does not survive, or that makes it wrong."""
    return Finding(check=check, status="fail", found=found, do=do, source=source)
