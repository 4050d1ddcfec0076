"""Shapes from folders, configuration objects and a few numbers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from dynapar.catalog import load_model_shape, preset_name, shape_of_config
from dynapar.errors import ModelError
from dynapar.families.defaults import CLASS_DEFAULTS
from dynapar.families.presets import MEDIA_PRESETS, RELEASED
from dynapar.families.tiled import INTERNVL
from dynapar.shapes import ModelShape, TextShape, TileRules, VisionShape
from tests.families.small_models import CASES, Given

MODULES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "internvl"),
    *("mllama", "llama4", "idefics3", "smolvlm", "pixtral", "siglip"),
)


def class_values(kind: str) -> dict[str, Any]:
    """What transformers' class for a `model_type` assumes."""
    if kind in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[kind]().to_dict()
    for name in MODULES:
        module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
        for found in vars(module).values():
            if isinstance(found, type) and getattr(found, "model_type", None) == kind:
                values: dict[str, Any] = found().to_dict()
                return values
    raise KeyError(kind)


@pytest.mark.parametrize("kind", CLASS_DEFAULTS)
def test_class_defaults_are_those_of_transformers(kind: str) -> None:
    theirs = class_values(kind)
    for key, value in CLASS_DEFAULTS[kind].items():
        found = theirs[key]
        assert (found[0] if key == "patch_size" and isinstance(found, list) else found) == value


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("gpt_oss", "qwen3_moe")])
def test_a_saved_configuration_is_read_as_the_object(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    case.model.config.save_pretrained(tmp_path)
    text_only = case.shape.family.image is None
    processor = {"size": {"height": 112, "width": 112, "longest_edge": 224}, "max_patches": 6}
    processor |= {"crop_to_patches": True, "max_image_size": {"longest_edge": 112}}
    if "qwen" in name or text_only:
        processor = {}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    read = load_model_shape(str(tmp_path))
    asked = None if text_only else Given(**processor)
    want = shape_of_config(case.model.config, image_processor=asked)
    for field in ("text", "vision", "audio_encoder", "tile_rules", "tokens", "family"):
        assert getattr(read, field) == getattr(want, field), field


@pytest.mark.parametrize("name", RELEASED)
def test_presets_are_whole(name: str) -> None:
    shape = load_model_shape(name)
    assert shape.text.heads % shape.text.kv_heads == 0
    assert shape.text.layers > shape.text.window_layers or shape.text.window_layers == 0
    if name in MEDIA_PRESETS:
        assert shape.vision.width % shape.vision.heads == 0
        assert shape.vision.projections[-1].outputs == shape.text.width
        assert shape.tokens.image >= 0
    assert shape.settings()["family"] == shape.family.name


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("OpenGVLab/InternVL3-8B-hf", "internvl3-8b"),
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", "llava-onevision-7b"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "llama-3.2-11b-vision"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "llama-4-maverick"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral-small-3.1-24b"),
        ("HuggingFaceTB/SmolVLM-256M-Instruct", "smolvlm-256m"),
    ],
)
def test_names_of_the_hub_are_understood(said: str, name: str) -> None:
    assert preset_name(said) == name
    assert load_model_shape(said).name == name


def test_other_limits_change_the_count() -> None:
    config = Given(**RELEASED["qwen2.5-vl-7b"].config)
    less = shape_of_config(config, image_processor=Given(max_pixels=1003520))
    like = shape_of_config(config, like="qwen2.5-vl-7b")
    assert less.image(3000, 4000).llm_tokens == 1230
    assert like.image(3000, 4000).llm_tokens == 15301
    assert less.settings() != like.settings()


def test_a_model_can_be_made_of_a_few_numbers() -> None:
    text = TextShape(
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        head_width=16,
        mlp_width=96,
        vocabulary=100,
        tied=True,
    )
    assert ModelShape(name="mine", family=INTERNVL, text=text).vision.layers == 0
    vision = VisionShape(
        layers=2,
        width=32,
        heads=2,
        mlp_width=64,
        patch=14,
        frames=1,
        merge=2,
        window=0,
        full_layers=(),
        tokens_per_second=1,
        class_tokens=1,
    )
    rules = TileRules(edge=448, most=12, tokens=256, frame_tokens=256)
    shape = ModelShape(name="mine", family=INTERNVL, text=text, vision=vision, tile_rules=rules)
    assert shape.image(480, 640).llm_tokens == 3328


CONFIG = {"model_type": "internvl", "text_config": {"model_type": "qwen2"}, "vision_config": {}}


@pytest.mark.parametrize(
    ("config", "processor", "said"),
    [
        ({"model_type": "intern_vl"}, {}, r"config\.json has model_type 'intern_vl'.*'internvl'"),
        (
            {**CONFIG, "text_config": {"model_type": "mamba"}},
            {},
            r"config\.json, text_config: model_type is 'mamba'; expected a language model",
        ),
        (
            {**CONFIG, "vision_config": {"model_type": "clip"}},
            {},
            r"config\.json, vision_config: model_type is 'clip'; expected 'internvl_vision'",
        ),
        (
            {"model_type": "gemma3"},
            {"do_pan_and_scan": True},
            r"preprocessor_config\.json has no 'pan_and_scan_max_num_crops'; expected a value",
        ),
        (CONFIG, {"size": {"longest_edge": 5}}, r"preprocessor_config\.json, size is .* height"),
        (
            {"model_type": "llava", "vision_config": {"model_type": "clip"}},
            {},
            "expected 'pixtral', the one encoder",
        ),
        ({"model_type": "llava_onevision", "vision_aspect_ratio": "pad"}, {}, "anyres_max_N"),
        ({"model_type": "llama", "hidden_size": 0}, {}, r"hidden_size is 0.0; expected an integer"),
    ],
)
def test_what_a_folder_lacks_is_named_with_file_and_field(
    config: dict[str, object], processor: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ModelError, match=said):
        load_model_shape(str(tmp_path))


def test_a_configuration_with_media_needs_a_processor() -> None:
    with pytest.raises(ModelError, match="no image_processor is given"):
        shape_of_config(Given(**RELEASED["qwen2.5-vl-7b"].config))


def test_an_unknown_preset_to_be_like_is_named_with_near_ones() -> None:
    said = (
        r"^like is 'qwen2\.5-vl-8b', which is no preset; did you mean 'qwen2\.5-vl-.*Give one of "
        rf"{len(RELEASED)} presets, such as .*qwen2\.5-vl-7b"
    )
    with pytest.raises(ModelError, match=said):
        shape_of_config(Given(**RELEASED["qwen2.5-vl-7b"].config), like="qwen2.5-vl-8b")
