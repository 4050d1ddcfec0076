"""Small models of every kind of mask, and samples for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dynapar.data.samples import IGNORE, IMAGE_KIND, LoadedSample, MediaShape

TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 7
ALTERNATING = ["sliding_attention", "full_attention"] * 2
IMAGE_ID = 110
SIDE, PATCH, IMAGE_TOKENS = 24, 4, 9


def gemma3() -> PreTrainedModel:
    """Images of 9 tokens, longer than the window."""
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                **TEXT,
                "model_type": "gemma3_text",
                "sliding_window": WINDOW,
                "layer_types": ALTERNATING,
                "query_pre_attn_scalar": 8,
            },
            vision_config={
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": SIDE,
                "patch_size": PATCH,
                "vision_use_head": False,
            },
            mm_tokens_per_image=IMAGE_TOKENS,
            image_token_index=IMAGE_ID,
            boi_token_index=111,
            eoi_token_index=112,
        )
    )


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **TEXT, sliding_window=WINDOW, query_pre_attn_scalar=8,
            attn_logit_softcapping=1.0, final_logit_softcapping=2.0,
        )
    ),
    "gemma3": gemma3,
    "gemma3_text": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **TEXT, sliding_window=WINDOW, layer_types=ALTERNATING, query_pre_attn_scalar=8
        )
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **TEXT, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
            layer_types=ALTERNATING, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TEXT)),
    "llama4_text": lambda: Llama4ForCausalLM(
        Llama4TextConfig(
            **TEXT, attention_chunk_size=11, no_rope_layers=[1, 1, 0, 1], intermediate_size_mlp=48,
            layer_types=["chunked_attention"] * 2 + ["full_attention", "chunked_attention"],
            num_local_experts=4, num_experts_per_tok=1, moe_layers=[1, 3],
            floor_scale=10, attn_scale=0.5,
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TEXT, sliding_window=WINDOW)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**TEXT, sliding_window=WINDOW, num_local_experts=4)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **TEXT, use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TEXT)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **TEXT, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
        )
    ),
}  # fmt: skip
"""By `model_type`; windows and chunks shorter than the samples, softcaps and temperatures that
matter."""


def make_model(kind: str) -> PreTrainedModel:
    """The same on every rank, and no parameter at a value that could hide an error."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    model.train()
    return model


def make_sample(number: int, parts: list[int | None]) -> LoadedSample:
    """Runs of text tokens; None is an image."""
    generator = torch.Generator().manual_seed(number)
    ids: list[int] = []
    units: dict[int, torch.Tensor] = {}
    patches = (SIDE // PATCH) ** 2
    for part in parts:
        if part is None:
            ids += [IMAGE_ID] * IMAGE_TOKENS
            units[len(units)] = torch.randn(patches, 3 * PATCH * PATCH, generator=generator)
        else:
            ids += torch.randint(0, 100, (part,), generator=generator).tolist()
    input_ids = torch.tensor(ids)
    labels = input_ids.masked_fill(input_ids == IMAGE_ID, IGNORE)
    shape = MediaShape(IMAGE_KIND, (1, SIDE // PATCH, SIDE // PATCH), IMAGE_TOKENS, 1, 0.0)
    return LoadedSample(
        id=f"s{number}",
        input_ids=input_ids,
        targets=functional.pad(labels[1:], (0, 1), value=IGNORE),
        kinds=(input_ids == IMAGE_ID).long() * IMAGE_KIND,
        positions=torch.arange(len(ids))[None],
        media=(shape,) * len(units),
        units=units,
    )


def make_samples(kind: str) -> list[LoadedSample]:
    """Long and short ones; with images for a model that has them, two of them adjacent."""
    if kind == "gemma3":
        parts: list[list[int | None]] = [
            [20, None, 13, None, None, 9], [41], [3, None], [1], [None, 17],
        ]  # fmt: skip
    else:
        parts = [[70], [41], [9], [1], [23]]
    return [make_sample(number, part) for number, part in enumerate(parts)]
