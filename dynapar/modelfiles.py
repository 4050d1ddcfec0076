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
        if not isinstance(value, dict):
            raise ModelError(f"{self.place}: {key} is {value!r}; expected an object")
        return Section(place=f"{self.place}, {key}", values=value, defaults=defaults)


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
