from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
    _get_feat_extract_output_lengths,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor
from transformers.video_utils import VideoMetadata

from dynapar.catalog import load_model_shape, shape_of_config
from dynapar.errors import SampleError
from dynapar.families.presets import MEDIA_PRESETS
from dynapar.shapes import MediaTokens
from tests.families.oracles import Count, load, mllama_canvas, oracle
from tests.families.small_models import Given


def random_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """Sizes of all magnitudes, and every fourth one of an exact and common shape."""
    draw = random.Random(seed)
    sizes = []
    for number in range(count):
        size = int(2 ** draw.uniform(0, 13)), int(2 ** draw.uniform(0, 13))
        if number % 4 == 0:
            unit = draw.randint(1, 300)
            high, wide = draw.choice([(1, 1), (3, 4), (4, 3), (9, 16), (16, 9), (2, 3), (1, 2)])
            size = unit * high, unit * wide
        sizes.append(size)
    return [*sizes, (1, 1), (1, 199), (199, 1), (1, 201), (201, 1), (448, 448), (336, 336)]


def ours(item: MediaTokens) -> Count:
    return Count(item.llm_tokens, item.boundary_tokens, item.units, item.unit_tokens)


@pytest.mark.parametrize("name", MEDIA_PRESETS)
def test_images_become_what_the_processor_makes_of_them(name: str) -> None:
    shape, count = load_model_shape(name), oracle(MEDIA_PRESETS[name])
    refused = 0
    sizes = random_sizes(2000, seed=len(name))
    for height, width in sizes:
        try:
            theirs = count(height, width)
        except ValueError:
            refused += 1
            with pytest.raises(SampleError, match=f"{height} x {width} pixels"):
                shape.image(height, width)
        else:
            assert ours(shape.image(height, width)) == theirs, (height, width)
    assert refused < len(sizes) / 3


def test_gemma_crops_are_those_of_pan_and_scan() -> None:
    preset = MEDIA_PRESETS["gemma-3-4b"]
    scan = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    count = oracle(preset._replace(image={**preset.image, **scan}))
    shape = shape_of_config(
        Given(**preset.config), image_processor=Given(**{**preset.image, **scan})
    )
    crops = set()
    for height, width in random_sizes(4000, seed=1):
        item, theirs = shape.image(height, width), count(height, width)
        assert (item.llm_tokens, item.units) == (theirs.llm_tokens, theirs.units), (height, width)
        crops.add(item.units)
    assert crops == {1, 3, 4, 5}


def test_canvases_of_llama_vision_are_those_of_the_processor() -> None:
    shape = load_model_shape("llama-3.2-11b-vision")
    for height, width in random_sizes(4000, seed=2):
        assert shape.image(height, width).size == mllama_canvas(height, width), (height, width)


def test_llava_tiles_an_image_only_when_it_is_alone() -> None:
    shape = load_model_shape("llava-onevision-7b")
    given = {"batch_num_images": [2]}
    replacer: Any = SimpleNamespace(
        num_image_tokens=729, image_token="i", vision_feature_select_strategy="full"
    )
    text = LlavaOnevisionProcessor.replace_image_token(replacer, given, 1)
    item = shape.image(480, 640, images=2)
    assert (item.llm_tokens, item.units, item.unit_tokens) == (len(text), 1, 729)


VIDEO_SETTINGS = [
    ({"shortest_edge": 131072, "longest_edge": 786432}, None),
    ({"shortest_edge": 131072, "longest_edge": 786432}, True),
    ({"shortest_edge": 4096, "longest_edge": 25165824}, None),
]


