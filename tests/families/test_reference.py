"""The tables of the model catalog, from the formulas alone; transformers is not needed."""

from __future__ import annotations

import pytest

from dynapar.catalog import load_model_shape, shape_of_config
from dynapar.families.presets import MEDIA_PRESETS
from tests.families.small_models import Given

SIZES = [
    (480, 640),
    (1080, 1920),
    (720, 1280),
    (336, 336),
    (448, 448),
    (100, 100),
    (3000, 4000),
    (1700, 2200),
    (224, 224),
    (64, 1000),
    (2160, 3840),
    (2200, 1700),
    (600, 2400),
    (3000, 500),
]
IMAGES = {
    "qwen2-vl-7b": (
        [391, 2691, 1196, 144, 256, 16, 15301, 4819, 64, 72, 10549, 4819, 1806, 1926],
        [1] * 14,
    ),
    "qwen3-vl-8b": (
        [300, 2040, 880, 100, 196, 64, 11750, 3657, 64, 96, 8160, 3657, 1425, 1504],
        [1] * 14,
    ),
    "internvl3-8b": (
        [3328, 2304, 2304, 256, 256, 256, 3328, 3328, 256, 3328, 2304, 3328, 1280, 1792],
        [13, 9, 9, 1, 1, 1, 13, 13, 1, 13, 9, 13, 5, 7],
    ),
    "llava-onevision-7b": (
        [2929, 7269, 5967, 1485, 3699, 1485, 7309, 7332, 1485, 1139, 7317, 7353, 7249, 5265],
        [5, 16, 9, 2, 5, 2, 31, 31, 2, 4, 25, 31, 13, 7],
    ),
    "pixtral-12b": (
        [1230, 2340, 2340, 462, 812, 56, 3120, 3250, 210, 256, 2340, 3264, 1040, 768],
        [1] * 14,
    ),
    "mistral-small-3.1-24b": (
        [432, 1736, 1222, 156, 272, 20, 2352, 2408, 72, 111, 1736, 2420, 784, 605],
        [1] * 14,
    ),
    "llama-4-scout": (
        [727, 2322, 1887, 147, 727, 147, 1887, 2467, 147, 582, 2322, 2467, 2467, 2467],
        [5, 16, 13, 1, 5, 1, 13, 17, 1, 4, 16, 17, 17, 17],
    ),
}
"""LLM tokens (of Pixtral, Mistral and Llama 4 with their boundaries) and encoder units."""


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str) -> None:
    shape = load_model_shape(name)
    tokens, units = IMAGES[name]
    bounded = name.startswith(("pixtral", "mistral", "llama"))
    for size, llm, unit in zip(SIZES, tokens, units, strict=True):
        item = shape.image(*size)
        assert item.llm_tokens + (item.boundary_tokens if bounded else 0) == llm, size
        assert item.units == unit, size


def test_class_limits_of_qwen2() -> None:
    config = Given(**MEDIA_PRESETS["qwen2-vl-7b"].config)
    shape = shape_of_config(config, image_processor=Given())
    counts = [391, 1222, 1196, 144, 256, 16, 1230, 1240, 64, 72, 1222, 1240, 1207, 1218]
    assert [shape.image(*size).llm_tokens for size in SIZES] == counts


def test_canvases_of_llama_vision() -> None:
    shape = load_model_shape("llama-3.2-11b-vision")
    grids = [(1, 2), (2, 2), (2, 2), (1, 1), (1, 1), (1, 1), (2, 2), (2, 2), (1, 1), (1, 2)]
    grids += [(2, 2), (2, 2), (1, 4), (4, 1)]
    found = [tuple(side // 560 for side in shape.image(*size).size) for size in SIZES]
    assert found == grids
    assert shape.image(480, 640).keys == 4 * 1601


def test_crops_of_gemma() -> None:
    preset = MEDIA_PRESETS["gemma-3-12b"]
    scan = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    shape = shape_of_config(
        Given(**preset.config), image_processor=Given(**{**preset.image, **scan})
    )
    crops = [2, 2, 2, 0, 0, 0, 2, 2, 0, 0, 2, 2, 4, 4]
    assert [shape.image(*size).units - 1 for size in SIZES] == crops


CLIPS = [
    (8, 720, 1280, 364, 480, 3520),
    (10, 720, 1280, 330, 600, 4400),
    (64, 720, 1280, 256, 3840, 11648),
    (256, 360, 640, 256, 15360, 11648),
    (768, 360, 640, 384, 46080, 10752),
    (5, 480, 640, 420, 420, 900),
    (16, 144, 176, 192, 192, 192),
    (120, 144, 176, 240, 1440, 1440),
]
"""Frames, height, width; tokens by the class's limits, by those and a cap, and as released."""


@pytest.mark.parametrize(("frames", "height", "width", "plain", "capped", "released"), CLIPS)
def test_one_clip_is_three_lengths_by_configuration(
    frames: int, height: int, width: int, plain: int, capped: int, released: int
) -> None:
    config = Given(**MEDIA_PRESETS["qwen3-vl-8b"].config)
    cases = (
        ({"num_frames": frames}, plain),
        ({"num_frames": frames, "cap_pixels_per_frame": True}, capped),
        (
            {"num_frames": frames, "size": {"shortest_edge": 4096, "longest_edge": 25165824}},
            released,
        ),
    )
    for rules, tokens in cases:
        shape = shape_of_config(config, image_processor=Given(), video_processor=Given(**rules))
        assert shape.video(frames, 2.0, height, width).llm_tokens == tokens


@pytest.mark.parametrize(
    ("seconds", "tokens"),
    [(0.5, 12), (1, 25), (1.55, 39), (5, 125), (10, 250), (15.4, 385), (30, 750), (120, 3000)],
)
def test_audio(seconds: float, tokens: int) -> None:
    assert load_model_shape("qwen2.5-omni-7b").audio(seconds).llm_tokens == tokens


@pytest.mark.parametrize(
    ("mel", "tokens"), [(3, 1), (8, 2), (9, 2), (50, 12), (99, 25), (100, 25), (149, 37), (201, 50)]
)
def test_mel_frames(mel: int, tokens: int) -> None:
    assert load_model_shape("qwen2.5-omni-7b").audio(mel / 100).llm_tokens == tokens
