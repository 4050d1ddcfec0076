"""What dynapar cannot run exactly is refused by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PreTrainedModel,
)

from dynapar.attention.trees import tree
from dynapar.errors import ModelError
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.attention_interface import dynapar_attention
from dynapar.runtime.layout import Unit
from dynapar.runtime.masks import MaskClass
from tests.models import small_model
from tests.runtime.masked_models import PATCH, SIDE, make_model, make_sample

TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def text_model(**config: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**TEXT, **config))


class Layer(nn.Module):
    """Named in messages."""

    config: Any
    layer_idx: int


QUERY = torch.zeros(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Layer was called without a plan; call the model through"),
        (
            {"attention_mask": torch.ones(1, 3), "dynapar_plan": object()},
            r"Layer got an attention mask of shape \(1, 3\); expected None",
        ),
        ({"dropout": 0.1, "dynapar_plan": object()}, "attention dropout 0.1; expected 0"),
        ({"position_bias": 1, "dynapar_plan": object()}, "Layer passes position_bias to attention"),
    ],
)
def test_attention_refuses_what_the_plan_does_not_do(given: dict[str, Any], message: str) -> None:
    arguments = {"attention_mask": None, **given}
    with pytest.raises(ModelError, match=message):
        dynapar_attention(Layer(), QUERY, QUERY, QUERY, **arguments)


def test_a_model_called_without_a_plan_says_what_to_do() -> None:
    model = text_model()
    Adapter(model)
    with pytest.raises(ModelError, match="LlamaAttention was called without a plan"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_a_padding_mask_is_refused_not_ignored() -> None:
    """Transformers hands no mask to an attention function that it does not know."""
    model = text_model()
    Adapter(model)
    with pytest.raises(ModelError):
        model(
            input_ids=torch.tensor([[1, 2]]),
            attention_mask=torch.tensor([[0, 1]]),
            use_cache=False,
        )


def test_an_unknown_family_with_media_is_named() -> None:
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
        )
    )
    with pytest.raises(
        ModelError, match="model type 'llava' cannot be run by this version; expected one of"
    ):
        Adapter(model)


def test_a_text_model_that_has_not_been_compared_is_named() -> None:
    """It scales its logits, for one."""
    model = CohereForCausalLM(CohereConfig(**TEXT))
    with pytest.raises(
        ModelError, match=r"model type 'cohere' cannot be run .* whose masks and lo"
    ):
        Adapter(model)


def test_layers_that_see_the_future_are_refused() -> None:
    config = Gemma3TextConfig(**TEXT, head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="layer 0, Gemma3Attention, attends to later tokens; exp"):
        Adapter(Gemma3ForCausalLM(config))


def test_unknown_layers_are_named() -> None:
    model = text_model()
    model.config.layer_types = ["linear_attention"]
    with pytest.raises(ModelError, match=r"layer 0 of model type 'llama' is of type 'linear_att"):
        Adapter(model)
    del model.model.layers[0].self_attn
    with pytest.raises(ModelError, match=r"layer 0, LlamaDecoderLayer, has no self_attn; expected"):
        Adapter(model)


def test_losses_of_routers_are_refused() -> None:
    model = text_model()
    model.config.output_router_logits = True
    with pytest.raises(ModelError, match="configuration has output_router_logits true; expected f"):
        Adapter(model)


def test_gemmas_patches_are_cut_as_its_encoder_cuts_pixels() -> None:
    model = make_model("gemma3")
    tower = model.model.vision_tower
    pixels = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    cut = torch.nn.functional.unfold(pixels, PATCH, stride=PATCH)[0].T
    adapter = Adapter(model)
    with torch.no_grad():
        want = model.model.get_image_features(pixels, return_dict=True).pooler_output[0]
        got = adapter.encode([Unit((1, SIDE // PATCH, SIDE // PATCH), cut)])
    assert torch.equal(got, want)
    assert adapter.encoder_is_trained
    tower.requires_grad_(False)
    assert Adapter(model).encoder_is_trained, "the projector is"
    model.model.multi_modal_projector.requires_grad_(False)
    assert not Adapter(model).encoder_is_trained


def test_trees_are_refused_where_layers_attend_in_chunks() -> None:
    sample = replace(make_sample(0, [9]), tree=((5, -1), (4, 0)))
    adapter = Adapter(make_model("llama4_text"))
    assert adapter.bands(sample, MaskClass()) == tree([5, 4], [-1, 0])
    with pytest.raises(
        ModelError, match="'s0' is a tree, and this model's layers attend by chunks"
    ):
        adapter.bands(sample, MaskClass(chunk=11))


def in_layer(window: int | None, plans: tuple[MaskClass, ...], **given: Any) -> None:
    """Call attention from a layer whose configuration says `window`."""
    layer = Layer()
    layer.config = MistralConfig(sliding_window=window)
    layer.layer_idx = 3
    shard = SimpleNamespace(tokens=3)
    bound: Any = SimpleNamespace(plans=dict.fromkeys(plans), shard=shard)
    dynapar_attention(layer, QUERY, QUERY, QUERY, None, dynapar_plan=bound, **given)


def test_a_window_that_is_passed_but_not_configured_is_refused() -> None:
    with pytest.raises(ModelError, match="Layer of layer 3 passes another sliding window than its"):
        in_layer(None, (MaskClass(),), sliding_window=8)


def test_a_class_that_the_plan_lacks_is_named() -> None:
    message = r"layer 3 attends by sliding window 8; expected one of \['causal', 'chunks of 5'\]"
    with pytest.raises(ModelError, match=message):
        in_layer(8, (MaskClass(), MaskClass(chunk=5)), sliding_window=8)


def test_dropout_is_refused_with_its_module() -> None:
    model = text_model()
    model.model.layers[0].mlp.add_module("drop", nn.Dropout(0.2))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.drop has dropout 0\.2; expected 0"):
        Adapter(model)


def test_what_is_trained_is_read_from_the_parameters() -> None:
    model = small_model()
    assert Adapter(model).encoder_is_trained
    model.model.visual.requires_grad_(False)
    assert not Adapter(model).encoder_is_trained
    model.model.visual.merger.requires_grad_(True)
    assert Adapter(model).encoder_is_trained
    assert not Adapter(text_model()).encoder_is_trained
