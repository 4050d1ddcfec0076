"""What the planner knows of samples: one row a sample, in columns.

A sample's media are encoded in *encoder units* (an image; a temporal group of a video), each of
which may be encoded by another rank. Units are stored flat: those of sample i are
`unit_tokens[unit_offsets[i]:unit_offsets[i + 1]]`, in the order of the sample's placeholders.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynapar.costs import Costs, target_reach
from dynapar.errors import SampleError, SourceError
from dynapar.prefixes import (
    FloatArray,
    MediaSize,
    Prefix,
    Prefixes,
    Trees,
    collect_prefixes,
    read_prefix,
)
from dynapar.shapes import MediaTokens, ModelShape

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

IMAGE, VIDEO, AUDIO = 1, 2, 4
"""Bits of `SampleTable.modalities`; 0 is text alone."""
KINDS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Metadata of n samples; every array is read-only for its users."""

    ids: tuple[str, ...]
    """n unique ids."""
    llm_tokens: IntArray
    """(n,) LLM tokens, 1 or more: text_tokens + LLM tokens of all media."""
    text_tokens: IntArray
    """(n,) LLM tokens that are not placeholders of media."""
    label_tokens: IntArray
    """(n,) targets: positions t >= 1 whose label is not ignored."""
    modalities: ByteArray
    """(n,) bits of the media kinds present."""
    unit_offsets: IntArray
    """(n + 1,) ascending, starts at 0."""
    unit_tokens: IntArray
    """(units,) encoder tokens of each encoder unit, 1 or more."""
    prefixes: Prefixes | None = None
    """What the samples of a source share; None where nothing is said of it."""
    trees: Trees | None = None
    """Which samples of a step are trees; None where none is."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def encoder_tokens(self) -> IntArray:
        """(n,) encoder tokens of each sample's media."""
        sums = np.concatenate([[0], np.cumsum(self.unit_tokens)]).astype(np.int64)
        return sums[self.unit_offsets[1:]] - sums[self.unit_offsets[:-1]]

    @property
    def reach(self) -> FloatArray:
        """(n,) how much the tokens of each sample see, as `dynapar.packing.ticks` prices it."""
        reach = self.llm_tokens.astype(np.float64)
        if self.trees is not None:
            rows = self.trees.rows
            reach[rows] = self.trees.squares() / reach[rows]
        return reach

    def reach_under(self, costs: Costs) -> FloatArray:
        """(n,) reach at which attention's price is that of pairs and targets together.

        Args:
            costs: What work costs; `reach` itself where targets cost nothing.
        """
        target = target_reach(costs)
        return self.reach + target * self.label_tokens / self.llm_tokens if target else self.reach

    def units(self, sample: int) -> IntArray:
        """(u,) encoder tokens of the units of one sample."""
        return self.unit_tokens[self.unit_offsets[sample] : self.unit_offsets[sample + 1]]

    def take(self, rows: IntArray) -> SampleTable:
        """The samples at `rows`, in that order."""
        counts = np.diff(self.unit_offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        flat = np.repeat(self.unit_offsets[:-1][rows] - offsets[:-1], counts)
        flat += np.arange(offsets[-1])
        return SampleTable(
            ids=tuple(self.ids[row] for row in rows),
            llm_tokens=self.llm_tokens[rows],
            text_tokens=self.text_tokens[rows],
            label_tokens=self.label_tokens[rows],
            modalities=self.modalities[rows],
            unit_offsets=offsets,
            unit_tokens=self.unit_tokens[flat],
            prefixes=None if self.prefixes is None else self.prefixes.take(rows),
            trees=None if self.trees is None else self.trees.take(rows),
        )

    def draw(self, rows: IntArray) -> SampleTable:
        """The samples at `rows` as one step's table.

        A sample that stands in `rows` again bears "#2", "#3", ... after its id from then on.
        """
        seen: Counter[str] = Counter()
        ids = []
        for row in rows:
            name = self.ids[row]
            seen[name] += 1
            ids.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
        return replace(self.take(rows), ids=tuple(ids))


def read_metadata_jsonl(path: str | Path, shape: ModelShape | None = None) -> SampleTable:
    """Read a metadata file: one JSON object a sample and line.

    A line has `id`, `text_tokens`, and optionally `label_tokens` and `media`. A media item gives
    its tokens outright (`llm_tokens`, `encoder_tokens`, optionally `encoder_units`, the tokens of
    each unit), or its size (`height`, `width`; a video also `frames` and `fps`, the file's; audio
    its `seconds`): then
    `shape` says what it becomes, and its boundary tokens are added to `text_tokens`.

    `prefix`, such as `{"id": "img7", "tokens": 1182}`, says that the sample's first 1,182 LLM
    tokens, media among them, are those of all samples of this prefix. `media` in it counts the
    first media items that lie in the prefix; without it, those that fit into its tokens do.

    Args:
        path: The file.
        shape: The model; needed only where media give sizes.

    Raises:
        SourceError: The file is missing, has no samples, or is a file of conversations.
        SampleError: A line is malformed, an id stands twice, or samples of one prefix differ in
            it; line and key, or sample and value, are named.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; give a metadata file") from None
    rows = [
        read_metadata_line(line, f"{path}, line {number}", shape)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise SourceError(f"{path} has no samples; expected a JSON object a line")
    counts = Counter(row.id for row in rows)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise SampleError(
            f"{path}: id {repeated[0]!r} stands {counts[repeated[0]]} times; expected ids that "
            f"differ: rename one"
        )
    offsets = np.cumsum([0, *(len(row.units) for row in rows)])
    return SampleTable(
        ids=tuple(row.id for row in rows),
        llm_tokens=np.array([row.llm for row in rows], np.int64),
        text_tokens=np.array([row.text for row in rows], np.int64),
        label_tokens=np.array([row.label for row in rows], np.int64),
        modalities=np.array([row.modalities for row in rows], np.uint8),
        unit_offsets=offsets.astype(np.int64),
        unit_tokens=np.array([unit for row in rows for unit in row.units], np.int64),
        prefixes=collect_prefixes([(row.id, row.units, row.prefix) for row in rows]),
    )


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """A line of a metadata file."""

    id: str
    llm: int
    text: int
    label: int
    modalities: int
    units: Sequence[int]
    prefix: Prefix | None = None


def read_metadata_line(line: str, where: str, shape: ModelShape | None) -> MetadataRow:
    """Read one line of a metadata file.

    Args:
        line: A JSON object.
        where: What to call it in messages.
        shape: The model; needed only where media give sizes.

    Raises:
        SourceError: It is a conversation.
        SampleError: It is malformed; the key is named.
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        raise SampleError(f"{where} is not JSON ({error}); expected an object") from None
    if not isinstance(values, dict):
        raise SampleError(f"{where} is not an object; expected one with id and text_tokens")
    if "messages" in values or "conversations" in values:
        raise SourceError(
            f"{where} is a conversation, not metadata; index the file first: dynapar index"
        )
    known = {"id", "text_tokens", "label_tokens", "media", "prefix"}
    if extra := sorted(set(values) - known):
        raise SampleError(f"{where} has {extra[0]!r}; expected some of {sorted(known)}")
    name = values.get("id")
    if not isinstance(name, str) or not name:
        raise SampleError(f"{where} has id {name!r}; expected a text")
    alone = _number(values, "text_tokens", where, least=0)
    media = values.get("media", [])
    if not isinstance(media, list):
        raise SampleError(f"{where} has media {media!r}; expected a list")
    text, llm, units, bits = alone, 0, [], 0
    sizes = []
    images = sum(1 for item in media if isinstance(item, dict) and item.get("kind") == "image")
    for place, item in enumerate(media):
        tokens, boundary, own, bit = _read_media(item, f"{where}, media[{place}]", shape, images)
        llm += tokens
        text += boundary
        units += own
        bits |= bit
        sizes.append(MediaSize(tokens, boundary, len(own)))
    label = max(0, alone - 1)
    if "label_tokens" in values:
        label = _number(values, "label_tokens", where, least=0)
    total = text + llm
    if total < 1 or label > total - 1:
        raise SampleError(
            f"{where}: sample {name!r} has {total} tokens and {label} targets; expected 1 or more "
            f"tokens, and fewer targets than tokens"
        )
    prefix = None
    if "prefix" in values:
        prefix = read_prefix(values["prefix"], f"{where}: sample {name!r}", total, text, sizes)
    return MetadataRow(name, total, text, label, bits, units, prefix)


def _number(values: Mapping[str, object], key: str, where: str, *, least: int) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SampleError(f"{where} has {key} {value!r}; expected a whole number, {least} or more")
    return value


def _read_media(
    item: object, where: str, shape: ModelShape | None, images: int
) -> tuple[int, int, list[int], int]:
    """LLM tokens, boundary tokens, encoder tokens of each unit, and the bit of the kind."""
    kind = item.get("kind") if isinstance(item, dict) else None
    if not isinstance(item, dict) or kind not in KINDS:
        raise SampleError(f"{where} has kind {kind!r}; expected one of {', '.join(KINDS)}")
    if "llm_tokens" in item:
        llm = _number(item, "llm_tokens", where, least=0)
        encoder = _number(item, "encoder_tokens", where, least=0)
        units = item.get("encoder_units", [encoder] if encoder else [])
        sizes = units if isinstance(units, list) else []
        if any(not isinstance(u, int) or u < 1 for u in sizes) or sum(sizes) != encoder:
            raise SampleError(
                f"{where} has encoder_units {units!r}; expected whole numbers above 0 that add up "
                f"to encoder_tokens, {encoder}"
            )
        return llm, 0, list(sizes), KINDS[kind]
    if shape is None:
        raise SampleError(
            f"{where} gives a size, not llm_tokens and encoder_tokens; name the model that turns "
            f"sizes into tokens (--model)"
        )
    try:
        tokens = media_by_size(kind, item, where, shape, images)
    except SampleError as error:
        text = str(error)
        raise (error if text.startswith(where) else SampleError(f"{where}: {text}")) from None
    units = [tokens.unit_tokens] * tokens.units
    return tokens.llm_tokens, tokens.boundary_tokens, units, KINDS[kind]


def media_by_size(
    kind: str, item: Mapping[str, object], where: str, shape: ModelShape, images: int
) -> MediaTokens:
    """What a media item of a metadata line becomes, from its size.

    Args:
        kind: One of `KINDS`.
        item: The item.
        where: What to call it in messages.
        shape: The model.
        images: Images in its sample.

    Raises:
        SampleError: A size is missing or not possible, or the model takes no such media.
    """
    if kind == "audio":
        return shape.audio(_positive(item, "seconds", where))
    height = _number(item, "height", where, least=1)
    width = _number(item, "width", where, least=1)
    if kind == "image":
        return shape.image(height, width, images=images)
    frames = _number(item, "frames", where, least=1)
    return shape.video(frames, _positive(item, "fps", where), height, width)


def _positive(item: Mapping[str, object], key: str, where: str) -> float:
    value = item.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise SampleError(f"{where} has {key} {value!r}; expected a number above 0")
    return float(value)
