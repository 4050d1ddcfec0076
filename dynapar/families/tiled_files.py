"""Read the files of families that cut pictures into tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from dynapar.errors import ModelError
from dynapar.families.defaults import CLASS_DEFAULTS
from dynapar.families.processors import CLIP, HALVES, colour_rules, frame_rules
from dynapar.families.text import nested_text
from dynapar.families.tiled import (
    GEMMA3,
    IDEFICS3,
    INTERNVL,
    LLAMA4,
    LLAVA_ONEVISION,
    MLLAMA,
    SMOLVLM,
)
from dynapar.families.tiles import pixel_grids
from dynapar.modelfiles import ModelFiles, Section
from dynapar.shapes import (
    ModelShape,
    Projection,
    SpecialTokens,
    TextShape,
    TileRules,
    VisionShape,
)

_EVERY_FRAME = {"fps": 0.0, "min_frames": 1, "max_frames": 1 << 40, "max_video_tokens": 1}


def _encoder(
    section: Section,
    *,
    projections: tuple[Projection, ...],
    merge: int = 1,
    class_tokens: int = 0,
    heads: str = "num_attention_heads",
    more_layers: int = 0,
) -> VisionShape:
    """A plain vision transformer."""
    return VisionShape(
        layers=section.integer("num_hidden_layers", least=1) + more_layers,
        width=section.integer("hidden_size", least=1),
        heads=section.integer(heads, least=1),
        mlp_width=section.integer("intermediate_size", least=1),
        patch=section.integer("patch_size", least=1),
        frames=1,
        merge=merge,
        window=0,
        full_layers=(),
        tokens_per_second=1,
        class_tokens=class_tokens,
        projections=projections,
    )


def _vision_section(config: Section, kind: str) -> Section:
    section = config.section("vision_config", CLASS_DEFAULTS[kind])
    named = section.values.get("model_type", kind)
    if named != kind:
        raise ModelError(
            f"{section.place}: model_type is {named!r}; expected {kind!r}. Take another model."
        )
    return section


def _two_layers(inputs: int, text: TextShape) -> tuple[Projection, ...]:
    return Projection(inputs, text.width, "llm"), Projection(text.width, text.width, "llm")


def _image_token(config: Section, family: str) -> SpecialTokens:
    config = config.over(CLASS_DEFAULTS[family])
    keys = ("image_token_id", "image_token_index")
    found = [key for key in keys if key in config] or [k for k in keys if k in config.defaults]
    return SpecialTokens(image=config.integer(found[0]))


def read_internvl(files: ModelFiles, name: str) -> ModelShape:
    """The shape of InternVL in transformers' own form ("-hf")."""
    section = _vision_section(files.config, "internvl_vision")
    text = nested_text(files.config, kind="qwen2")
    root = files.config.over(CLASS_DEFAULTS["internvl"])
    merge = round(1 / root.number("downsample_ratio"))
    width = section.integer("hidden_size", least=1)
    image = files.image.over({"size": {"height": 384, "width": 384}, "max_patches": 12})
    tokens = root.integer("image_seq_length", least=1)
    return ModelShape(
        name=name,
        family=INTERNVL,
        text=text,
        vision=_encoder(
            section,
            merge=merge,
            class_tokens=1,
            projections=_two_layers(width * merge**2, text),
        ),
        image_rules=colour_rules(files.image, CLIP),
        video_rules=colour_rules(files.video, CLIP),
        frame_rules=frame_rules(files.video, **_EVERY_FRAME),
        tile_rules=TileRules(
            edge=image.side("size", "height"),
            most=image.integer("max_patches", least=1) if image.flag("crop_to_patches") else 0,
            tokens=tokens,
            frame_tokens=tokens,
        ),
        tokens=_image_token(files.config, "internvl"),
    )


def read_llava_onevision(files: ModelFiles, name: str) -> ModelShape:
    """The shape of LLaVA-OneVision.

    Raises:
        ModelError: A value is missing, or its pictures are not tiled by "anyres_max_N".
    """
    config = files.config.over(CLASS_DEFAULTS["llava_onevision"])
    section = _vision_section(config, "siglip_vision_model")
    text = nested_text(config, kind="qwen2")
    scheme = config.text("vision_aspect_ratio")
    if not scheme.startswith("anyres_max_") or not scheme[11:].isdigit():
        raise ModelError(
            f"{config.place}: vision_aspect_ratio is {scheme!r}; expected 'anyres_max_N'"
        )
    width = section.integer("hidden_size", least=1)
    image = files.image.over({"size": {"height": 384, "width": 384}})
    edge = image.side("size", "shortest_edge", "height")
    side = edge // section.integer("patch_size", least=1)
    sizes = (
        image.pairs("image_grid_pinpoints")
        if "image_grid_pinpoints" in image
        else [(edge * rows, edge * columns) for rows in range(1, 7) for columns in range(1, 7)]
    )
    return ModelShape(
        name=name,
        family=LLAVA_ONEVISION,
        text=text,
        vision=_encoder(
            section,
            projections=(
                Projection(width, text.width, "patch"),
                Projection(text.width, text.width, "patch"),
            ),
        ),
        image_rules=colour_rules(files.image, CLIP),
        video_rules=colour_rules(files.video, CLIP),
        frame_rules=frame_rules(files.video, **_EVERY_FRAME),
        tile_rules=TileRules(
            edge=edge,
            grids=pixel_grids(sizes, edge),
            most_features=int(scheme[11:]),
            tokens=side**2,
            frame_tokens=math.ceil(side / 2) ** 2,
        ),
        tokens=SpecialTokens(
            image=config.integer("image_token_index"), video=config.integer("video_token_index")
        ),
    )


