"""Find the shape of a model by its folder, its name, or its configuration object.

A family is one row of `READERS` (its module holds the formulas), a released checkpoint one row of
`dynapar.families.presets.RELEASED`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from dynapar.errors import ModelError
from dynapar.families import pixtral, qwen, tiled_files
from dynapar.families.presets import RELEASED, Preset
from dynapar.families.text import TEXT_TYPES, read_text_model
from dynapar.modelfiles import ModelFiles, Section, read_model_files, read_section
from dynapar.shapes import (
    AUDIO_KIND as AUDIO_KIND,
)
from dynapar.shapes import (
    IMAGE_KIND as IMAGE_KIND,
)
from dynapar.shapes import (
    VIDEO_KIND as VIDEO_KIND,
)
from dynapar.shapes import (
    MediaTokens as MediaTokens,
)
from dynapar.shapes import (
    ModelShape as ModelShape,
)

READERS: Mapping[str, Callable[[ModelFiles, str], ModelShape]] = MappingProxyType(
    {
        **qwen.READERS,
        **tiled_files.READERS,
        **pixtral.READERS,
        **dict.fromkeys(TEXT_TYPES, read_text_model),
    }
)
"""How to read a model's files, by `model_type` of its config.json."""


def _released(name: str) -> ModelShape:
    preset = RELEASED[name]
    image = Section(place=f"preset {name}, image processor", values=preset.image)
    video = image
    if preset.video is not None:
        video = Section(place=f"preset {name}, video processor", values=preset.video)
    files = ModelFiles(
        config=Section(place=f"preset {name}", values=preset.config),
        processor=Section(place=f"preset {name}, processor", values={}),
        image=image,
        video=video,
        audio=image,
    )
    return _reader(files.config)(files, name)


PRESETS: Mapping[str, Callable[[str], ModelShape]] = MappingProxyType(
    dict.fromkeys(RELEASED, _released)
)
"""Released checkpoints, by lower-case name: call with the name for the shape."""

_SUFFIXES = ("-instruct", "-it", "-hf", "-ov", "-chat", "-base", "-thinking", "-2409", "-2503")
_INFIXES = (("meta-llama-", "llama-"), ("-qwen2-", "-"), ("-17b-16e", ""), ("-17b-128e", ""))


class Configuration(Protocol):
    """A configuration or a processor of transformers, as far as it is used here."""

    def to_dict(self) -> dict[str, object]:
        """Its values."""


def load_model_shape(name_or_folder: str) -> ModelShape:
    """The shape of a model.

    Args:
        name_or_folder: A folder with config.json, preprocessor_config.json and (to tokenise)
            tokenizer.json, or the name of a preset, such as "qwen2.5-vl-7b".

    Raises:
        ModelError: No folder and no preset has this name (the nearest ones are named), the family
            is not known, or its files lack a value.

    >>> load_model_shape("qwen2.5-vl-7b").image(512, 512).llm_tokens
    324
    >>> load_model_shape("OpenGVLab/InternVL3-8B-hf").image(480, 640).llm_tokens
    3328
    """
    folder = Path(name_or_folder)
    if folder.is_dir():
        config = read_section(folder / "config.json", defaults={})
        reader = _reader(config)
        media = config.values.get("model_type") not in TEXT_TYPES
        return replace(reader(read_model_files(folder, media=media), folder.name), folder=folder)
    name = preset_name(name_or_folder)
    if name not in PRESETS:
        raise ModelError(
            f"no model {name_or_folder!r}: no such folder, and no preset of that name"
            f"{_nearest(name, PRESETS)} Give a model folder or {_some_presets(name)}."
        )
    return PRESETS[name](name)


def _some_presets(name: str) -> str:
    near = difflib.get_close_matches(name, PRESETS, n=4, cutoff=0.0)
    return f"one of {len(PRESETS)} presets, such as {', '.join(near)}"


def shape_of_config(
    config: Configuration,
    *,
    image_processor: Configuration | None = None,
    video_processor: Configuration | None = None,
    feature_extractor: Configuration | None = None,
    like: str | None = None,
) -> ModelShape:
    """The shape of a model in memory.

    Args:
        config: Its configuration, such as `model.config`.
        image_processor: How pictures are resized; needed where the model takes pictures, unless
            `like` is given.
        video_processor: The same for videos; None: as for pictures.
        feature_extractor: The same for audio.
        like: A preset whose processors stand in for those that are not given.

    Raises:
        ModelError: The family is not known, a value is missing, no processor is given for a
            model with media, or `like` is no preset.
    """
    values = config.to_dict()
    root = Section(place=f"{type(config).__name__}", values=values)
    reader = _reader(root)
    name = str(values.get("_name_or_path") or values.get("model_type"))
    released = _like(like) if like is not None else Preset({})
    media = values.get("model_type") not in TEXT_TYPES
    if media and image_processor is None and like is None:
        raise ModelError(
            f"{root.place} is a model with media, and no image_processor is given; expected one, "
            "since it decides how many tokens a picture becomes. Pass processor.image_processor, "
            f"or like= one of {len(RELEASED)} presets, such as 'qwen2.5-vl-7b'."
        )

    def section(what: str, given: Configuration | None, instead: Mapping[str, object]) -> Section:
        if given is None:
            return Section(place=f"{root.place}, {what}", values=instead)
        return Section(place=type(given).__name__, values=given.to_dict())

    image = section("image_processor", image_processor, released.image)
    instead = image.values if released.video is None else released.video
    files = ModelFiles(
        config=root,
        processor=Section(place=f"{root.place}, processor", values={}),
        image=image,
        video=section("video_processor", video_processor, instead),
        audio=section("feature_extractor", feature_extractor, released.image),
    )
    return reader(files, name)


def _like(name: str) -> Preset:
    known = preset_name(name)
    if known not in RELEASED:
        raise ModelError(
            f"like is {name!r}, which is no preset{_nearest(known, RELEASED)} Give "
            f"{_some_presets(known)}."
        )
    return RELEASED[known]


def preset_name(name: str) -> str:
    """A name as presets are listed: no owner, lower case, no "-instruct" or the like.

    >>> preset_name("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    'llama-4-scout'
    """
    short = name.lower().rsplit("/", 1)[-1]
    for old, new in _INFIXES:
        short = short.replace(old, new)
    while short not in RELEASED and short.endswith(_SUFFIXES):
        short = short.rsplit("-", 1)[0]
    return short


def _reader(config: Section) -> Callable[[ModelFiles, str], ModelShape]:
    family = str(config.values.get("model_type"))
    if family not in READERS:
        raise ModelError(
            f"{config.place} has model_type {family!r}; expected one of "
            f"{sorted(READERS)}{_nearest(family, READERS)}"
        )
    return READERS[family]


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
