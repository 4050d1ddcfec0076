"""Qwen2.5-VL: token formulas, and its shape from a model folder or from released values.

The formulas agree with the processors of transformers 5.24 (`tests/test_catalog.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dynapar.errors import ModelError, SampleError
from dynapar.modelfiles import Section, read_section
from dynapar.shapes import (
    IMAGE_KIND,
    VIDEO_KIND,
    Family,
    FrameRules,
    MediaTokens,
    ModelShape,
    PixelRules,
    SpecialTokens,
    TextShape,
    VisionShape,
)

MAX_ASPECT_RATIO = 200
"""Long side over short side; the processor refuses more."""


def fit_pixels(
    height: int, width: int, *, multiple: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The multiples of `multiple` nearest to a size, inside an area.

    Raises:
        SampleError: A side is below 1, or one is over 200 times the other.

    >>> fit_pixels(512, 512, multiple=28, min_pixels=3136, max_pixels=12845056)
    (504, 504)
    """
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise SampleError(
            f"a picture is {height} x {width} pixels; expected sides of 1 or more, the longer at "
            f"most {MAX_ASPECT_RATIO} times the shorter. Remove the sample or crop it."
        )
    high, wide = (round(side / multiple) * multiple for side in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high, wide = (
            max(multiple, math.floor(side / shrink / multiple) * multiple)
            for side in (height, width)
        )
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(side * grow / multiple) * multiple for side in (height, width))
    return high, wide


def sample_frames(frames: int, fps: float, *, rules: FrameRules, group: int) -> tuple[int, ...]:
    """Which frames of a video are used: evenly spread, a multiple of `group` where it has them.

    Args:
        frames: Frames in the file, 1 or more.
        fps: The file's frames per second.
        rules: How many to take.
        group: Frames in a temporal group.

    >>> rules = FrameRules(fps=2, count=None, min_frames=4, max_frames=768, budget_tokens=None)
    >>> sample_frames(132, 25.0, rules=rules, group=2)
    (0, 13, 26, 39, 52, 66, 79, 92, 105, 118)
    """
    if rules.count is not None:
        wanted = min(round(rules.count / group) * group, frames)
    else:
        most = math.floor(min(rules.max_frames, frames) / group) * group
        asked = min(max(frames / fps * rules.fps, rules.min_frames), most, frames)
        wanted = math.floor(asked / group) * group
    if wanted < 1:
        return tuple(range(frames))
    # As torch.arange(0, frames, frames / wanted).int(): counted in float64, rounded to float32.
    step = frames / wanted
    places = (np.arange(math.ceil(frames / step)) * step).astype(np.float32)
    return tuple(places.astype(np.int64).tolist())


def _image(shape: ModelShape, height: int, width: int) -> MediaTokens:
    vision, rules = shape.vision, shape.image_rules
    size = fit_pixels(
        height,
        width,
        multiple=vision.patch * vision.merge,
        min_pixels=rules.min_pixels,
        max_pixels=rules.max_pixels,
    )
    rows, columns = size[0] // vision.patch, size[1] // vision.patch
    llm_tokens = rows * columns // vision.merge**2
    return MediaTokens(IMAGE_KIND, size, (1, rows, columns), llm_tokens, (), 0.0)


def _video(shape: ModelShape, frames: int, fps: float, height: int, width: int) -> MediaTokens:
    if frames < 1 or not 0 < fps < math.inf:
        raise SampleError(
            f"a video has {frames} frames at {fps} frames per second; expected 1 or more of each. "
            "Remove the sample or repair the file."
        )
    vision, rules = shape.vision, shape.video_rules
    multiple = vision.patch * vision.merge
    used = sample_frames(frames, fps, rules=shape.frame_rules, group=vision.frames)
    most = rules.max_pixels
    if (budget := shape.frame_rules.budget_tokens) is not None:
        share = int(budget * multiple**2 * 0.9) * vision.frames // len(used)
        most = max(min(most, share), int(rules.min_pixels * 1.05))
    size = fit_pixels(
        height, width, multiple=multiple, min_pixels=rules.min_pixels, max_pixels=most
    )
    rows, columns = size[0] // vision.patch, size[1] // vision.patch
    groups = math.ceil(len(used) / vision.frames)
    llm_tokens = groups * rows * columns // vision.merge**2
    seconds = vision.frames / (len(used) / frames * fps)
    return MediaTokens(VIDEO_KIND, size, (groups, rows, columns), llm_tokens, used, seconds)


QWEN25VL = Family("qwen2_5_vl", _image, _video, "You are a helpful assistant.")

TEXT_DEFAULTS = MappingProxyType(
    {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
        "vocab_size": 152064,
    }
)
VISION_DEFAULTS = MappingProxyType(
    {
        "depth": 32,
        "hidden_size": 3584,
        "num_heads": 16,
        "intermediate_size": 3420,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 4,
    }
)
ROOT_DEFAULTS = MappingProxyType(
    {
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }
)
"""The defaults of transformers' configuration classes (not the released values)."""

PIXEL_DEFAULTS = MappingProxyType(
    {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "rescale_factor": 1 / 255,
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "max_video_tokens": 128000,
    }
)


def _pixel_rules(section: Section, least: int, most: int) -> PixelRules:
    size = section.section("size", {"shortest_edge": least, "longest_edge": most})
    low = section.integer("min_pixels", least=1) if "min_pixels" in section else None
    high = section.integer("max_pixels", least=1) if "max_pixels" in section else None
    mean, std = section.numbers("image_mean"), section.numbers("image_std")
    if len(mean) != 3 or len(std) != 3:
        raise ModelError(f"{section.place}: image_mean {mean} and image_std {std}; expected 3 each")
    return PixelRules(
        min_pixels=size.integer("shortest_edge", least=1) if low is None else low,
        max_pixels=size.integer("longest_edge", least=1) if high is None else high,
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
        scale=section.number("rescale_factor"),
    )


