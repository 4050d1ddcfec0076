"""Make the index of a source: headers of media, tokens of text, nothing decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dynapar.data.chat import ChatTokenizer
from dynapar.data.commons import Commons
from dynapar.data.header import MediaSize
from dynapar.data.indexfile import Header, Medium, media_tokens, write_index
from dynapar.data.indexfile import Index as Index
from dynapar.data.indexfile import read_index as read_index
from dynapar.data.media import media_size
from dynapar.data.metadata import MetadataSource
from dynapar.data.records import Locator, MediaFile, Record
from dynapar.data.sources import Source
from dynapar.errors import SampleError
from dynapar.meta import AUDIO, IMAGE, VIDEO
from dynapar.prefixes import Prefixes
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, VIDEO_KIND, ModelShape

Progress = Callable[[int, int], None]
"""(samples done, samples in all); called now and then."""

_EVERY = 16
_BITS = {IMAGE_KIND: IMAGE, VIDEO_KIND: VIDEO, AUDIO_KIND: AUDIO}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """What an indexing run found."""

    samples: int
    llm_tokens: int
    label_tokens: int
    encoder_tokens: int
    kinds: dict[str, int]
    """Samples by what they hold: "text", "image", "video", "image + video"."""
    notes: tuple[str, ...]
    """What was done in another way than usual, once for each kind of file."""
    skipped: tuple[str, ...]
    """Samples left out, and why; empty unless asked for."""


def build_index(
    source: Source,
    shape: ModelShape,
    out: str | Path,
    progress: Progress | None = None,
    *,
    skip_bad: bool = False,
) -> IndexSummary:
    """Index a source.

    One pass: text is tokenised, sizes are read from headers, once for each file. About a
    millisecond a sample and the time of the tokenizer.

    Args:
        source: The samples.
        shape: The model, with its folder.
        out: The Parquet file to write.
        progress: Told how far it is.
        skip_bad: Leave out samples that are malformed or whose media cannot be read, and say
            which, instead of stopping at the first one.

    Raises:
        SourceError: The source has no samples.
        SampleError: A sample is malformed, its media cannot be read, two samples have one id, or
            no sample at all can be read.
        ModelError: The model folder's tokenizer is missing or unfit.
    """
    if isinstance(source, MetadataSource):
        return _index_metadata(source, shape, Path(out))
    builder = _Builder(shape)
    locators = source.locate()
    rows, skipped = [], []
    seen: dict[str, str] = {}
    for done, locator in enumerate(locators):
        if progress is not None and done % _EVERY == 0:
            progress(done, len(locators))
        try:
            record = source.record(locator)
            if record.id in seen:
                raise SampleError(
                    f"{record.place} has the id of {seen[record.id]}; expected ids that differ. "
                    "Rename one of them."
                )
            rows.append(builder.row(locator, record))
            seen[record.id] = record.place
        except SampleError as error:
            if not skip_bad:
                raise
            skipped.append(str(error))
    if not rows:
        raise SampleError(f"none of {len(locators)} samples can be read; the first: {skipped[0]}")
    header = _header(source, shape, builder.tokenizer.fingerprint)
    shared = builder.commons.columns()
    own = [{}] * len(rows) if shared is None else shared
    write_index(
        Path(out), header, [{**row.columns, **more} for row, more in zip(rows, own, strict=True)]
    )
    if progress is not None:
        progress(len(locators), len(locators))
    return IndexSummary(
        samples=len(rows),
        llm_tokens=sum(row.llm_tokens for row in rows),
        label_tokens=sum(row.label_tokens for row in rows),
        encoder_tokens=sum(row.encoder_tokens for row in rows),
        kinds=dict(sorted(Counter(row.kind for row in rows).items())),
        notes=builder.notes(),
        skipped=tuple(skipped),
    )


def _header(source: Source, shape: ModelShape, tokenizer: str) -> Header:
    return Header(
        source_kind=source.kind,
        source_files=tuple(path.name for path in source.files),
        source=source.fingerprint(),
        model=shape.name,
        settings=shape.settings(),
        tokenizer=tokenizer,
    )


def _kind(modalities: int) -> str:
    """Modality bits in words."""
    names = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}
    return " + ".join(name for bit, name in names.items() if modalities & bit) or "text"


def _index_metadata(source: MetadataSource, shape: ModelShape, out: Path) -> IndexSummary:
    """Write a metadata file's numbers as an index; it says nothing of places and media."""
    table = source.table(shape)
    nowhere = Locator(0, 0, -1, 0, "", ())
    rows = [
        {
            "id": id,
            "llm_tokens": int(table.llm_tokens[row]),
            "text_tokens": int(table.text_tokens[row]),
            "label_tokens": int(table.label_tokens[row]),
            "modalities": int(table.modalities[row]),
            "unit_tokens": table.units(row).tolist(),
            "media": [],
            **nowhere._asdict(),
            **_prefix_columns(table.prefixes, row),
        }
        for row, id in enumerate(table.ids)
    ]
    write_index(out, _header(source, shape, "none"), rows)
    return IndexSummary(
        samples=len(table),
        llm_tokens=int(table.llm_tokens.sum()),
        label_tokens=int(table.label_tokens.sum()),
        encoder_tokens=int(table.unit_tokens.sum()),
        kinds=dict(sorted(Counter(_kind(int(bits)) for bits in table.modalities).items())),
        notes=("metadata alone: the index serves planning, not training",),
        skipped=(),
    )


