from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dynapar.catalog import load_model_shape
from dynapar.data.media import decode_image
from dynapar.data.patches import unit_patches
from dynapar.data.records import MediaFile
from tests.data.conftest import Demo
from tests.data.small import noise
from tests.test_catalog import video_processor_module


def test_patches_of_all_demo_pictures_are_those_of_the_processor(demo: Demo) -> None:
    processor = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056)
    shape = demo.shape
    for path in sorted((demo.folder / "data" / "media").glob("*_*-*.*")) + sorted(
        (demo.folder / "data" / "media").glob("sk*.png")
    ):
        with Image.open(path) as image:
            theirs = processor(images=image, return_tensors="np")
        pixels = decode_image(MediaFile(1, "", path, 0, -1))
        item = shape.image(*pixels.shape[:2])
        ours = unit_patches([pixels], size=item.size, rules=shape.image_rules, vision=shape.vision)
        assert item.grid == tuple(theirs["image_grid_thw"][0])
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, theirs["pixel_values"], err_msg=path.name)


@pytest.mark.parametrize("count", [1, 2])
def test_groups_of_frames_are_cut_as_the_video_processor_does(count: int) -> None:
    shape = load_model_shape("qwen2.5-vl-7b")
    frames = [np.asarray(noise(56, 84, seed)) for seed in range(count)]
    ours = unit_patches(frames, size=(56, 84), rules=shape.video_rules, vision=shape.vision)
    rules = shape.video_rules
    scaled = torch.tensor(np.stack(frames)).permute(0, 3, 1, 2).float() * rules.scale
    mean, std = (torch.tensor(x)[:, None, None] for x in (rules.mean, rules.std))
    processor: Any = video_processor_module().Qwen2VLVideoProcessor
    theirs, *grid = processor.patchify(SimpleNamespace(), ((scaled - mean) / std)[None], 14, 2, 2)
    assert grid == [1, 4, 6]
    torch.testing.assert_close(torch.from_numpy(ours), theirs[0], rtol=0, atol=1e-6)


def test_resizing_is_pillows(tmp_path: Path) -> None:
    shape = load_model_shape("qwen2.5-vl-7b")
    pixels = np.asarray(noise(100, 150))
    small = np.asarray(Image.fromarray(pixels).resize((84, 56), Image.Resampling.BICUBIC))
    a, b = (
        unit_patches([p], size=(56, 84), rules=shape.image_rules, vision=shape.vision)
        for p in (pixels, small)
    )
    np.testing.assert_array_equal(a, b)
