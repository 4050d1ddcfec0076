"""How many tokens stand in what a processor of transformers gives, by family.

Where the processor's own class counts (LLaVA-OneVision, Llama 4), that is what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple, Protocol, cast

import numpy as np

from dynapar.shapes import ModelShape


class Lengths(NamedTuple):
    """What either side says of a media item, or of a sample's text, which has no units."""

    llm_tokens: int
    units: int
    unit_tokens: int


Made = Mapping[str, object]
"""What a processor gives."""


def _numbers(made: Made, key: str) -> list[int]:
    return [int(number) for number in np.asarray(made[key]).reshape(-1)]


class _Shaped(Protocol):
    """An array or a tensor, which need not be one that numpy can hold (bfloat16)."""

    @property
    def shape(self) -> Sequence[int]: ...


def _pixel_shape(made: Made, key: str = "pixel_values") -> tuple[int, ...]:
    value = made[key]
    return tuple(cast(_Shaped, value[0] if isinstance(value, list) else value).shape)


def _by_grid(kind: str) -> Callable[[ModelShape, Made], Lengths]:
    def count(shape: ModelShape, made: Made) -> Lengths:
        groups, rows, columns = _numbers(made, f"{kind}_grid_thw")
        llm = groups * rows * columns // shape.vision.merge**2
        return Lengths(llm, groups, rows * columns)

    return count


def _tiles(shape: ModelShape, tiles: int, edge: int) -> Lengths:
    side = edge // shape.vision.patch
    llm = tiles * shape.tile_rules.tokens
    return Lengths(llm, tiles, side * side + shape.vision.class_tokens)


def _internvl(shape: ModelShape, made: Made) -> Lengths:
    return _tiles(shape, _numbers(made, "num_patches")[0], _pixel_shape(made)[-1])


def _gemma3(shape: ModelShape, made: Made) -> Lengths:
    return _tiles(shape, 1 + _numbers(made, "num_crops")[0], _pixel_shape(made)[-1])


def _idefics3(shape: ModelShape, made: Made) -> Lengths:
    return _tiles(shape, _pixel_shape(made)[-4], _pixel_shape(made)[-1])


def _llama4(shape: ModelShape, made: Made) -> Lengths:
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    ratio = _numbers(made, "aspect_ratios")
    edge = _pixel_shape(made)[-1]
    one = (edge // shape.vision.patch) ** 2 // shape.vision.merge**2
    text = Llama4Processor._prompt_split_image(cast(Llama4Processor, None), ratio, one)
    llm = text.count("<|patch|>")
    side = edge // shape.vision.patch
    return Lengths(llm, llm // one, side * side + shape.vision.class_tokens)


def _mllama(shape: ModelShape, made: Made) -> Lengths:
    """Its encoder takes all tile slots as one, each filled up to a multiple of 8."""
    slots, edge = _pixel_shape(made)[-4], _pixel_shape(made)[-1]
    slot = (edge // shape.vision.patch) ** 2 + shape.vision.class_tokens
    return Lengths(1, 1, slots * (-(-slot // 8) * 8))


def _by_size(shape: ModelShape, made: Made) -> Lengths:
    high, wide = _numbers(made, "image_sizes")
    patch, merge = shape.vision.patch, shape.vision.merge
    patches = high // patch * (wide // patch)
    return Lengths(patches // merge**2, 1, patches)


def _llava(shape: ModelShape, made: Made) -> Lengths:
    from transformers.models.llava_onevision.processing_llava_onevision import (
        LlavaOnevisionProcessor as Processor,
    )

    tiles, _, edge, _ = _pixel_shape(made)[-4:]
    high, wide = _numbers(made, "image_sizes")
    rules = shape.tile_rules
    stand_in = SimpleNamespace(
        image_processor=SimpleNamespace(
            image_grid_pinpoints=[[r * rules.edge, c * rules.edge] for r, c in rules.grids]
        ),
        num_image_tokens=rules.tokens,
        vision_aspect_ratio=f"anyres_max_{rules.most_features}",
    )
    processor = cast(Processor, stand_in)
    stand_in._get_unpadded_features = lambda *sizes: Processor._get_unpadded_features(
        processor, *sizes
    )
    llm = Processor._get_number_of_features(processor, high, wide, edge, edge)
    return Lengths(int(llm), tiles, (edge // shape.vision.patch) ** 2)


def llava_together(shape: ModelShape, made: Made) -> Lengths:
    """Of each image of several in one sample, which LLaVA-OneVision does not tile."""
    tiles, _, edge, _ = _pixel_shape(made)[-4:]
    patches = (edge // shape.vision.patch) ** 2
    return Lengths(patches + 1, tiles, patches)


def _by_frame(more: int) -> Callable[[ModelShape, Made], Lengths]:
    def count(shape: ModelShape, made: Made) -> Lengths:
        key = "pixel_values_videos" if "pixel_values_videos" in made else "pixel_values"
        frames, _, edge, _ = _pixel_shape(made, key)[-4:]
        side = edge // shape.vision.patch
        llm = frames * shape.tile_rules.frame_tokens + more
        return Lengths(llm, frames, side * side + shape.vision.class_tokens)

    return count


_QWEN = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen2_5_omni", "qwen2_5_omni_thinker"),
)
IMAGE_COUNTERS: Mapping[str, Callable[[ModelShape, Made], Lengths]] = {
    **dict.fromkeys(_QWEN, _by_grid("image")),
    "internvl": _internvl,
    "llava_onevision": _llava,
    "gemma3": _gemma3,
    "mllama": _mllama,
    "llama4": _llama4,
    "llava": _by_size,
    "mistral3": _by_size,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
}
"""How to count what a family's image processor gives for one image: (shape, its output)."""
VIDEO_COUNTERS: Mapping[str, Callable[[ModelShape, Made], Lengths]] = {
    **dict.fromkeys(_QWEN, _by_grid("video")),
    "internvl": _by_frame(0),
    "llava_onevision": _by_frame(1),
    "smolvlm": _by_frame(0),
}
"""How to count what a family's video processor gives for one video."""
