"""Read sections of a model folder's JSON files, with errors that name file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from dynapar.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A JSON object of a model folder, with the values that stand in for absent keys."""

    place: str
    """File and key, for messages."""
    values: Mapping[str, object]
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What transformers' configuration class assumes where the file is silent."""

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _value(self, key: str) -> object:
        value = self.values.get(key)
        if value is None:
            value = self.defaults.get(key)
        if value is None:
            raise ModelError(
                f"{self.place} has no {key!r}; expected a value. Use the model's own files."
            )
        return value

    def number(self, key: str) -> float:
        """A finite number; raises ModelError when it is absent or no number."""
        value = self._value(key)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]  # some files give one patch size for each side
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.place}: {key} is {value!r}; expected a number")
        return float(value)

    def integer(self, key: str, *, least: int = 0) -> int:
        """An integer, `least` or more; raises ModelError otherwise."""
        value = self.number(key)
        if value != int(value) or value < least:
            raise ModelError(
                f"{self.place}: {key} is {value}; expected an integer, {least} or more"
            )
        return int(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers; raises ModelError otherwise."""
        value = self._value(key)
        if not isinstance(value, list | tuple):
            raise ModelError(f"{self.place}: {key} is {value!r}; expected a list of numbers")
        return tuple(float(cast(float, item)) for item in value)

    def section(self, key: str, defaults: Mapping[str, object]) -> Section:
        """A nested object; an empty one when it is absent."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.place}: {key} is {value!r}; expected an object")
        return Section(place=f"{self.place}, {key}", values=value, defaults=defaults)

    def over(self, defaults: Mapping[str, object]) -> Section:
        """The same values before other stand-ins."""
        return Section(place=self.place, values=self.values, defaults=defaults)

    def flag(self, key: str) -> bool:
        """Whether a switch is on; off when it is absent."""
        return bool(self.values.get(key, self.defaults.get(key)))

    def text(self, key: str) -> str:
        """A word; raises ModelError when it is absent or no string."""
        value = self._value(key)
        if not isinstance(value, str):
            raise ModelError(f"{self.place}: {key} is {value!r}; expected a string")
        return value

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """A list of pairs of integers; raises ModelError otherwise."""
        value = self._value(key)
        if not isinstance(value, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
        ):
            raise ModelError(f"{self.place}: {key} is {value!r}; expected a list of pairs")
        return tuple((int(pair[0]), int(pair[1])) for pair in value)

    def side(self, key: str, *names: str) -> int:
        """Pixels along a side: a number, or the first of `names` inside an object."""
        value = self._value(key)
        if not isinstance(value, Mapping):
            return self.integer(key, least=1)
        inner = Section(place=f"{self.place}, {key}", values=value)
        found = [name for name in names if name in inner]
        if not found:
            raise ModelError(f"{inner.place} is {dict(value)}; expected {' or '.join(names)}")
        return inner.integer(found[0], least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What a model's files say, as sections without stand-ins."""

    config: Section
    """config.json."""
    processor: Section
    """processor_config.json: what image, video and audio have in common."""
    image: Section
    """Its `image_processor`, or preprocessor_config.json."""
    video: Section
    """Its `video_processor`, or video_preprocessor_config.json, or what images have."""
    audio: Section
    """Its `feature_extractor`, or preprocessor_config.json."""


def read_model_files(folder: Path, *, media: bool) -> ModelFiles:
    """The files of a model folder, looked for where transformers looks.

    Args:
        folder: With config.json.
        media: Whether the model has processors; their files are then required.

    Raises:
        ModelError: A file is missing, is not JSON, or holds no object.
    """
    config = read_section(folder / "config.json", defaults={})
    nothing = Section(place=str(folder), values={})
    nested = folder / "processor_config.json"
    processor = read_section(nested, defaults={}) if nested.exists() else nothing
    image, video, audio = (
        processor.section(key, {})
        for key in ("image_processor", "video_processor", "feature_extractor")
    )
    if media and not image.values:
        image = read_section(folder / "preprocessor_config.json", defaults={})
    if media and not video.values:
        own = folder / "video_preprocessor_config.json"
        # Without a file of its own the video processor reads the images' settings.
        video = read_section(own, defaults={}) if own.exists() else image
    audio = audio if audio.values else image
    return ModelFiles(config=config, processor=processor, image=image, video=video, audio=audio)


def read_section(path: Path, *, defaults: Mapping[str, object]) -> Section:
    """The object in a JSON file.

    Raises:
        ModelError: The file is missing, is not JSON, or holds no object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} does not exist; expected it in a model folder. Point --model at a folder with "
            "config.json, preprocessor_config.json and tokenizer.json."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}; expected a JSON object")
    return Section(place=str(path), values=values, defaults=defaults)
