"""The text around media, against the processors of transformers that write it."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm as smolvlm
from transformers.video_utils import VideoMetadata

from dynapar.catalog import READERS, load_model_shape, shape_of_config
from dynapar.families.presets import MEDIA_PRESETS
from dynapar.families.spelling import SPELLINGS, in_words
from dynapar.families.text import TEXT_TYPES
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, VIDEO_KIND, MediaTokens, ModelShape
from tests.families.oracles import load
from tests.families.small_models import Given

PAD = "<pad>"
SCANNED = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def spelled(shape: ModelShape, item: MediaTokens) -> str:
    pieces = SPELLINGS[shape.family.name][item.kind].write(shape, item)
    return "".join(PAD * piece if isinstance(piece, int) else piece for piece in pieces)


def grid(shape: ModelShape, item: MediaTokens) -> tuple[int, int]:
    return item.size[0] // shape.tile_rules.edge, item.size[1] // shape.tile_rules.edge


def internvl(shape: ModelShape, item: MediaTokens) -> str:
    given: Any = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token=PAD, image_seq_length=256
    )
    if item.kind == IMAGE_KIND:
        return InternVLProcessor.replace_image_token(given, {"num_patches": [item.units]}, 0)
    pixels = {"pixel_values_videos": [np.zeros(item.units)]}
    return InternVLProcessor.replace_video_token(given, pixels, 0)


def gemma3(shape: ModelShape, item: MediaTokens) -> str:
    full = f"\n\n<start_of_image>{PAD * 256}<end_of_image>\n\n"
    given: Any = SimpleNamespace(full_image_sequence=full)
    return Gemma3Processor.replace_image_token(given, {"num_crops": [item.units - 1]}, 0)


def llama4(shape: ModelShape, item: MediaTokens) -> str:
    given: Any = SimpleNamespace()
    text = Llama4Processor._prompt_split_image(given, grid(shape, item), 144)
    return str(text).replace("<|patch|>", PAD)


def pixtral(shape: ModelShape, item: MediaTokens) -> str:
    processor = load("pixtral", "processing_pixtral").PixtralProcessor
    given = SimpleNamespace(
        patch_size=shape.vision.patch,
        spatial_merge_size=shape.vision.merge,
        image_token=PAD,
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    return str(processor.replace_image_token(given, {"image_sizes": [item.size]}, 0))


def idefics3(shape: ModelShape, item: MediaTokens) -> str:
    given: Any = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token=PAD,
        image_seq_len=shape.tile_rules.tokens,
    )
    rows, columns = grid(shape, item) if item.units > 1 else (0, 0)
    return Idefics3Processor.replace_image_token(given, {"rows": [[rows]], "cols": [[columns]]}, 0)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("internvl3-8b", internvl),
        ("llama-4-scout", llama4),
        ("pixtral-12b", pixtral),
        ("mistral-small-3.1-24b", pixtral),
        ("smolvlm-500m", idefics3),
        ("idefics3-8b", idefics3),
    ],
)
def test_images_are_spelled_as_the_processor_does(
    name: str, theirs: Callable[[ModelShape, MediaTokens], str]
) -> None:
    shape, draw = load_model_shape(name), random.Random(1)
    units = set()
    for _ in range(60):
        item = shape.image(draw.randint(20, 2000), draw.randint(20, 2000))
        assert spelled(shape, item) == theirs(shape, item)
        units.add(item.grid)
    assert len(units) > 3


def test_crops_of_gemma_are_spelled_as_the_processor_does() -> None:
    preset = MEDIA_PRESETS["gemma-3-4b"]
    image = Given(**{**preset.image, **SCANNED})
    shape = shape_of_config(Given(**preset.config), image_processor=image)
    for size in ((400, 400), (500, 1000), (300, 1200)):
        item = shape.image(*size)
        assert spelled(shape, item) == gemma3(shape, item)
    assert item.units == 5


@pytest.mark.parametrize("frames", [4, 33, 400])
def test_videos_of_qwen3_are_spelled_as_the_processor_does(frames: int) -> None:
    shape = load_model_shape("qwen3-vl-8b")
    item = shape.video(frames, 23.976, 200, 300)
    given: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token=PAD,
    )
    given._calculate_timestamps = types.MethodType(Qwen3VLProcessor._calculate_timestamps, given)
    meta = VideoMetadata(total_num_frames=frames, fps=23.976, frames_indices=list(item.frames))
    made = {"video_grid_thw": np.array([item.grid]), "video_metadata": [meta]}
    assert spelled(shape, item) == Qwen3VLProcessor.replace_video_token(given, made, 0)


def test_videos_of_internvl_are_spelled_as_the_processor_does() -> None:
    shape = load_model_shape("internvl3-8b")
    for frames in (1, 2, 12):
        item = shape.video(frames, 10.0, 100, 100)
        assert spelled(shape, item) == internvl(shape, item)


@pytest.mark.parametrize("frames", [30, 250, 6000])
def test_videos_of_smolvlm_are_spelled_as_the_processor_does(
    frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smolvlm, "num2words", in_words, raising=False)
    shape = load_model_shape("smolvlm-500m")
    item = shape.video(frames, 25.0, 100, 100)
    given: Any = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        image_token=PAD,
        image_seq_len=64,
    )
    meta = VideoMetadata(
        total_num_frames=frames, fps=25.0, duration=frames / 25, frames_indices=list(item.frames)
    )
    made = {"pixel_values": np.zeros((1, item.units)), "video_metadata": [meta]}
    processor: Any = smolvlm.SmolVLMProcessor
    assert spelled(shape, item) == processor.replace_video_token(given, made, 0)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"),
        (12, "twelve"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (999, "nine hundred and ninety-nine"),
        (1001, "one thousand and one"),
        (1234, "one thousand, two hundred and thirty-four"),
    ],
)
def test_numbers_are_said_as_num2words_says_them(number: int, words: str) -> None:
    assert in_words(number) == words


@pytest.mark.parametrize("name", MEDIA_PRESETS)
def test_every_medium_that_a_family_takes_is_spelled(name: str) -> None:
    """With as many placeholders as it has LLM tokens."""
    shape = load_model_shape(name)
    family = shape.family
    takes = {IMAGE_KIND: family.image, VIDEO_KIND: family.video, AUDIO_KIND: family.audio}
    assert set(SPELLINGS[family.name]) == {kind for kind, formula in takes.items() if formula}
    items = [shape.image(500, 900)]
    items += [shape.video(64, 8.0, 300, 400)] if family.video else []
    items += [shape.audio(3.0)] if family.audio else []
    for item in items:
        assert spelled(shape, item).count(PAD) == item.llm_tokens


def test_families_with_media_are_all_spelled() -> None:
    assert set(READERS) - set(SPELLINGS) == set(TEXT_TYPES)