def _processor_sections(folder: Path) -> tuple[Section, Section]:
    """The image and the video processor's settings, looked for where transformers looks."""
    nested = folder / "processor_config.json"
    if nested.exists():
        whole = read_section(nested, defaults={})
        image = whole.section("image_processor", PIXEL_DEFAULTS)
        video = whole.section("video_processor", PIXEL_DEFAULTS)
    else:
        image = video = Section(place="", values={}, defaults=PIXEL_DEFAULTS)
    if not image.values:
        image = read_section(folder / "preprocessor_config.json", defaults=PIXEL_DEFAULTS)
    if not video.values:
        own = folder / "video_preprocessor_config.json"
        # Without a file of its own the video processor reads the images' settings.
        video = read_section(own, defaults=PIXEL_DEFAULTS) if own.exists() else image
    return image, video


def read_folder(folder: Path) -> ModelShape:
    """The shape of the model in a folder with config.json and preprocessor_config.json.

    Raises:
        ModelError: A file is missing, or a value is missing or out of range.
    """
    root = read_section(folder / "config.json", defaults=ROOT_DEFAULTS)
    image, video = _processor_sections(folder)
    return _shape(root, image, video, name=folder.name, folder=folder)


def _shape(
    root: Section, image: Section, video: Section, *, name: str, folder: Path | None
) -> ModelShape:
    # Files released before transformers 5 keep the text model's numbers at the root.
    nested = "text_config" in root
    text = root.section("text_config", TEXT_DEFAULTS) if nested else root
    text = Section(place=text.place, values=text.values, defaults=TEXT_DEFAULTS)
    vision = root.section("vision_config", VISION_DEFAULTS)
    width, heads = (
        text.integer("hidden_size", least=1),
        text.integer("num_attention_heads", least=1),
    )
    patch, merge = (
        vision.integer("patch_size", least=1),
        vision.integer("spatial_merge_size", least=1),
    )
    capped = bool(video.values.get("cap_pixels_per_frame"))
    return ModelShape(
        name=name,
        family=QWEN25VL,
        folder=folder,
        text=TextShape(
            layers=text.integer("num_hidden_layers", least=1),
            width=width,
            heads=heads,
            kv_heads=text.integer("num_key_value_heads", least=1),
            head_width=text.integer("head_dim", least=1) if "head_dim" in text else width // heads,
            mlp_width=text.integer("intermediate_size", least=1),
            vocabulary=text.integer("vocab_size", least=1),
            tied=bool(
                root.values.get("tie_word_embeddings") or text.values.get("tie_word_embeddings")
            ),
        ),
        vision=VisionShape(
            layers=vision.integer("depth", least=1),
            width=vision.integer("hidden_size", least=1),
            heads=vision.integer("num_heads", least=1),
            mlp_width=vision.integer("intermediate_size", least=1),
            patch=patch,
            frames=vision.integer("temporal_patch_size", least=1),
            merge=merge,
            window=vision.integer("window_size") // patch,
            full_layers=tuple(int(layer) for layer in vision.numbers("fullatt_block_indexes")),
            tokens_per_second=vision.integer("tokens_per_second", least=1),
        ),
        image_rules=_pixel_rules(image, 56 * 56, 28 * 28 * 1280),
        video_rules=_pixel_rules(video, 128 * 28 * 28, 28 * 28 * 768),
        frame_rules=FrameRules(
            fps=video.number("fps"),
            count=video.integer("num_frames", least=1) if "num_frames" in video else None,
            min_frames=video.integer("min_frames", least=1),
            max_frames=video.integer("max_frames", least=1),
            budget_tokens=video.integer("max_video_tokens", least=1) if capped else None,
        ),
        tokens=SpecialTokens(
            image=root.integer("image_token_id"),
            video=root.integer("video_token_id"),
            vision_start=root.integer("vision_start_token_id"),
            vision_end=root.integer("vision_end_token_id"),
        ),
    )


def _released(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vision_mlp: int,
    vocabulary: int = 152064,
) -> Mapping[str, object]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "tie_word_embeddings": width == 2048,
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": vision_mlp,
            "tokens_per_second": 2,
        },
    }


RELEASED: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "qwen2.5-vl-3b": _released(
            layers=36,
            width=2048,
            heads=16,
            kv_heads=2,
            mlp=11008,
            vision_mlp=3420,
            vocabulary=151936,
        ),
        "qwen2.5-vl-7b": _released(
            layers=28, width=3584, heads=28, kv_heads=4, mlp=18944, vision_mlp=3420
        ),
        "qwen2.5-vl-32b": _released(
            layers=64, width=5120, heads=40, kv_heads=8, mlp=27648, vision_mlp=3456
        ),
        "qwen2.5-vl-72b": _released(
            layers=80, width=8192, heads=64, kv_heads=8, mlp=29568, vision_mlp=3456
        ),
    }
)
"""config.json of the released checkpoints, what differs from the defaults."""

RELEASED_PIXELS = MappingProxyType({"min_pixels": 3136, "max_pixels": 12845056})
"""Their preprocessor_config.json, which the video processor reads as well."""


def released(name: str) -> ModelShape:
    """The shape of a released checkpoint; it has no folder and no tokenizer."""
    root = Section(place=name, values=RELEASED[name], defaults=ROOT_DEFAULTS)
    pixels = Section(place=name, values=RELEASED_PIXELS, defaults=PIXEL_DEFAULTS)
    return _shape(root, pixels, pixels, name=name, folder=None)
