"""The command `dynapar verify-lengths`: planned lengths against transformers' own processors.

Planned are the counts from headers, or those of an index; real is what the processor of the model
folder makes of the decoded pixels. Differences are listed, and what could not be compared is named.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dynapar.catalog import load_model_shape
from dynapar.console import Advance, Cell, progress, show_json, show_table
from dynapar.data.index import Index, read_index
from dynapar.data.indexfile import Medium
from dynapar.data.media import decode_frames, decode_image, media_size
from dynapar.data.records import MediaFile, Record
from dynapar.data.sources import Source, open_source
from dynapar.errors import CheckFailedError, ModelError, SampleError, SourceError
from dynapar.shapes import IMAGE_KIND, MediaTokens, ModelShape

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, BaseVideoProcessor


class Lengths(NamedTuple):
    """What both sides say of a media item."""

    llm_tokens: int
    units: int
    unit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A media item that became something else than planned."""

    id: str
    item: str
    planned: Lengths
    real: Lengths


Made = Mapping[str, object]
"""What a processor gives."""


def verify_lengths_command(
    source: str,
    *,
    model: str,
    samples: int = 200,
    seed: int = 0,
    index: Path | None = None,
    json: bool = False,
) -> None:
    """Compare planned with real lengths of some samples of a source.

    Args:
        source: A conversation file or webdataset shards.
        model: A model's folder.
        samples: How many are compared; all where there are fewer.
        seed: Of their choice.
        index: An index of the source, whose rows are compared; None: headers are read anew.
        json: Print JSON instead of a table.

    Raises:
        CheckFailedError: A length differs.
        DynaparError: Source, index or model cannot be used.
    """
    shape = load_model_shape(model)
    if shape.folder is None:
        raise ModelError(
            f"model {model!r} is a preset; expected a model folder, whose processor is run. Point "
            "--model at one."
        )
    opened = open_source(source)
    planned = read_index(index) if index is not None else None
    checker = Checker(shape, opened, planned)
    with progress(f"comparing {source}") as advance:
        differences = list(checker.differences(samples, seed, advance))
    row: dict[str, Cell] = {
        "samples": checker.samples,
        "media": sum(checker.compared.values()),
        "differences": len(differences),
        "not compared": sum(checker.left.values()),
    }
    if json:
        left = dict(sorted(checker.left.items()))
        show_json({**row, "left": left, "list": [asdict(item) for item in differences]})
    else:
        show_table(f"{source} by the processor of {shape.name}", [row])
        for reason, count in sorted(checker.left.items()):
            print(f"not compared: {count} items: {reason}")
        if differences:
            show_table("differences", [_row(item) for item in differences])
    if differences:
        raise CheckFailedError(
            f"{len(differences)} of {sum(checker.compared.values())} media items differ from what "
            "is planned; expected none. Index again, or use the processor's own settings."
        )
    if not checker.compared and checker.left:
        raise CheckFailedError("no media item could be compared; see why above")


def _row(item: Difference) -> dict[str, Cell]:
    return {
        "sample": item.id,
        "item": item.item,
        "planned LLM tokens": item.planned.llm_tokens,
        "real": item.real.llm_tokens,
        "planned units": f"{item.planned.units} x {item.planned.unit_tokens}",
        "real units": f"{item.real.units} x {item.real.unit_tokens}",
    }


