"""Find the shape of a model by its folder or its name.

A family is one row of `READERS` (its module holds the formulas), a released checkpoint one row of
`PRESETS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from dynapar import qwen25vl
from dynapar.errors import ModelError
from dynapar.modelfiles import read_section
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

READERS: Mapping[str, Callable[[Path], ModelShape]] = MappingProxyType(
    {qwen25vl.QWEN25VL.name: qwen25vl.read_folder}
)
"""How to read a model folder, by `model_type` of its config.json."""

PRESETS: Mapping[str, Callable[[str], ModelShape]] = MappingProxyType(
    dict.fromkeys(qwen25vl.RELEASED, qwen25vl.released)
)
"""Released checkpoints, by lower-case name."""


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
    """
    folder = Path(name_or_folder)
    if folder.is_dir():
        config = read_section(folder / "config.json", defaults={})
        family = str(config.values.get("model_type"))
        if family not in READERS:
            raise ModelError(
                f"{folder / 'config.json'} has model_type {family!r}; expected one of "
                f"{sorted(READERS)}{_nearest(family, READERS)}"
            )
        return READERS[family](folder)
    name = name_or_folder.lower().rsplit("/", 1)[-1].removesuffix("-instruct")
    if name not in PRESETS:
        raise ModelError(
            f"no model {name_or_folder!r}: no such folder, and no preset of that name"
            f"{_nearest(name, PRESETS)} Give a model folder or one of {sorted(PRESETS)}."
        )
    return PRESETS[name](name)


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
