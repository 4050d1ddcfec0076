"""A metadata file as a source: lengths and sizes of samples that lie elsewhere.

It can be indexed and planned with, not trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dynapar.data.digest import digest_files
from dynapar.data.records import Locator, Record
from dynapar.errors import SampleError, SourceError
from dynapar.meta import SampleTable, read_metadata_jsonl
from dynapar.shapes import ModelShape


class MetadataSource:
    """The lines of a metadata file."""

    kind = "metadata"

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def files(self) -> Sequence[Path]:
        """The file itself."""
        return (self._path,)

    def table(self, shape: ModelShape) -> SampleTable:
        """What the lines say, by this model; see `dynapar.meta.read_metadata_jsonl`."""
        return read_metadata_jsonl(self._path, shape)

    def locate(self) -> list[Locator]:
        """Metadata have no samples to be found; always raises SourceError."""
        raise SourceError(
            f"{self._path} holds metadata alone; expected conversations or shards to load samples "
            "from. Name the data themselves as the source."
        )

    def record(self, locator: Locator) -> Record:
        """As `locate`; always raises SampleError."""
        raise SampleError(f"{self._path} line {locator.number} holds metadata alone")

    def fingerprint(self) -> str:
        """See `digest_files`."""
        return digest_files(self.kind, self.files)


def is_metadata(path: Path) -> bool:
    """Whether the first line of a .jsonl file is metadata and no conversation."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        sample = json.loads(first)
    except ValueError:
        return False
    return (
        isinstance(sample, dict)
        and "text_tokens" in sample
        and not {"messages", "conversations"} & set(sample)
    )