@pytest.mark.parametrize(("size", "capped"), VIDEO_SETTINGS)
def test_videos_of_qwen3_are_those_of_the_processor(
    size: dict[str, int], capped: bool | None
) -> None:
    module = load("qwen3_vl", "video_processing_qwen3_vl")
    processor: Any = module.Qwen3VLVideoProcessor(size=size, cap_pixels_per_frame=capped)
    preset = MEDIA_PRESETS["qwen3-vl-8b"]
    shape = shape_of_config(
        Given(**preset.config),
        image_processor=Given(**preset.image),
        video_processor=Given(size=size, cap_pixels_per_frame=capped),
    )
    draw, checked = random.Random(5), 0
    for height, width in random_sizes(1500, seed=3):
        frames = draw.choice([draw.randint(2, 30), draw.randint(2, 4000)])
        fps = draw.choice([8.0, 24.0, 25.0, 30000 / 1001, 60.0])
        meta = VideoMetadata(total_num_frames=frames, fps=fps)
        used = processor.sample_frames(meta).tolist()
        try:
            patches = processor.get_num_of_video_patches(len(used), height, width)
        except ValueError:
            with pytest.raises(SampleError):
                shape.video(frames, fps, height, width)
            continue
        item = shape.video(frames, fps, height, width)
        assert list(item.frames) == used, (frames, fps)
        assert item.units * item.unit_tokens == patches, (frames, fps, height, width)
        assert item.llm_tokens == patches // 4
        replacer: Any = SimpleNamespace()
        times = Qwen3VLProcessor._calculate_timestamps(replacer, used, fps, 2)
        # The Qwen tokenizer takes "<", each character of the time, " seconds" and ">" alone.
        # Processors of transformers 5.24 leave the template's own start and end around it all.
        text = 2 + sum(len(f"<{time:.1f}>") + 1 + 2 for time in times)
        assert item.boundary_tokens == text
        checked += 1
    assert checked > 1000


def test_one_frame_is_no_video_of_qwen3() -> None:
    with pytest.raises(SampleError, match="1 frames, of which 1 are used; expected 2 or more"):
        load_model_shape("qwen3-vl-8b").video(1, 24.0, 64, 64)


@pytest.mark.parametrize("count", [None, 8, 32])
def test_videos_of_internvl_are_those_of_the_processor(count: int | None) -> None:
    cls: Any = load("internvl", "video_processing_internvl").InternVLVideoProcessor
    preset = MEDIA_PRESETS["internvl3-8b"]
    rules = {"num_frames": count, "fps": 2.0}
    shape = shape_of_config(
        Given(**preset.config),
        image_processor=Given(**preset.image),
        video_processor=Given(**rules),
    )
    processor: Any = SimpleNamespace(num_frames=count, fps=2.0, initial_shift=True)
    replacer: Any = SimpleNamespace(
        start_image_token="<a>", image_token="<i>", end_image_token="<b>", image_seq_length=256
    )
    draw = random.Random(7)
    for _ in range(1500):
        frames, fps = draw.randint(1, 3000), draw.choice([24.0, 25.0, 30000 / 1001])
        meta = VideoMetadata(total_num_frames=frames, fps=fps)
        wanted = count if count is not None else int(frames / fps * 2.0)
        if not 1 <= wanted <= frames:
            with pytest.raises(SampleError, match=f"of which {wanted} are to be used"):
                shape.video(frames, fps, 100, 100)
            continue
        used = cls.sample_frames(processor, meta, fps=2.0).tolist()
        item = shape.video(frames, fps, 100, 100)
        assert list(item.frames) == used, (frames, fps)
        pixels = {"pixel_values_videos": [SimpleNamespace(shape=(len(used),))]}
        text = InternVLProcessor.replace_video_token(replacer, pixels, 0)
        assert (item.llm_tokens, item.units) == (text.count("<i>"), len(used))
        plain = text.replace("<i>", "").replace("<a>", ".").replace("<b>", ".")
        # "Frame" is one token, every other character another.
        assert item.boundary_tokens == len(plain) - 4 * len(used)


