from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from dynapar.catalog import MediaTokens, load_model_shape
from dynapar.data.positions import mrope_positions

SHAPE = load_model_shape("qwen2.5-vl-7b")


@pytest.fixture(scope="module")
def model() -> Qwen2_5_VLModel:
    with torch.device("meta"):
        return Qwen2_5_VLModel(
            Qwen2_5_VLConfig(
                text_config={
                    "hidden_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 1,
                    "num_key_value_heads": 1,
                    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
                },
                vision_config={"depth": 1, "hidden_size": 16, "tokens_per_second": 2},
            )
        )


def random_media(draw: random.Random) -> list[MediaTokens]:
    media = []
    for _ in range(draw.randint(0, 5)):
        size = draw.randint(40, 400), draw.randint(40, 400)
        if draw.random() < 0.5:
            media.append(SHAPE.image(*size))
        else:
            rate = draw.choice([8.0, 24.0, 25.0, 30000 / 1001])
            media.append(SHAPE.video(draw.randint(1, 200), rate, *size))
    return media


@pytest.mark.parametrize("seed", range(8))
def test_positions_are_those_of_transformers(model: Any, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        media = random_media(draw)
        kinds = [0] * draw.randint(1, 9)
        for item in media:
            kinds += [item.kind] * item.llm_tokens + [0] * draw.randint(1, 9)
        ours = mrope_positions(np.array(kinds), media, SHAPE.vision)
        grids = [
            torch.tensor([m.grid for m in media if m.kind == kind]) if kind in kinds else None
            for kind in (1, 2)
        ]
        seconds = torch.tensor([m.seconds_per_group for m in media if m.kind == 2])
        theirs, _ = model.get_rope_index(
            torch.zeros(1, len(kinds), dtype=torch.long),
            mm_token_type_ids=torch.tensor([kinds]),
            image_grid_thw=grids[0],
            video_grid_thw=grids[1],
            second_per_grid_ts=seconds if grids[1] is not None else None,
        )
        np.testing.assert_array_equal(ours, theirs[:, 0].numpy())


def test_text_after_a_long_video_starts_below_its_last_time() -> None:
    item = SHAPE.video(72, 24.0, 56, 56)._replace(grid=(3, 4, 4), seconds_per_group=1.5)
    item = item._replace(llm_tokens=12)
    found = mrope_positions(np.array([0, 0, *[2] * 12, 0, 0]), [item], SHAPE.vision)
    assert found[0].tolist() == [0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 8, 8, 8, 8, 4, 5]
    assert found[1].tolist() == [0, 1, *[2, 2, 3, 3] * 3, 4, 5]
    assert found[2].tolist() == [0, 1, *[2, 3, 2, 3] * 3, 4, 5]


def test_adjacent_pictures_need_no_text_between() -> None:
    item = SHAPE.image(56, 84)
    found = mrope_positions(np.array([1] * 12), [item, item], SHAPE.vision)
    assert found[0].tolist() == [0] * 6 + [3] * 6
    assert found[2].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
