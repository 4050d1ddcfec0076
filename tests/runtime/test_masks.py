"""What each layer of each model sees is what the model's own forward lets it see."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from dynapar.data.samples import LoadedSample
from dynapar.runtime.adapter import FAMILIES, TEXT_MODELS, Adapter, find_decoder
from dynapar.runtime.masks import MaskClass, mask_of
from tests.attention.oracle import dense_mask
from tests.runtime.masked_models import MODELS, WINDOW, make_model, make_samples

RECORDER = "mask_recorder"


def own_masks(model: PreTrainedModel, sample: LoadedSample) -> dict[int, Tensor]:
    """By number of the layer, (L, L) bool: the mask that the model itself gives its attention."""
    found: dict[int, Tensor] = {}

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        layer: Any = module.layer_idx
        found[layer] = mask[0, 0] == 0
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register(RECORDER, record)
    AttentionMaskInterface.register(RECORDER, eager_mask)
    adapter = Adapter(model)
    adapter.use_attention(RECORDER)
    inputs = {} if adapter.family is None else adapter.family.whole_inputs(sample)
    with torch.no_grad():
        model(input_ids=sample.input_ids[None], use_cache=False, **inputs)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_masks_are_those_of_the_models_own_forward(kind: str) -> None:
    model = make_model(kind)
    adapter = Adapter(model)
    layers: Any = find_decoder(model).layers
    for sample in make_samples(kind):
        masks = own_masks(model, sample)
        assert sorted(masks) == list(range(len(layers)))
        for number, want in masks.items():
            bands = adapter.bands(sample, mask_of(layers[number].self_attn))
            got = dense_mask([len(sample.input_ids)], [bands])
            assert torch.equal(got, want), (sample.id, number)


def test_every_model_that_is_accepted_is_compared() -> None:
    elsewhere = {"qwen2_vl", "qwen2_5_vl"}  # in test_executor
    assert {*FAMILIES, *TEXT_MODELS} - elsewhere == set(MODELS)


def test_layers_that_see_alike_share_a_class() -> None:
    classes = {kind: Adapter(make_model(kind)).masks for kind in MODELS}
    window, full = MaskClass(window=WINDOW), MaskClass()
    assert classes["llama"] == classes["qwen3"] == (full,)
    assert classes["mistral"] == classes["mixtral"] == (window,)
    assert classes["gemma2"] == classes["gpt_oss"] == classes["gemma3"] == (window, full)
    assert classes["llama4_text"] == (MaskClass(chunk=11), full)


def test_an_older_release_lets_images_see_beyond_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("gemma3")
    adapter, sample = Adapter(model), make_samples("gemma3")[0]
    now = adapter.bands(sample, MaskClass(window=WINDOW))
    module = sys.modules[type(model.model).__module__]
    monkeypatch.delattr(module, "create_masks_for_vision_model")
    then = adapter.bands(sample, MaskClass(window=WINDOW))
    length = len(sample.input_ids)
    more = dense_mask([length], [then]).sum() - dense_mask([length], [now]).sum()
    # Images of 9 and of 2 * 9 tokens: pairs of one image, 7 or more apart.
    assert more == sum(range(1, 9 - WINDOW + 1)) + sum(range(1, 18 - WINDOW + 1))
