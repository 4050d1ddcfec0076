"""What dynapar cannot run exactly is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from dynapar.errors import ModelError
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.attention_interface import dynapar_attention
from tests.models import small_model

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
    with pytest.raises(ModelError, match="model type 'llava' cannot be run by this version; expected one of"):
        Adapter(model)


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
