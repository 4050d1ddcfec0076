"""Webdataset shards: plain tar files whose members `key.suffix` make up samples.

A sample has a `json` member as a line of a conversation file, whose `images` and `videos` are
suffixes of members ("0.png"); or, without one, a picture and a `txt` member with what is to be said
about it. Members are reached by their byte offsets, so a tar is read at random like any file.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from threading import Lock

from dynapar.data.digest import digest_files
from dynapar.data.records import (
    Locator,
    MediaFile,
    Member,
    Record,
    not_json,
    parse_conversation,
)
from dynapar.errors import SampleError, SourceError

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif")
"""Suffixes of a picture in a sample without a json member."""


class ShardSource:
    """Samples of some tar files, in their order."""

    kind = "shards"

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._descriptors: dict[int, int] = {}
        self._lock = Lock()

    @property
    def files(self) -> Sequence[Path]:
        """The files that locators count."""
        return self._files

    def locate(self) -> list[Locator]:
        """One pass over the text; see `Source.locate`."""
        found: list[Locator] = []
        for number, path in enumerate(self._files):
            found += _members(number, path)
        if not found:
            raise SourceError(
                f"{self._files[0]} has no samples; expected members as key.json, key.png"
            )
        return found

    def record(self, locator: Locator) -> Record:
        """Read one sample; see `Source.record`."""
        path = self._files[locator.file]
        members = {member.name: member for member in locator.members}

        place = f"{path} key {locator.key!r}"

        def find(kind: int, field: str, name: str) -> MediaFile:
            if name not in members:
                raise SampleError(
                    f"{place}: {field} is {name!r}, which is no member of the sample; expected one "
                    f"of {sorted(members)}"
                )
            return MediaFile(kind, f"{field} {name!r}", path, *members[name][1:])

        text = self._text(locator)
        if "json" in members:
            try:
                sample = json.loads(text)
            except ValueError as error:
                raise SampleError(f"{place}: its json member {not_json(error)}") from None
        else:
            sample = _captioned(members, text, place)
        return parse_conversation(sample, default_id=locator.key, place=place, find=find)

    def fingerprint(self) -> str:
        """See `digest_files`."""
        return digest_files(self.kind, self._files)

    def _text(self, locator: Locator) -> bytes:
        if locator.offset < 0:
            return b""
        with self._lock:
            if locator.file not in self._descriptors:
                self._descriptors[locator.file] = os.open(self._files[locator.file], os.O_RDONLY)
        return os.pread(self._descriptors[locator.file], locator.size, locator.offset)


def _members(number: int, path: Path) -> list[Locator]:
    """The samples of one tar, from its members' headers."""
    entries: list[tuple[str, Member]] = []
    try:
        with tarfile.open(path, mode="r:") as tar:
            for info in tar:
                match = _NAME.match(info.name)
                if info.isfile() and match:
                    entries.append((match[1], Member(match[2], info.offset_data, info.size)))
    except tarfile.TarError as error:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        why = (
            "it is gzip-compressed; unpack it, since samples are read at random"
            if packed
            else error
        )
        raise SourceError(f"{path} cannot be read as a tar file: {why}") from None
    found: list[Locator] = []
    for key, group in groupby(entries, key=lambda entry: entry[0]):
        members = tuple(member for _, member in group)
        text = next((m for wanted in ("json", "txt") for m in members if m.name == wanted), None)
        offset, size = (text.offset, text.size) if text else (-1, 0)
        found.append(Locator(number, len(found), offset, size, key, members))
    return found


def _captioned(members: dict[str, Member], text: bytes, place: str) -> dict[str, object]:
    pictures = [name for name in members if name.lower() in PICTURES]
    if "txt" not in members or len(pictures) != 1:
        raise SampleError(
            f"{place}: members {sorted(members)}; expected a json member, or one picture and a txt"
        )
    asked = {"role": "user", "content": [{"type": "image"}]}
    said = {
        "role": "assistant",
        "content": [{"type": "text", "text": text.decode("utf-8", "replace")}],
    }
    return {"messages": [asked, said], "images": pictures}
