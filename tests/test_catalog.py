from __future__ import annotations

import importlib.util
import json
import random
import sys
import types
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.video_utils import VideoMetadata

from dynapar.catalog import PRESETS, load_model_shape
from dynapar.errors import ModelError, SampleError

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "tokens_per_second": 2,
    },
}


def write_model(folder: Path, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    whole = {"config": CONFIG, "preprocessor_config": {}} | files
    for name, value in whole.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def random_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    sizes = [(int(2 ** draw.uniform(2, 12)), int(2 ** draw.uniform(2, 12))) for _ in range(count)]
    return [size for size in sizes if max(size) <= 200 * min(size)]


def video_processor_module() -> ModuleType:
    """transformers' video processor without torchvision, which it needs for resizing alone."""
    path = Path(transformers.__file__).parent / "models/qwen2_vl/video_processing_qwen2_vl.py"
    name = "transformers.models.qwen2_vl.video_for_tests"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    parts = ["torchvision", "transforms", "v2", "functional"]
    names = [".".join(parts[: n + 1]) for n in range(4)]
    before = {name: sys.modules.get(name) for name in names}
    stubs = [types.ModuleType(name) for name in names]
    for parent, child, part in zip(stubs, stubs[1:], parts[1:], strict=False):
        setattr(parent, part, child)
    sys.modules.update(zip(names, stubs, strict=True))
    sys.modules[name] = module  # transformers looks its source up
    try:
        spec.loader.exec_module(module)
    finally:
        for name, stub in before.items():
            if stub is None:
                del sys.modules[name]
            else:
                sys.modules[name] = stub
    return module


@pytest.mark.parametrize(("least", "most"), [(3136, 12845056), (3136, 1003520), (100352, 602112)])
def test_sizes_are_those_of_transformers(tmp_path: Path, least: int, most: int) -> None:
    rules = {"min_pixels": least, "max_pixels": most}
    shape = load_model_shape(str(write_model(tmp_path / "m", preprocessor_config=rules)))
    for height, width in random_sizes(600, seed=least):
        ours = shape.image(height, width).size
        theirs = smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most)
        assert ours == theirs, (height, width)


