"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen2.5-Omni: token formulas and readers.

The formulas agree with the processors of transformers 5.24 (`tests/families/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from dynapar.errors import SampleError
from dynapar.families.defaults import CLASS_DEFAULTS
from dynapar.families.processors import CLIP, HALVES, colour_rules, frame_rules, pixel_limits
from dynapar.families.resize import fit_clip, fit_pixels, sample_frames, spread_frames
from dynapar.families.text import nested_text
from dynapar.modelfiles import ModelFiles, Section
from dynapar.shapes import (
    AUDIO_KIND,
    IMAGE_KIND,
    VIDEO_KIND,
    AudioShape,
    Family,
    MediaTokens,
    ModelShape,
    Projection,
    SpecialTokens,
    TextShape,
    VisionShape,
)


def _image(shape: ModelShape, height: int, width: int, images: int) -> MediaTokens:
    del images
    rules = shape.image_rules
    multiple = shape.vision.patch * shape.vision.merge
    limits = {"min_pixels": rules.min_pixels, "max_pixels": rules.max_pixels}
    size = fit_pixels(height, width, multiple=multiple, **limits)
    return _grid(shape, IMAGE_KIND, size, (), 0.0)


def _video(shape: ModelShape, frames: int, fps: float, height: int, width: int) -> MediaTokens:
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
    seconds = vision.frames / (len(used) / frames * fps)
    return _grid(shape, VIDEO_KIND, size, used, seconds)


def _clip(shape: ModelShape, frames: int, fps: float, height: int, width: int) -> MediaTokens:
    """A video whose limits count the pixels of all frames (Qwen3-VL).

    Its temporal groups stand apart in the text, each after its time, all of them inside the start
    and end that the chat template writes around a video. Those tokens are counted as the Qwen
    tokenizer does: one a character, and " seconds" is one.
    """
    vision, rules = shape.vision, shape.video_rules
    multiple = vision.patch * vision.merge
    used = spread_frames(frames, fps, rules=shape.frame_rules)
    if len(used) < vision.frames:
        raise SampleError(
            f"a video has {frames} frames, of which {len(used)} are used; expected "
            f"{vision.frames} or more. Remove the sample or give it as an image."
        )
    most = rules.max_pixels
    if (budget := shape.frame_rules.budget_tokens) is not None:
        share = min(budget * multiple**2, rules.max_pixels // len(used))
        most = max(share, int(rules.min_pixels * 1.05)) * len(used)
    size = fit_clip(
        len(used), height, width, multiple=multiple, min_pixels=rules.min_pixels, max_pixels=most
    )
    item = _grid(shape, VIDEO_KIND, size, used, vision.frames / (len(used) / frames * fps))
    group = vision.frames
    ends = [(i, min(i + group, len(used)) - 1) for i in range(0, len(used), group)]
    times = [(used[first] / fps + used[last] / fps) / 2 for first, last in ends]
    text = 2 + sum(len(f"{time:.1f}") + 3 + 2 for time in times)
    return item._replace(boundary_tokens=text)


def _grid(
    shape: ModelShape, kind: int, size: tuple[int, int], used: tuple[int, ...], seconds: float
) -> MediaTokens:
    vision = shape.vision
    rows, columns = size[0] // vision.patch, size[1] // vision.patch
    groups = math.ceil(len(used) / vision.frames) if used else 1
    llm_tokens = groups * rows * columns // vision.merge**2
    grid = (groups, rows, columns)
    return MediaTokens(kind, size, grid, llm_tokens, used, seconds, boundary_tokens=2)


def _audio(shape: ModelShape, encoder: AudioShape, seconds: float) -> MediaTokens:
    samples = round(seconds * encoder.sample_rate)
    frames = min(-(-samples // encoder.hop), encoder.max_frames)
    positions = (frames - 1) // 2 + 1
    llm_tokens = (positions - 2) // 2 + 1
    if llm_tokens < 1:
        raise SampleError(
            f"an audio clip lasts {seconds} seconds, which is {frames} mel frames; model "
            f"{shape.name!r} expected 3 or more. Remove the sample."
        )
    grid = (1, 1, positions)
    size = (encoder.mels, frames)
    return MediaTokens(AUDIO_KIND, size, grid, llm_tokens, (), 0.0, boundary_tokens=2)


class _Kind(NamedTuple):
    """What differs from one family to the next."""

    family: Family
    text: str
    vision: str
    """Their `model_type`, where the files name none."""
    limits: tuple[int, int]
    video_limits: tuple[int, int]
    """Pixels, fewest and most, of the processor classes."""
    frames: Mapping[str, float]
    """Of the video processor's class."""
    colours: Mapping[str, object]


_OLD_FRAMES = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "max_video_tokens": 128000}
_OLD_LIMITS = (56 * 56, 28 * 28 * 1280), (128 * 28 * 28, 28 * 28 * 768)
_NEW_FRAMES = _OLD_FRAMES | {"max_video_tokens": 768}
_NEW_LIMITS = (56 * 56, 28 * 28 * 1280), (128 * 32 * 32, 32 * 32 * 768)
_SYSTEM = "You are a helpful assistant."

QWEN2VL = Family("qwen2_vl", _image, _video, _SYSTEM)
QWEN25VL = Family("qwen2_5_vl", _image, _video, _SYSTEM)
QWEN3VL = Family("qwen3_vl", _image, _clip, "")
QWEN3VL_MOE = Family("qwen3_vl_moe", _image, _clip, "")
OMNI = Family("qwen2_5_omni", _image, _video, _SYSTEM, _audio)
OMNI_THINKER = OMNI._replace(name="qwen2_5_omni_thinker")

_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        kind.family.name: kind
        for kind in (
            _Kind(QWEN2VL, "qwen2_vl_text", "qwen2_vl_vision", *_OLD_LIMITS, _OLD_FRAMES, CLIP),
            _Kind(
                QWEN25VL, "qwen2_5_vl_text", "qwen2_5_vl_vision", *_OLD_LIMITS, _OLD_FRAMES, CLIP
            ),
            _Kind(QWEN3VL, "qwen3_vl_text", "qwen3_vl_vision", *_NEW_LIMITS, _NEW_FRAMES, HALVES),
            _Kind(
                QWEN3VL_MOE,
                "qwen3_vl_moe_text",
                "qwen3_vl_moe_vision",
                *_NEW_LIMITS,
                _NEW_FRAMES,
                HALVES,
            ),
        )
    }
)
_OMNI_KIND = _Kind(
    OMNI, "qwen2_5_omni_text", "qwen2_5_omni_vision_encoder", *_OLD_LIMITS, _OLD_FRAMES, CLIP
)


def read_qwen(files: ModelFiles, name: str) -> ModelShape:
    """The shape of a Qwen-VL model."""
    return _read(files, name, files.config, _KINDS[files.config.text("model_type")])


def read_omni(files: ModelFiles, name: str) -> ModelShape:
    """The shape of the part of Qwen2.5-Omni that reads (its "thinker")."""
    config = files.config
    thinker = config.section("thinker_config", {}) if "thinker_config" in config else config
    kind = _OMNI_KIND._replace(
        family=OMNI if config.text("model_type") == OMNI.name else OMNI_THINKER
    )
    return _read(files, name, thinker, kind)


def _read(files: ModelFiles, name: str, root: Section, kind: _Kind) -> ModelShape:
    text = nested_text(root, kind=kind.text)
    omni = kind.family.audio is not None
    return ModelShape(
        name=name,
        family=kind.family,
        text=text,
        vision=_vision(root.section("vision_config", CLASS_DEFAULTS[kind.vision]), text),
        audio_encoder=_audio_encoder(root, files.audio, text) if omni else None,
        image_rules=colour_rules(
            files.image, kind.colours, limits=pixel_limits(files.image, *kind.limits)
        ),
        video_rules=colour_rules(
            files.video, kind.colours, limits=pixel_limits(files.video, *kind.video_limits)
        ),
        frame_rules=frame_rules(files.video, **kind.frames),
        tokens=_omni_tokens(root) if omni else _tokens(root, kind.family.name),
    )


def _tokens(root: Section, family: str) -> SpecialTokens:
    root = root.over(CLASS_DEFAULTS[family])
    return SpecialTokens(
        image=root.integer("image_token_id"),
        video=root.integer("video_token_id"),
        vision_start=root.integer("vision_start_token_id"),
        vision_end=root.integer("vision_end_token_id"),
    )


def _omni_tokens(root: Section) -> SpecialTokens:
    found = {}
    for what in ("image", "video", "audio"):
        keys = (f"{what}_token_index", f"{what}_token_id")
        filled = root.over(CLASS_DEFAULTS["qwen2_5_omni_thinker"])
        found[what] = filled.integer(keys[1] if keys[1] in root else keys[0])
    return SpecialTokens(**found)


def _vision(section: Section, text: TextShape) -> VisionShape:
    # Qwen2-VL calls the encoder's width embed_dim, and the language model's hidden_size.
    old = "embed_dim" in section.defaults
    width = section.integer("embed_dim" if old else "hidden_size", least=1)
    patch = section.integer("patch_size", least=1)
    merge = section.integer("spatial_merge_size", least=1)
    windowed = "window_size" in section.defaults
    stacked = "deepstack_visual_indexes" in section.defaults
    levels = 1 + (len(section.numbers("deepstack_visual_indexes")) if stacked else 0)
    wide = width * merge**2
    timed = "tokens_per_second" in section.defaults
    return VisionShape(
        layers=section.integer("depth", least=1),
        width=width,
        heads=section.integer("num_heads", least=1),
        mlp_width=int(width * section.number("mlp_ratio"))
        if old
        else section.integer("intermediate_size", least=1),
        patch=patch,
        frames=section.integer("temporal_patch_size", least=1),
        merge=merge,
        window=section.integer("window_size") // patch if windowed else 0,
        full_layers=tuple(int(layer) for layer in section.numbers("fullatt_block_indexes"))
        if windowed
        else (),
        tokens_per_second=section.integer("tokens_per_second", least=1) if timed else 1,
        mlp_matrices=3 if windowed else 2,
        projections=(Projection(wide, wide, "llm"), Projection(wide, text.width, "llm")) * levels,
    )


def _audio_encoder(root: Section, extractor: Section, text: TextShape) -> AudioShape:
    section = root.section("audio_config", CLASS_DEFAULTS["qwen2_5_omni_audio_encoder"])
    extractor = extractor.over({"sampling_rate": 16000, "hop_length": 160, "chunk_length": 30})
    width = section.integer("d_model", least=1)
    rate, hop = (
        extractor.integer("sampling_rate", least=1),
        extractor.integer("hop_length", least=1),
    )
    return AudioShape(
        layers=section.integer("encoder_layers", least=1),
        width=width,
        heads=section.integer("encoder_attention_heads", least=1),
        mlp_width=section.integer("encoder_ffn_dim", least=1),
        mels=section.integer("num_mel_bins", least=1),
        window=2 * section.integer("n_window", least=1),
        max_frames=extractor.integer("chunk_length", least=1) * rate // hop,
        sample_rate=rate,
        hop=hop,
        projections=(Projection(width, text.width, "llm"),),
    )


READERS: Mapping[str, Callable[[ModelFiles, str], ModelShape]] = MappingProxyType(
    dict.fromkeys(_KINDS, read_qwen) | dict.fromkeys((OMNI.name, OMNI_THINKER.name), read_omni)
)
"""By `model_type` of config.json."""
