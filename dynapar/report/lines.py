"""Read files of one JSON object a line that a run may have been writing when it ended.

A last line that was cut off is named and left out; any other line that is no JSON object is an
error. Lines are found again by their place in the file, so that a file of plans larger than memory
can be read twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynapar.errors import PlanError, SourceError
from dynapar.plan import StepPlan, plan_from_json
from dynapar.plan.form import RECOMPUTE_VERSION, VERSION
from dynapar.plan.schema import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Where a whole line stands."""

    number: int
    """From 1."""
    begin: int
    """Byte at which it begins."""
    length: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesFile:
    """A file of JSON lines, looked through once."""

    path: Path
    lines: tuple[Line, ...]
    """Those that are whole and not empty."""
    note: str
    """What was left out at its end; empty where nothing was."""

    def read(self, line: Line) -> dict[str, Json]:
        """The object of a line.

        Raises:
            SourceError: It is not a JSON object in UTF-8.
        """
        with self.path.open("rb") as file:
            file.seek(line.begin)
            return self._parse(line, file.read(line.length))

    def __iter__(self) -> Iterator[tuple[Line, dict[str, Json]]]:
        with self.path.open("rb") as file:
            for line in self.lines:
                file.seek(line.begin)
                yield line, self._parse(line, file.read(line.length))

    def _parse(self, line: Line, text: bytes) -> dict[str, Json]:
        where = f"{self.path}, line {line.number}"
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{where} is not JSON ({error}); expected one object a line. Give the file as "
                f"dynapar wrote it, or remove the line"
            ) from None
        if not isinstance(values, dict):
            raise SourceError(
                f"{where} is {type(values).__name__}, not a JSON object; expected one object a "
                f"line. Give the file as dynapar wrote it, or remove the line"
            )
        return values


def open_lines(path: Path) -> LinesFile:
    """Find the lines of a file.

    Args:
        path: The file. A last line without its end that is no JSON is taken to be cut off.

    Raises:
        SourceError: The file cannot be read.
    """
    lines: list[Line] = []
    note, begin = "", 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    lines.append(Line(number=number, begin=begin, length=len(text)))
                if not text.endswith(b"\n") and not _is_json(text):
                    lines.pop()
                    note = (
                        f"{path}, line {number} was cut off after {len(text):,} bytes and is left "
                        f"out"
                    )
                begin += len(text)
    except OSError as error:
        raise SourceError(
            f"{path}: {error.strerror}; give a file of plans or the folder of a run"
        ) from None
    return LinesFile(path=path, lines=tuple(lines), note=note)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_plan(file: LinesFile, line: Line, values: Mapping[str, Json]) -> StepPlan:
    """The plan of a line.

    Raises:
        SourceError: It is of another version, or no plan as dynapar wrote it; the line is named.
    """
    where = f"{file.path}, line {line.number}"
    version = values.get("version")
    if version not in (VERSION, RECOMPUTE_VERSION):
        first = file.read(file.lines[0]).get("version")
        mixed = f" (line {file.lines[0].number} has {first!r})" if first != version else ""
        raise SourceError(
            f"{where} has version {version!r} of a plan's form{mixed}; expected {VERSION} "
            f"or {RECOMPUTE_VERSION}: plan again, or report with the dynapar that wrote it"
        )
    try:
        return plan_from_json(values)
    except PlanError as error:
        raise SourceError(f"{where}: {error}") from None
