"""The index of a source: one row a sample, made from headers, kept as Parquet.

A row holds what planning needs (tokens, targets, encoder units) and where the sample lies, so that
a run opens no media and reads no text to plan. The file's metadata name the source, the settings
of the processor and the tokenizer that it was made with; `Index.check` refuses other ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dynapar.data.records import Locator, Member
from dynapar.data.sources import Source
from dynapar.errors import SourceError
from dynapar.meta import IntArray, SampleTable
from dynapar.prefixes import Prefixes
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, MediaTokens, ModelShape

VERSION = 2
"""Of the file's columns and metadata."""

_MEMBER = pa.struct([("name", pa.string()), ("offset", pa.int64()), ("size", pa.int64())])
_MEDIUM = pa.struct(
    [
        ("kind", pa.int8()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("frames", pa.int64()),
        ("fps", pa.float64()),
        ("seconds", pa.float64()),
    ]
)
_COLUMNS: list[tuple[str, pa.DataType]] = [
    ("id", pa.string()),
    ("llm_tokens", pa.int64()),
    ("text_tokens", pa.int64()),
    ("label_tokens", pa.int64()),
    ("modalities", pa.uint8()),
    ("unit_tokens", pa.list_(pa.int64())),
    ("media", pa.list_(_MEDIUM)),
    ("file", pa.int32()),
    ("number", pa.int64()),
    ("offset", pa.int64()),
    ("size", pa.int64()),
    ("key", pa.string()),
    ("members", pa.list_(_MEMBER)),
]
SCHEMA = pa.schema(_COLUMNS)
"""The columns; the last six are a `Locator`."""
PREFIXED_SCHEMA = pa.schema(
    [
        *_COLUMNS,
        ("prefix_id", pa.string()),
        ("prefix_tokens", pa.int64()),
        ("prefix_text_tokens", pa.int64()),
        ("prefix_units", pa.int64()),
    ]
)
"""Of an index some of whose samples share a prefix; the last four are `Prefixes`."""


class Medium(NamedTuple):
    """Size of a media item, upright, as its header says."""

    kind: int
    height: int
    """0 for an audio clip."""
    width: int
    """0 for an audio clip."""
    frames: int
    """1 for an image, 0 for an audio clip."""
    fps: float
    """0.0 for all but videos."""
    seconds: float = 0.0
    """Length of an audio clip; 0.0 for others."""

    def tokens(self, shape: ModelShape, *, images: int = 1) -> MediaTokens:
        """What the model makes of it.

        Args:
            shape: The model.
            images: Images in its sample.

        Raises:
            SampleError: The size is impossible, or the model takes no such media.
        """
        if self.kind == AUDIO_KIND:
            return shape.audio(self.seconds)
        if self.kind == IMAGE_KIND:
            return shape.image(self.height, self.width, images=images)
        return shape.video(self.frames, self.fps, self.height, self.width)


def media_tokens(media: Sequence[Medium], shape: ModelShape) -> list[MediaTokens]:
    """What a model makes of all media of one sample; raises SampleError as `Medium.tokens`."""
    images = sum(1 for medium in media if medium.kind == IMAGE_KIND)
    return [medium.tokens(shape, images=images) for medium in media]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an index was made from and with."""

    source_kind: str
    source_files: tuple[str, ...]
    """Names without folders."""
    source: str
    """Fingerprint of the source."""
    model: str
    """Name of the model's folder."""
    settings: Mapping[str, str]
    """`ModelShape.settings()`."""
    tokenizer: str
    """Fingerprint of the tokenizer."""

    def to_json(self) -> str:
        """As it stands in the file's metadata."""
        values = {name: getattr(self, name) for name in Header.__slots__}
        return json.dumps({"version": VERSION, **values}, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An index that has been read."""

    path: Path
    header: Header
    table: SampleTable
    """One row a sample, in the order of the source."""
    fingerprint: str
    """Of header and content; ranks compare it."""
    places: pa.Table
    """The columns that say where samples and media are."""

    def __len__(self) -> int:
        return len(self.table)

    def locator(self, row: int) -> Locator:
        """Where a sample lies in the source."""
        file, number, offset, size, key, members = (
            self.places.column(name)[row].as_py()
            for name in ("file", "number", "offset", "size", "key", "members")
        )
        return Locator(file, number, offset, size, key, tuple(Member(**m) for m in members))

    def media(self, row: int) -> tuple[Medium, ...]:
        """Sizes of a sample's media, in the order of their placeholders."""
        return tuple(Medium(**medium) for medium in self.places.column("media")[row].as_py())

    def check(self, *, source: Source, shape: ModelShape, tokenizer: str) -> None:
        """Refuse a source or a model other than those that the index was made with.

        Raises:
            SourceError: Names what differs, both values, and what to run.
        """
        if self.header.source_kind == "metadata":
            raise SourceError(
                f"{self.path} is an index of metadata alone; expected one of conversations or "
                "shards to load samples. Index the data themselves."
            )
        made, now = dict(self.header.settings), shape.settings()
        made |= {"tokenizer.json": self.header.tokenizer, "source": self.header.source}
        now |= {"tokenizer.json": tokenizer, "source": source.fingerprint()}
        differing = [key for key in made | now if made.get(key) != now.get(key)]
        if differing:
            values = "; ".join(
                f"{key} was {made.get(key)} and is {now.get(key)}" for key in differing
            )
            what = "source has changed" if differing == ["source"] else "model's settings differ"
            raise SourceError(
                f"{self.path}: the {what} since the index was made: {values}. Run dynapar index "
                "again."
            )


def read_index(path: str | Path) -> Index:
    """Read an index.

    Raises:
        SourceError: The file is missing, is no index of this version, or has no samples.
    """
    path = Path(path)
    if not path.is_file():
        raise SourceError(
            f"index {path} does not exist; make it with dynapar index SOURCE --out {path}"
        )
    try:
        columns = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise SourceError(f"index {path} is no Parquet file: {error}") from None
    header = _read_header(path, (columns.schema.metadata or {}).get(b"dynapar"))
    known = any(columns.schema.equals(schema) for schema in (SCHEMA, PREFIXED_SCHEMA))
    if not known or len(columns) == 0:
        raise SourceError(
            f"index {path} has {len(columns)} rows of columns {columns.schema.names}; expected "
            f"rows of {SCHEMA.names}. Run dynapar index again."
        )
    columns = columns.combine_chunks()
    table = _table(columns)
    digest = hashlib.sha256(header.to_json().encode())
    digest.update("\0".join(table.ids).encode())
    for array in (table.llm_tokens, table.text_tokens, table.label_tokens, table.unit_tokens):
        digest.update(array.tobytes())
    if (prefixes := table.prefixes) is not None:
        digest.update("\0".join(prefixes.ids).encode())
        for array in (prefixes.tokens, prefixes.text_tokens, prefixes.units):
            digest.update(array.tobytes())
    return Index(
        path=path,
        header=header,
        table=table,
        fingerprint=digest.hexdigest()[:16],
        places=columns.select(SCHEMA.names[6:]),
    )


def _read_header(path: Path, text: bytes | None) -> Header:
    values = json.loads(text) if text else {}
    version = values.pop("version", None)
    if version != VERSION:
        raise SourceError(
            f"index {path} has version {version}; expected {VERSION}, as dynapar index writes it. "
            "Make it again."
        )
    return Header(**{**values, "source_files": tuple(values["source_files"])})


def _table(columns: pa.Table) -> SampleTable:
    def integers(name: str) -> IntArray:
        return columns.column(name).to_numpy().astype(np.int64)

    units = columns.column("unit_tokens")
    counts = np.asarray(pc.list_value_length(units)).astype(np.int64)
    return SampleTable(
        ids=tuple(str(id) for id in columns.column("id").to_pylist()),
        llm_tokens=integers("llm_tokens"),
        text_tokens=integers("text_tokens"),
        label_tokens=integers("label_tokens"),
        modalities=columns.column("modalities").to_numpy().astype(np.uint8),
        unit_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        unit_tokens=np.asarray(pc.list_flatten(units)).astype(np.int64),
        prefixes=Prefixes(
            ids=tuple(str(id) for id in columns.column("prefix_id").to_pylist()),
            tokens=integers("prefix_tokens"),
            text_tokens=integers("prefix_text_tokens"),
            units=integers("prefix_units"),
        )
        if "prefix_id" in columns.schema.names
        else None,
    )


def write_index(path: Path, header: Header, rows: Sequence[Mapping[str, object]]) -> None:
    """Write an index; the file appears only when it is whole.

    Args:
        path: Where; its folder is made.
        header: What it was made from.
        rows: One mapping a sample, with the columns of `SCHEMA` or of `PREFIXED_SCHEMA`.
    """
    given = PREFIXED_SCHEMA if rows and "prefix_id" in rows[0] else SCHEMA
    schema = given.with_metadata({b"dynapar": header.to_json().encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), partial)
    partial.replace(path)
