"""Open a source of samples by its path: conversation files, webdataset shards, metadata lines."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from dynapar.data.conversations import ConversationSource
from dynapar.data.metadata import MetadataSource, is_metadata
from dynapar.data.records import Locator, Record
from dynapar.data.shards import ShardSource
from dynapar.errors import SourceError

_BRACES = re.compile(r"\{([^{}]+)\}")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")


class Source(Protocol):
    """Samples that can be listed once and then read at random."""

    @property
    def kind(self) -> str:
        """What it is: "conversations", "shards" or "metadata"."""

    @property
    def files(self) -> Sequence[Path]:
        """Its files; `Locator.file` counts them."""

    def locate(self) -> list[Locator]:
        """Where its samples lie, in order; one pass over the text, no media.

        Raises:
            SourceError: There are no samples, or a file is not of its kind.
        """

    def record(self, locator: Locator) -> Record:
        """Read one sample; thread-safe.

        Raises:
            SampleError: It is malformed; file, line or key and field are named.
        """

    def fingerprint(self) -> str:
        """A digest of its files; differs when they do."""


def open_source(path: str) -> Source:
    """Open a source for training or indexing.

    Args:
        path: A conversation file (.jsonl or .json), a metadata file (.jsonl), or webdataset
            shards: one .tar, a brace pattern as `shards-{000..007}.tar`, or a glob.

    Raises:
        SourceError: Nothing is there, or it is of another kind (compressed shards among them).
    """
    if path.endswith(_COMPRESSED):
        raise SourceError(
            f"{path}: compressed shards cannot be read at random; expected plain .tar files. "
            "Unpack them once, for example with gunzip."
        )
    if path.endswith(".tar"):
        return ShardSource(expand(path))
    if Path(path).is_dir():
        raise SourceError(
            f"source {path!r} is a folder; expected a file in it, or a pattern such as "
            f"{str(Path(path) / 'shards-*.tar')!r}"
        )
    if not Path(path).is_file():
        raise SourceError(
            f"source {path!r} does not exist; expected a file or a pattern of .tar files"
        )
    if path.endswith(".jsonl") and is_metadata(Path(path)):
        return MetadataSource(Path(path))
    if path.endswith((".jsonl", ".json")):
        return ConversationSource(Path(path))
    raise SourceError(
        f"source {path!r} is of no known kind; expected .jsonl or .json (conversations) or .tar "
        "(webdataset shards)"
    )


def expand(pattern: str) -> tuple[Path, ...]:
    """The files that a brace pattern and globs stand for, in order.

    Raises:
        SourceError: None, or a file that a brace pattern names does not exist.

    >>> from dynapar.data.sources import _braces
    >>> list(_braces("s-{08..10}.tar"))
    ['s-08.tar', 's-09.tar', 's-10.tar']
    """
    paths: list[Path] = []
    for name in _braces(pattern):
        found = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        paths += map(Path, found)
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise SourceError(
            f"source {pattern!r}: {missing[0] if missing else 'no file'} "
            f"{'does not exist' if missing else 'matches'}; expected existing .tar files. Check "
            "the folder and the numbers between the braces."
        )
    return tuple(paths)


def _braces(pattern: str) -> Iterable[str]:
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    inside = match.group(1)
    if bounds := re.fullmatch(r"(\d+)\.\.(\d+)", inside):
        low, high = bounds.groups()
        choices = [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    else:
        choices = inside.split(",")
    heads = [pattern[: match.start()] + choice + pattern[match.end() :] for choice in choices]
    return [name for head in heads for name in _braces(head)]