def test_videos_of_llava_are_those_of_the_processor() -> None:
    shape = load_model_shape("llava-onevision-7b")
    replacer: Any = SimpleNamespace(num_image_tokens=729, video_token="v")
    for frames in (1, 2, 32, 133):
        given = {"pixel_values_videos": [np.zeros(frames)]}
        text = LlavaOnevisionProcessor.replace_video_token(replacer, given, 0)
        item = shape.video(frames, 24.0, 480, 640)
        assert (item.llm_tokens, item.units, item.unit_tokens) == (len(text), frames, 729)


def test_frames_of_smolvlm_are_those_of_the_processor() -> None:
    cls: Any = load("smolvlm", "video_processing_smolvlm").SmolVLMVideoProcessor
    shape = load_model_shape("smolvlm-500m")
    processor: Any = SimpleNamespace(num_frames=64, fps=1)
    draw = random.Random(9)
    for _ in range(2000):
        frames, fps = draw.randint(1, 6000), draw.choice([8.0, 24.0, 25.0, 30000 / 1001])
        meta = VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)
        used = cls.sample_frames(processor, meta).tolist()
        item = shape.video(frames, fps, 480, 640)
        assert list(item.frames) == used, (frames, fps)
        assert (item.llm_tokens, item.unit_tokens) == (64 * len(used), 1024)


def test_audio_becomes_what_the_extractor_and_the_encoder_make_of_it() -> None:
    shape = load_model_shape("qwen2.5-omni-7b")
    extractor: Any = WhisperFeatureExtractor(feature_size=16, chunk_length=300)
    draw = random.Random(11)
    for number in range(12):
        seconds = draw.uniform(0.05, 320) if number % 3 == 0 else draw.uniform(0.05, 5)
        sound = np.zeros(round(seconds * 16000), np.float32)
        made = extractor(
            sound, sampling_rate=16000, padding="max_length", return_attention_mask=True
        )
        mel = int(made["attention_mask"].sum())
        item = shape.audio(seconds)
        assert item.size[1] == mel, seconds
        assert item.llm_tokens == _get_feat_extract_output_lengths(mel), seconds


def test_audio_tokens_are_those_of_every_length() -> None:
    shape = load_model_shape("qwen2.5-omni-7b")
    for mel in range(3, 5000):
        item = shape.audio(mel / 100)
        assert item.size[1] == mel
        assert item.llm_tokens == _get_feat_extract_output_lengths(mel)
        assert item.unit_tokens == (mel - 1) // 2 + 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_audio_without_length_is_refused(seconds: float) -> None:
    with pytest.raises(SampleError, match=r"an audio clip lasts \S+ seconds; expected a positive"):
        load_model_shape("qwen2.5-omni-7b").audio(seconds)


def test_audio_of_two_mel_frames_is_refused() -> None:
    with pytest.raises(SampleError, match=r"2 mel frames; .* expected 3 or more"):
        load_model_shape("qwen2.5-omni-7b").audio(0.02)


@pytest.mark.parametrize(
    ("name", "medium", "said"),
    [
        ("llama-3.1-8b", "image", "takes no images; expected text alone"),
        ("gemma-3-4b", "video", "takes no videos; expected images"),
        ("qwen2.5-vl-7b", "audio", "takes no audio; expected images or videos"),
    ],
)
def test_media_that_a_model_does_not_take_are_refused(name: str, medium: str, said: str) -> None:
    shape = load_model_shape(name)
    calls = {
        "image": lambda: shape.image(10, 10),
        "video": lambda: shape.video(10, 1.0, 10, 10),
        "audio": lambda: shape.audio(1.0),
    }
    with pytest.raises(SampleError, match=said):
        calls[medium]()


@pytest.mark.parametrize("name", MEDIA_PRESETS)
@pytest.mark.parametrize("size", [(0, 10), (10, 0), (-1, 10)])
def test_media_without_size_are_refused(name: str, size: tuple[int, int]) -> None:
    with pytest.raises(SampleError, match=f"{size[0]} x {size[1]} pixels"):
        load_model_shape(name).image(*size)
