"""A conversation file: one JSON object a line (.jsonl), or one JSON list (.json)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from dynapar.data.digest import digest_files
from dynapar.data.records import (
    Locator,
    MediaFile,
    Record,
    not_json,
    parse_conversation,
)
from dynapar.errors import SampleError, SourceError


class ConversationSource:
    """Samples with `messages` or `conversations`; media are files, relative to this one."""

    kind = "conversations"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listed = path.suffix == ".json"

    @property
    def files(self) -> Sequence[Path]:
        """The files that locators count."""
        return (self._path,)

    def locate(self) -> list[Locator]:
        """One pass over the text; see `Source.locate`."""
        if self._listed:
            found = [Locator(0, row, -1, 0, "", ()) for row in range(len(self._samples))]
        else:
            found, offset = [], 0
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        found.append(Locator(0, number, offset, len(line), "", ()))
                    offset += len(line)
        if not found:
            raise SourceError(f"{self._path} has no samples; expected one JSON object a line")
        return found

    def record(self, locator: Locator) -> Record:
        """Read one sample; see `Source.record`."""
        if self._listed:
            place = f"{self._path} item {locator.number}"
            if locator.number >= len(self._samples):
                raise SampleError(
                    f"{place} does not exist: the file has {len(self._samples)} items"
                )
            sample = self._samples[locator.number]
        else:
            place = f"{self._path} line {locator.number}"
            line = os.pread(self._descriptor, locator.size, locator.offset)
            try:
                sample = json.loads(line)
            except ValueError as error:
                raise SampleError(f"{place} {not_json(error)}") from None
        name = f"{self._path.stem}-{locator.number}"
        return parse_conversation(sample, default_id=name, place=place, find=self._find)

    def fingerprint(self) -> str:
        """See `digest_files`."""
        return digest_files(self.kind, self.files)

    def _find(self, kind: int, field: str, name: str) -> MediaFile:
        return MediaFile(kind, f"{field} {name!r}", self._path.parent / name, 0, -1)

    @cached_property
    def _descriptor(self) -> int:
        # Kept for the life of the process: reads at given offsets need no lock.
        return os.open(self._path, os.O_RDONLY)

    @cached_property
    def _samples(self) -> list[object]:
        try:
            samples = json.loads(self._path.read_bytes())
        except ValueError as error:
            raise SourceError(f"{self._path} {not_json(error)}") from None
        if not isinstance(samples, list):
            raise SourceError(f"{self._path} holds {type(samples).__name__}; expected a JSON list")
        return samples