def _prefix_columns(prefixes: Prefixes | None, row: int) -> dict[str, object]:
    if prefixes is None:
        return {}
    return {
        "prefix_id": prefixes.ids[row],
        "prefix_tokens": int(prefixes.tokens[row]),
        "prefix_text_tokens": int(prefixes.text_tokens[row]),
        "prefix_units": int(prefixes.units[row]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    columns: dict[str, object]
    llm_tokens: int
    label_tokens: int
    encoder_tokens: int
    kind: str


class _Builder:
    """Makes rows; remembers headers, since samples share media."""

    def __init__(self, shape: ModelShape) -> None:
        self.tokenizer = ChatTokenizer(shape)
        self.commons = Commons()
        self._shape = shape
        self._sizes: dict[tuple[Path, int], MediaSize] = {}
        self._counted: Counter[str] = Counter()

    def row(self, locator: Locator, record: Record) -> _Row:
        try:
            sizes = [self._size(item) for item in record.media]
            media = [
                Medium(item.kind, size.height, size.width, size.frames, size.fps, size.seconds)
                for item, size in zip(record.media, sizes, strict=True)
            ]
            tokens = media_tokens(media, self._shape)
        except SampleError as error:
            raise SampleError(f"{record.place}: {error}") from None
        rendered = self.tokenizer.render(record, tokens)
        self.commons.add(record.prefix, rendered, record.media, tokens)
        units = [item.unit_tokens for item in tokens for _ in range(item.units)]
        llm_tokens = len(rendered.ids)
        modalities = 0
        for medium in media:
            modalities |= _BITS[medium.kind]
        columns: dict[str, object] = {
            "id": record.id,
            "llm_tokens": llm_tokens,
            "text_tokens": llm_tokens - sum(item.llm_tokens for item in tokens),
            "label_tokens": rendered.label_tokens,
            "modalities": modalities,
            "unit_tokens": units,
            "media": [medium._asdict() for medium in media],
            **locator._asdict(),
            "members": [member._asdict() for member in locator.members],
        }
        return _Row(
            columns=columns,
            llm_tokens=llm_tokens,
            label_tokens=rendered.label_tokens,
            encoder_tokens=sum(units),
            kind=_kind(modalities),
        )

    def _size(self, item: MediaFile) -> MediaSize:
        key = (item.path, item.offset)
        if key not in self._sizes:
            self._sizes[key] = media_size(item)
            if self._sizes[key].counted:
                self._counted[item.name.rstrip("'").rpartition(".")[2] or "file"] += 1
        return self._sizes[key]

    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{kind}: {count} without a number of frames in the header; packets were counted, "
            "nothing was decoded"
            for kind, count in sorted(self._counted.items())
        )