def test_image_tokens_are_those_of_the_processor(tmp_path: Path) -> None:
    shape = load_model_shape(str(write_model(tmp_path / "m")))
    processor = Qwen2VLImageProcessorPil()
    for height, width in random_sizes(300, seed=3):
        ours = shape.image(height, width)
        patches = processor.get_number_of_image_patches(height, width)
        assert (ours.unit_tokens, ours.llm_tokens, ours.units) == (patches, patches // 4, 1)


@pytest.mark.parametrize("fps", [None, 2.0, 0.7])
@pytest.mark.parametrize("most", [8, 48, 768])
def test_frames_are_those_of_the_processor(tmp_path: Path, fps: float | None, most: int) -> None:
    processor: Any = video_processor_module().Qwen2VLVideoProcessor
    draw = random.Random(5)
    rules: dict[str, object] = {"fps": fps, "max_frames": most}
    for number in range(150):
        total, rate = draw.randint(2, 4000), draw.choice([8.0, 24.0, 25.0, 30000 / 1001, 60.0])
        if number % 30 == 0:
            # A fixed number of frames is a setting; transformers refuses more than there are.
            rules["num_frames"] = draw.randint(2, 40) if fps is None else None
            folder = write_model(tmp_path / "m", video_preprocessor_config=rules)
            shape = load_model_shape(str(folder))
        count = cast("int | None", rules["num_frames"])
        total = max(total, (count or 0) + 1)
        settings = SimpleNamespace(
            num_frames=count, fps=fps, temporal_patch_size=2, min_frames=4, max_frames=most
        )
        meta = VideoMetadata(total_num_frames=total, fps=rate)
        theirs = processor.sample_frames(settings, meta).tolist()
        assert list(shape.video(total, rate, 56, 56).frames) == theirs, (total, rate)


@pytest.mark.parametrize("capped", [False, True])
def test_video_tokens_are_those_of_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capped: bool
) -> None:
    rules = {"size": {"shortest_edge": 3136, "longest_edge": 602112}}
    rules |= {"cap_pixels_per_frame": capped, "max_video_tokens": 6000}  # type: ignore[dict-item]
    folder = write_model(tmp_path / "m", video_preprocessor_config=rules)
    shape = load_model_shape(str(folder))
    processor: Any = video_processor_module().Qwen2VLVideoProcessor
    monkeypatch.setattr(processor.__mro__[1], "resize", lambda self, **given: given["size"])
    draw = random.Random(9)
    for height, width in random_sizes(200, seed=11):
        total, rate = draw.randint(1, 2000), draw.choice([24.0, 25.0, 30000 / 1001])
        ours = shape.video(total, rate, height, width)
        meta = VideoMetadata(total_num_frames=total, fps=rate, frames_indices=list(ours.frames))
        assert ours.seconds_per_group == 2 / meta.sampled_fps
        size = SimpleNamespace(shortest_edge=3136, longest_edge=602112)
        resized = _resized_by(processor, size, (len(ours.frames), height, width), capped)
        assert ours.size == resized
        assert ours.grid == (-(-len(ours.frames) // 2), resized[0] // 14, resized[1] // 14)
        assert ours.llm_tokens == ours.units * ours.unit_tokens // 4


def _resized_by(
    processor: Any, size: SimpleNamespace, video: tuple[int, int, int], capped: bool
) -> tuple[int, int]:
    """The size that transformers' `resize` hands on to the function that resizes pixels."""
    frames, height, width = video
    pixels = SimpleNamespace(shape=(1, frames, 3, height, width))
    probe = object.__new__(processor)
    probe.max_video_tokens = 6000
    asked = probe.resize(pixels, size, None, 28, 2, capped)
    return asked.height, asked.width


def test_sizes_of_the_released_models() -> None:
    shape = load_model_shape("Qwen/Qwen2.5-VL-7B-Instruct")
    assert (shape.text.layers, shape.text.width, shape.text.head_width) == (28, 3584, 128)
    assert (shape.vision.width, shape.vision.window, shape.vision.full_layers[0]) == (1280, 8, 7)
    assert shape.image(1411, 1411).llm_tokens == 2500
    assert shape.image(427, 640).llm_tokens == 345
    assert sum(shape.video(132, 25.0, 720, 1280).grid[:1]) == 5
    assert shape.video(132, 25.0, 720, 1280).llm_tokens == 5980
    assert {PRESETS[name](name).text.tied for name in PRESETS} == {True, False}


def test_flat_and_nested_configurations_agree(tmp_path: Path) -> None:
    nested = load_model_shape(str(write_model(tmp_path / "m")))
    flat = {k: v for k, v in CONFIG.items() if k != "text_config"}
    flat |= CONFIG["text_config"]
    assert load_model_shape(str(write_model(tmp_path / "m", config=flat))) == nested


def test_configuration_of_transformers_is_read(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    config = transformers.Qwen2_5_VLConfig(
        text_config=CONFIG["text_config"], vision_config=CONFIG["vision_config"]
    )
    config.save_pretrained(tmp_path / "m")
    Qwen2VLImageProcessorPil(max_pixels=50176).save_pretrained(tmp_path / "m")
    shape = load_model_shape(str(tmp_path / "m"))
    assert (shape.text.kv_heads, shape.vision.tokens_per_second) == (2, 2)
    assert (shape.image_rules.min_pixels, shape.image_rules.max_pixels) == (3136, 50176)


def test_video_without_settings_of_its_own_uses_the_images(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "m", preprocessor_config={"max_pixels": 6272, "min_pixels": 784}
    )
    shape = load_model_shape(str(folder))
    assert (shape.video_rules.max_pixels, shape.video_rules.min_pixels) == (6272, 784)
    write_model(folder, video_preprocessor_config={})
    assert load_model_shape(str(folder)).video_rules.max_pixels == 768 * 28 * 28


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2.5-vl-8b", r"no model 'qwen2\.5-vl-8b'.*did you mean 'qwen2\.5-vl-7b'"),
        (
            "qwen2.5-vl-8b",
            rf"or one of {len(PRESETS)} presets, such as (qwen2\.5-vl-\d+b(, |\.)){{3}}",
        ),
        (
            "zzz",
            rf"no such folder, .*name\. Give a model folder or one of {len(PRESETS)} presets, s",
        ),
    ],
)
def test_unknown_names_get_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model_shape(name)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"preprocessor_config": None}, r"preprocessor_config\.json does not exist"),
        ({"config": {"model_type": "qwen2_5vl"}}, r"model_type 'qwen2_5vl'.*mean 'qwen2_5_vl'"),
        (
            {"config": CONFIG | {"vision_config": {"depth": "many"}}},
            r"vision_config: depth is 'many'; expected a number",
        ),
        ({"preprocessor_config": {"image_mean": [1.0]}}, r"image_mean \(1\.0,\)"),
        ({"preprocessor_config": {"max_pixels": 0}}, r"max_pixels is 0.*1 or more"),
    ],
)
def test_broken_folders_are_explained(tmp_path: Path, files: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model_shape(str(write_model(tmp_path / "m", **files)))


@pytest.mark.parametrize(("height", "width"), [(0, 10), (10, 2010)])
def test_impossible_pictures_are_refused(height: int, width: int) -> None:
    with pytest.raises(SampleError, match=f"{height} x {width} pixels"):
        load_model_shape("qwen2.5-vl-7b").image(height, width)


def test_video_without_frames_is_refused() -> None:
    with pytest.raises(SampleError, match=r"0 frames at 24\.0"):
        load_model_shape("qwen2.5-vl-7b").video(0, 24.0, 10, 10)


def test_one_frame_fills_a_group() -> None:
    one = load_model_shape("qwen2.5-vl-7b").video(1, 24.0, 56, 56)
    assert (one.frames, one.grid, one.llm_tokens) == ((0,), (1, 4, 4), 4)
