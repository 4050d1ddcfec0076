"""Pixtral and Mistral Small 3.1: a picture of any size, as rows that end in a break token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from dynapar.errors import ModelError
from dynapar.families.defaults import CLASS_DEFAULTS
from dynapar.families.processors import CLIP, colour_rules
from dynapar.families.resize import fit_edge
from dynapar.families.text import nested_text
from dynapar.modelfiles import ModelFiles
from dynapar.shapes import (
    IMAGE_KIND,
    Family,
    MediaTokens,
    ModelShape,
    Projection,
    SpecialTokens,
    TileRules,
    VisionShape,
)


def _image(shape: ModelShape, height: int, width: int, images: int) -> MediaTokens:
    del images
    vision = shape.vision
    multiple = vision.patch * vision.merge
    size = fit_edge(height, width, edge=shape.tile_rules.edge, multiple=multiple)
    rows, columns = size[0] // vision.patch, size[1] // vision.patch
    llm_tokens = rows * columns // vision.merge**2
    breaks = rows // vision.merge
    grid = (1, rows, columns)
    return MediaTokens(IMAGE_KIND, size, grid, llm_tokens, (), 0.0, boundary_tokens=breaks)


PIXTRAL = Family("llava", _image, None, "")
MISTRAL3 = Family("mistral3", _image, None, "")


def read_pixtral(files: ModelFiles, name: str) -> ModelShape:
    """The shape of Pixtral, which is a "llava" with a Pixtral encoder, or of Mistral 3.

    Raises:
        ModelError: It is a "llava" with another encoder.
    """
    config = files.config
    family = PIXTRAL if config.text("model_type") == PIXTRAL.name else MISTRAL3
    section = config.section("vision_config", CLASS_DEFAULTS["pixtral"])
    kind = section.values.get("model_type", "pixtral" if family is MISTRAL3 else None)
    if kind != "pixtral":
        raise ModelError(
            f"{section.place}: model_type is {kind!r}; expected 'pixtral', the one encoder of "
            "llava models that dynapar knows. Take another model."
        )
    text = nested_text(config, kind="mistral")
    width = section.integer("hidden_size", least=1)
    root = config.over(CLASS_DEFAULTS[family.name])
    merge = root.integer("spatial_merge_size", least=1) if family is MISTRAL3 else 1
    merger = (Projection(width * merge**2, width, "llm"),) if merge > 1 else ()
    image = files.image.over({"size": {"longest_edge": 1024}})
    return ModelShape(
        name=name,
        family=family,
        text=text,
        vision=VisionShape(
            layers=section.integer("num_hidden_layers", least=1),
            width=width,
            heads=section.integer("num_attention_heads", least=1),
            mlp_width=section.integer("intermediate_size", least=1),
            patch=section.integer("patch_size", least=1),
            frames=1,
            merge=merge,
            window=0,
            full_layers=(),
            tokens_per_second=1,
            mlp_matrices=3,
            projections=(
                *merger,
                Projection(width, text.width, "llm"),
                Projection(text.width, text.width, "llm"),
            ),
        ),
        image_rules=colour_rules(image, CLIP),
        tile_rules=TileRules(edge=image.side("size", "longest_edge", "height")),
        tokens=SpecialTokens(image=root.integer("image_token_index")),
    )


READERS: Mapping[str, Callable[[ModelFiles, str], ModelShape]] = MappingProxyType(
    {PIXTRAL.name: read_pixtral, MISTRAL3.name: read_pixtral}
)
"""By `model_type` of config.json."""