class Checker:
    """Compares samples of one source."""

    def __init__(self, shape: ModelShape, source: Source, index: Index | None) -> None:
        """Load the processor of the shape's folder.

        Raises:
            ModelError: The family's processor output is not known, or it cannot be loaded.
            SourceError: The index has other samples than the source.
        """
        if shape.family.name not in COUNTERS:
            raise ModelError(
                f"family {shape.family.name!r} has no comparison; expected one of "
                f"{sorted(COUNTERS)}"
            )
        self._shape, self._source, self._index = shape, source, index
        self._locators = source.locate()
        if index is not None and len(index) != len(self._locators):
            raise SourceError(
                f"{index.path} has {len(index)} samples, the source {len(self._locators)}; "
                "expected an index of this source, without samples left out. Run dynapar index."
            )
        self._images = _image_processor(shape)
        self._videos: BaseVideoProcessor | str | None = None
        self.samples = 0
        self.compared: Counter[str] = Counter()
        """Items compared, by kind."""
        self.left: Counter[str] = Counter()
        """Items that were not, by the reason."""

    def differences(self, samples: int, seed: int, advance: Advance) -> Iterator[Difference]:
        """The media items that differ, among some samples."""
        rows = range(len(self._locators))
        chosen = sorted(random.Random(seed).sample(rows, min(samples, len(rows))))
        for done, row in enumerate(chosen, start=1):
            record = self._source.record(self._locators[row])
            self.samples += 1
            yield from self._sample(row, record)
            advance(done, len(chosen))

    def _sample(self, row: int, record: Record) -> Iterator[Difference]:
        sizes = None if self._index is None else self._index.media(row)
        for place, file in enumerate(record.media):
            size = _medium(file) if sizes is None else sizes[place]
            tokens = size.tokens(self._shape)
            planned = Lengths(tokens.llm_tokens, tokens.units, tokens.unit_tokens)
            try:
                real = self._real(file, tokens, size)
            except SampleError as error:
                self.left[str(error)] += 1
                continue
            self.compared["image" if file.kind == IMAGE_KIND else "video"] += 1
            if real != planned:
                yield Difference(id=record.id, item=file.name, planned=planned, real=real)

    def _real(self, file: MediaFile, tokens: MediaTokens, size: Medium) -> Lengths:
        count = COUNTERS[self._shape.family.name]
        if file.kind == IMAGE_KIND:
            from PIL import Image

            picture = Image.fromarray(decode_image(file))
            made = self._images(images=[picture], return_tensors="np")
            return count(self._shape, cast(Made, made), "image")
        if self._videos is None:
            self._videos = _video_processor(self._shape)
        if isinstance(self._videos, str):
            raise SampleError(self._videos)
        used = _sampled(self._videos, size)
        pixels = decode_frames(file, sorted(set(used)))
        frames = np.stack([pixels[frame] for frame in used])
        made = self._videos(videos=[frames], do_sample_frames=False, return_tensors="np")
        return count(self._shape, cast(Made, made), "video")


def _medium(file: MediaFile) -> Medium:
    size = media_size(file)
    return Medium(file.kind, size.height, size.width, size.frames, size.fps)


def _image_processor(shape: ModelShape) -> BaseImageProcessor:
    from transformers import AutoImageProcessor

    try:
        return cast(
            "BaseImageProcessor",
            AutoImageProcessor.from_pretrained(shape.folder, local_files_only=True),
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{shape.folder}: its image processor cannot be loaded: {error}") from None


def _video_processor(shape: ModelShape) -> BaseVideoProcessor | str:
    """The processor, or why there is none."""
    import importlib.util

    if importlib.util.find_spec("torchvision") is None:
        return "videos need torchvision, which is not installed: pip install torchvision"
    from transformers import AutoVideoProcessor

    try:
        return cast(
            "BaseVideoProcessor",
            AutoVideoProcessor.from_pretrained(shape.folder, local_files_only=True),
        )
    except (OSError, ValueError, ImportError) as error:
        return f"the video processor cannot be loaded: {error}"


def _sampled(processor: BaseVideoProcessor, size: Medium) -> list[int]:
    from transformers.video_utils import VideoMetadata

    meta = VideoMetadata(
        total_num_frames=size.frames, fps=size.fps, duration=size.frames / size.fps
    )
    asked = None if getattr(processor, "num_frames", None) else getattr(processor, "fps", None)
    return [int(frame) for frame in processor.sample_frames(meta, fps=asked)]


def _numbers(made: Made, key: str) -> list[int]:
    return [int(number) for number in np.asarray(made[key]).reshape(-1)]


def _by_grid(shape: ModelShape, made: Made, kind: str) -> Lengths:
    groups, rows, columns = _numbers(made, f"{kind}_grid_thw")
    llm = groups * rows * columns // shape.vision.merge**2
    return Lengths(llm, groups, rows * columns)


def _by_tiles(key: str, more: int) -> Callable[[ModelShape, Made, str], Lengths]:
    def count(shape: ModelShape, made: Made, kind: str) -> Lengths:
        tiles = more + (_numbers(made, key)[0] if kind == "image" else _frames(made))
        side = shape.tile_rules.edge // shape.vision.patch
        llm = tiles * shape.tile_rules.tokens
        return Lengths(llm, tiles, side * side + shape.vision.class_tokens)

    return count


def _frames(made: Made) -> int:
    return int(np.asarray(made["pixel_values_videos"]).shape[1])


def _by_size(shape: ModelShape, made: Made, kind: str) -> Lengths:
    high, wide = _numbers(made, "image_sizes")
    patch, merge = shape.vision.patch, shape.vision.merge
    patches = high // patch * (wide // patch)
    return Lengths(patches // merge**2, 1, patches)


COUNTERS: Mapping[str, Callable[[ModelShape, Made, str], Lengths]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni"), _by_grid
    ),
    "internvl": _by_tiles("num_patches", 0),
    "gemma3": _by_tiles("num_crops", 1),
    "llava": _by_size,
    "mistral3": _by_size,
}
"""How to count what a family's processor gives: (shape, its output, "image" or "video")."""
