"""Load one sample as tensors, with just the media that this rank encodes.

What comes out always has the planned numbers. A sample that cannot be loaded, or whose tokens,
targets or picture sizes differ from its index row, becomes a *stub*: planned lengths, no targets,
patches of zeros, so that the step runs as planned and its gradient lacks just this sample. Its id
and the cause go to the quarantine file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynapar.data.chat import ChatTokenizer
from dynapar.data.header import Pixels
from dynapar.data.index import Index
from dynapar.data.indexfile import Medium, media_tokens
from dynapar.data.media import decode_frames, decode_image
from dynapar.data.patches import unit_patches
from dynapar.data.positions import mrope_positions, text_positions
from dynapar.data.records import MediaFile, Record
from dynapar.data.rendered import Rendered
from dynapar.data.samples import IGNORE, LoadedSample, MediaShape
from dynapar.data.sources import Source
from dynapar.errors import ModelError, SampleError
from dynapar.shapes import IMAGE_KIND, MediaTokens, ModelShape

IntArray = npt.NDArray[np.int64]

LOADABLE = ("qwen2_5_vl", "qwen2_vl")
"""Families with media whose patches are `dynapar.data.patches`', and positions
`dynapar.data.positions`'."""

_logger = logging.getLogger(__name__)


class Materializer:
    """Loads samples of an indexed source; thread-safe."""

    def __init__(
        self,
        shape: ModelShape,
        source: Source,
        index: Index,
        *,
        quarantine: Path | None = None,
    ) -> None:
        """Check that the three belong together.

        Args:
            shape: The model, with its folder.
            source: Where the samples are.
            index: Of this source, made with this model.
            quarantine: A file that gets one JSON line for each stub; None for none.

        Raises:
            SourceError: The index was made from another source or with other settings.
            ModelError: The model's tokenizer is missing or unfit, or patches and positions of its
                family are not known.
        """
        if shape.has_media and shape.family.name not in LOADABLE:
            raise ModelError(
                f"model {shape.name!r} is of family {shape.family.name!r}, whose media cannot be "
                f"loaded for training; expected one of {', '.join(LOADABLE)} or a model without "
                "media. It can be indexed, planned, simulated and inspected."
            )
        self._tokenizer = ChatTokenizer(shape)
        index.check(source=source, shape=shape, tokenizer=self._tokenizer.fingerprint)
        self._shape, self._source, self._index = shape, source, index
        self._quarantine = quarantine
        self._lock = Lock()

    def load(self, row: int, *, units: frozenset[int]) -> LoadedSample:
        """Load a sample.

        Only media with units in `units` are opened, and of a video only the frames of those units
        are kept. Positions and targets are those of the whole sample.

        Args:
            row: Of the index.
            units: Encoder units of the sample that this rank encodes.

        Returns:
            The sample, or a stub of it.
        """
        try:
            return self._load(row, units)
        except SampleError as error:
            return self.refuse(row, units=units, reason=str(error))

    def refuse(self, row: int, *, units: frozenset[int], reason: str) -> LoadedSample:
        """As `stub`, of a sample that goes to the quarantine file."""
        self._report(row, reason)
        return self.stub(row, units=units, reason=reason)

    def stub(self, row: int, *, units: frozenset[int], reason: str) -> LoadedSample:
        """A sample of the planned lengths that adds nothing to loss and gradient.

        Args:
            row: Of the index.
            units: Encoder units that this rank encodes; patches of zeros.
            reason: Why, for `LoadedSample.stub`.
        """
        table, tokens = self._index.table, self._shape.tokens
        media = self._media_tokens(row)
        ids: list[int] = []
        kinds: list[int] = []
        for item in media:
            pad = tokens.image if item.kind == IMAGE_KIND else tokens.video
            ids += [tokens.vision_start, *[pad] * item.llm_tokens, tokens.vision_end]
            kinds += [0, *[item.kind] * item.llm_tokens, 0]
        rest = int(table.llm_tokens[row]) - len(ids)
        rendered = Rendered(
            np.array(ids + [0] * rest, np.int64),
            np.array(kinds + [0] * rest, np.int64),
            np.zeros(len(ids) + rest, np.bool_),
        )
        empty = {
            unit: torch.zeros(int(count), self._shape.vision.patch_width)
            for unit, count in enumerate(table.units(row))
            if unit in units
        }
        return self._sample(row, rendered, media, empty, reason)

    def _load(self, row: int, units: frozenset[int]) -> LoadedSample:
        record = self._source.record(self._index.locator(row))
        sizes, media = self._index.media(row), self._media_tokens(row)
        table = self._index.table
        _expect(record, "id", record.id, table.ids[row])
        _expect(record, "media kinds", [m.kind for m in record.media], [m.kind for m in sizes])
        rendered = self._tokenizer.render(record, media)
        _expect(record, "tokens", len(rendered.ids), int(table.llm_tokens[row]))
        _expect(record, "targets", rendered.label_tokens, int(table.label_tokens[row]))
        loaded: dict[int, Tensor] = {}
        first = 0
        for file, size, item in zip(record.media, sizes, media, strict=True):
            wanted = [unit for unit in range(item.units) if first + unit in units]
            if wanted:
                try:
                    for unit, patches in self._patches(file, size, item, wanted):
                        loaded[first + unit] = patches
                except SampleError as error:
                    raise SampleError(f"{record.place}: {error}") from None
            first += item.units
        return self._sample(row, rendered, media, loaded, "")

    def _sample(
        self,
        row: int,
        rendered: Rendered,
        media: Sequence[MediaTokens],
        units: dict[int, Tensor],
        stub: str,
    ) -> LoadedSample:
        targets = np.full(len(rendered.ids), IGNORE, np.int64)
        targets[:-1] = np.where(rendered.learnt[1:], rendered.ids[1:], IGNORE)
        positions = (
            mrope_positions(rendered.kinds, media, self._shape.vision)
            if self._shape.has_media
            else text_positions(len(rendered.ids))
        )
        return LoadedSample(
            id=self._index.table.ids[row],
            input_ids=torch.from_numpy(rendered.ids),
            targets=torch.from_numpy(targets),
            kinds=torch.from_numpy(rendered.kinds),
            positions=torch.from_numpy(positions),
            media=tuple(
                MediaShape(m.kind, m.grid, m.llm_tokens, m.units, m.seconds_per_group)
                for m in media
            ),
            units=units,
            stub=stub,
        )

    def _patches(
        self, file: MediaFile, size: Medium, item: MediaTokens, units: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Decode a media item and cut the patches of some of its units."""
        group = self._shape.vision.frames
        if item.kind == IMAGE_KIND:
            rules, frames = self._shape.image_rules, {0: [decode_image(file)]}
        else:
            rules = self._shape.video_rules
            used = {unit: item.frames[unit * group : (unit + 1) * group] for unit in units}
            pixels = decode_frames(file, [frame for unit in units for frame in used[unit]])
            frames = {unit: [pixels[frame] for frame in used[unit]] for unit in units}
        for unit in units:
            _expect_size(file, frames[unit], size)
            yield (
                unit,
                torch.from_numpy(
                    unit_patches(
                        frames[unit], size=item.size, rules=rules, vision=self._shape.vision
                    )
                ),
            )

    def _media_tokens(self, row: int) -> list[MediaTokens]:
        return media_tokens(self._index.media(row), self._shape)

    def _report(self, row: int, reason: str) -> None:
        id = self._index.table.ids[row]
        _logger.warning("sample %r becomes a stub: %s", id, reason)
        if self._quarantine is not None:
            line = json.dumps({"id": id, "row": row, "reason": reason}) + "\n"
            self._quarantine.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, self._quarantine.open("a", encoding="utf-8") as file:
                file.write(line)


def _expect(record: Record, what: str, found: object, planned: object) -> None:
    if found != planned:
        raise SampleError(
            f"{record.place}: {what} {found!r}, but {planned!r} in its index row. The source has "
            "changed: index it again."
        )


def _expect_size(file: MediaFile, frames: Sequence[Pixels], size: Medium) -> None:
    for frame in frames:
        if frame.shape[:2] != (size.height, size.width):
            raise SampleError(
                f"{file.name} in {file.path} is {frame.shape[0]} x {frame.shape[1]} pixels, but "
                f"{size.height} x {size.width} in its index row. Index the source again."
            )
