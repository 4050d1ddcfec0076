"""A small Qwen2.5-VL and made-up samples for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from dynapar.data.samples import (
    IGNORE,
    IMAGE_KIND,
    TEXT_KIND,
    VIDEO_KIND,
    LoadedSample,
    MediaShape,
)

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 310, 311, 312, 313


def small_model(dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """The same on every rank, and no parameter at a value that could hide an error."""
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": 320,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 4096,
                "bos_token_id": None,
                "eos_token_id": None,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [2, 3, 3],
                },
            },
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "depth": 3,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                "tokens_per_second": 2,
            },
            image_token_id=IMAGE_ID,
            video_token_id=VIDEO_ID,
            vision_start_token_id=START_ID,
            vision_end_token_id=END_ID,
            **config,
        )
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    nn.Module.to(model, dtype)
    model.train()
    return model


Recipe = Sequence[int | tuple[int, int, int]]
"""A sample: numbers of text tokens, and grids of media; a grid of one group is an image."""


def make_sample(
    model: PreTrainedModel, recipe: Recipe, *, seed: int, masked: bool = False
) -> LoadedSample:
    """A sample with all its encoder units at hand; its positions come from the model itself."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    media: list[MediaShape] = []
    units: dict[int, Tensor] = {}
    for part in recipe:
        if isinstance(part, int):
            ids += torch.randint(0, 300, (part,), generator=generator).tolist()
            continue
        groups, rows, columns = part
        kind = IMAGE_KIND if groups == 1 else VIDEO_KIND
        tokens = groups * rows * columns // 4
        media.append(MediaShape(kind, part, tokens, groups, 0.0 if groups == 1 else 1.5))
        for _ in range(groups):
            units[len(units)] = torch.randn(rows * columns, 96, generator=generator)
        ids += [START_ID, *[IMAGE_ID if groups == 1 else VIDEO_ID] * tokens, END_ID]
    input_ids = torch.tensor(ids)
    kinds = torch.full_like(input_ids, TEXT_KIND)
    kinds[input_ids == IMAGE_ID], kinds[input_ids == VIDEO_ID] = IMAGE_KIND, VIDEO_KIND
    labels = input_ids.masked_fill(input_ids >= IMAGE_ID, IGNORE)
    if masked:
        labels[:] = IGNORE
    return LoadedSample(
        id=f"s{seed}",
        input_ids=input_ids,
        targets=functional.pad(labels[1:], (0, 1), value=IGNORE),
        kinds=kinds,
        positions=_positions(model, input_ids, kinds, media),
        media=tuple(media),
        units=units,
    )


def _positions(
    model: PreTrainedModel, input_ids: Tensor, kinds: Tensor, media: Sequence[MediaShape]
) -> Tensor:
    positions: Tensor = model.model.get_rope_index(
        input_ids[None], mm_token_type_ids=kinds[None], **_grids(media)
    )[0]
    return positions[:, 0]


def _grids(media: Sequence[MediaShape]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if images := [item.grid for item in media if item.kind == IMAGE_KIND]:
        found["image_grid_thw"] = torch.tensor(images)
    if videos := [item for item in media if item.kind == VIDEO_KIND]:
        found["video_grid_thw"] = torch.tensor([item.grid for item in videos])
        found["second_per_grid_ts"] = torch.tensor([item.seconds_per_group for item in videos])
    return found


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def worst_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest |got - want| / |want| of a parameter, and its name.

    Some gradients are zero in exact arithmetic (biases of keys); norms below a thousandth of the
    largest one count as that.
    """
    assert got.keys() == want.keys()
    least = 1e-3 * max(float(w.norm()) for w in want.values())
    return max(
        (float((got[n] - w).norm()) / max(float(w.norm()), least), n) for n, w in want.items()
    )