def read_gemma3(files: ModelFiles, name: str) -> ModelShape:
    """The shape of Gemma 3 with pictures."""
    section = _vision_section(files.config, "siglip_vision_model")
    text = nested_text(files.config, kind="gemma3_text")
    root = files.config.over(CLASS_DEFAULTS["gemma3"])
    width = section.integer("hidden_size", least=1)
    tokens = root.integer("mm_tokens_per_image", least=1)
    image = files.image.over({"size": {"height": 224, "width": 224}})
    edge = image.side("size", "height")
    scans = image.flag("do_pan_and_scan")
    return ModelShape(
        name=name,
        family=GEMMA3,
        text=text,
        vision=_encoder(
            section,
            merge=edge // section.integer("patch_size", least=1) // math.isqrt(tokens),
            projections=(Projection(width, text.width, "llm"),),
        ),
        image_rules=colour_rules(files.image, HALVES),
        tile_rules=TileRules(
            edge=edge,
            tokens=tokens,
            most=image.integer("pan_and_scan_max_num_crops", least=2) if scans else 0,
            min_crop=image.integer("pan_and_scan_min_crop_size", least=1) if scans else 0,
            min_ratio=image.number("pan_and_scan_min_ratio_to_activate") if scans else 0.0,
        ),
        tokens=_image_token(files.config, "gemma3"),
    )


def read_llama4(files: ModelFiles, name: str) -> ModelShape:
    """The shape of Llama 4."""
    section = _vision_section(files.config, "llama4_vision_model")
    text = nested_text(files.config, kind="llama4_text")
    merge = round(1 / section.number("pixel_shuffle_ratio"))
    inner = section.integer("projector_input_dim", least=1)
    outer = section.integer("projector_output_dim", least=1)
    image = files.image.over({"size": {"height": 336, "width": 336}, "max_patches": 16})
    edge = image.side("size", "height")
    side = edge // section.integer("patch_size", least=1)
    return ModelShape(
        name=name,
        family=LLAMA4,
        text=text,
        vision=_encoder(
            section,
            merge=merge,
            class_tokens=1,
            projections=(
                Projection(section.integer("intermediate_size", least=1), inner, "llm"),
                Projection(outer, outer, "llm"),
                Projection(section.integer("vision_output_dim", least=1), text.width, "llm"),
            ),
        ),
        image_rules=colour_rules(files.image, HALVES),
        tile_rules=TileRules(
            edge=edge,
            most=image.integer("max_patches", least=1),
            tokens=side**2 // merge**2,
        ),
        tokens=_image_token(files.config, "llama4"),
    )


def read_mllama(files: ModelFiles, name: str) -> ModelShape:
    """The shape of Llama 3.2 Vision."""
    section = _vision_section(files.config, "mllama_vision_model")
    text = nested_text(files.config, kind="mllama_text_model")
    image = files.image.over({"size": {"height": 224, "width": 224}, "max_image_tiles": 4})
    output = section.integer("vision_output_dim", least=1)
    return ModelShape(
        name=name,
        family=MLLAMA,
        text=text,
        vision=_encoder(
            section,
            class_tokens=1,
            heads="attention_heads",
            more_layers=section.integer("num_global_layers"),
            projections=(Projection(output, text.width, "key"),),
        ),
        image_rules=colour_rules(files.image, CLIP),
        tile_rules=TileRules(
            edge=image.side("size", "height"),
            most=image.integer("max_image_tiles", least=1),
            tokens=1,
        ),
        tokens=_image_token(files.config, "mllama"),
    )


def read_idefics3(files: ModelFiles, name: str) -> ModelShape:
    """The shape of Idefics3 or SmolVLM."""
    family = IDEFICS3 if files.config.text("model_type") == IDEFICS3.name else SMOLVLM
    section = _vision_section(files.config, f"{family.name}_vision")
    text = nested_text(files.config, kind="llama")
    merge = files.config.over(CLASS_DEFAULTS[family.name]).integer("scale_factor", least=1)
    width = section.integer("hidden_size", least=1)
    image = files.image.over(
        {
            "size": {"longest_edge": 4 * 364},
            "max_image_size": {"longest_edge": 364},
            "do_image_splitting": True,
        }
    )
    edge = image.side("max_image_size", "longest_edge")
    tokens = (edge // section.integer("patch_size", least=1)) ** 2 // merge**2
    return ModelShape(
        name=name,
        family=family,
        text=text,
        vision=_encoder(
            section, merge=merge, projections=(Projection(width * merge**2, text.width, "llm"),)
        ),
        image_rules=colour_rules(files.image, HALVES),
        video_rules=colour_rules(files.video, HALVES),
        frame_rules=frame_rules(_sampling(files.video), **_EVERY_FRAME | {"fps": 1.0}),
        tile_rules=TileRules(
            edge=edge,
            long_edge=image.side("size", "longest_edge") if image.flag("do_image_splitting") else 0,
            tokens=tokens,
            frame_tokens=tokens,
        ),
        tokens=_image_token(files.config, family.name),
    )


def _sampling(video: Section) -> Section:
    """SmolVLM keeps the video processor's numbers in a section of their own."""
    return video.section("video_sampling", {}) if "video_sampling" in video else video


READERS: Mapping[str, Callable[[ModelFiles, str], ModelShape]] = MappingProxyType(
    {
        INTERNVL.name: read_internvl,
        LLAVA_ONEVISION.name: read_llava_onevision,
        GEMMA3.name: read_gemma3,
        LLAMA4.name: read_llama4,
        MLLAMA.name: read_mllama,
        IDEFICS3.name: read_idefics3,
        SMOLVLM.name: read_idefics3,
    }
)
"""By `model_type` of config.json."""
