"""Small models of transformers' own classes, with inputs whose media sizes are real."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama4 import modeling_llama4 as llama4

from dynapar.catalog import ModelShape, shape_of_config
from dynapar.shapes import MediaTokens

TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 14,
    "vision_use_head": False,
}


@dataclass
class Case:
    """A model, what to call it with, and what the catalog makes of it."""

    model: Any
    inputs: dict[str, Any]
    shape: ModelShape
    tokens: int
    media: Sequence[MediaTokens]


class Given:
    """Stands for a processor of transformers."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def to_dict(self) -> dict[str, object]:
        return self._values


def ids(shape: ModelShape, media: Sequence[MediaTokens], more: int = 10) -> Tensor:
    """(1, L) token ids: text, then the placeholders of each item and a token of text."""
    tokens = {1: shape.tokens.image, 2: shape.tokens.video, 3: shape.tokens.audio}
    found = [5] * more
    for item in media:
        # Temporal groups of Qwen3-VL stand apart in the text.
        runs = item.units if shape.family.name.startswith("qwen3_vl") else 1
        found += ([tokens[item.kind]] * (item.llm_tokens // runs) + [6]) * runs
    return torch.tensor([found])


def _case(model: Any, shape: ModelShape, media: Sequence[MediaTokens], **inputs: Any) -> Case:
    tokens = ids(shape, media)
    return Case(model.eval(), {"input_ids": tokens, **inputs}, shape, tokens.shape[1], media)


def _text(kind: str, **more: object) -> Case:
    config = hf.AutoConfig.for_model(kind, **TEXT, **more)
    model = hf.AutoModelForCausalLM.from_config(config)
    return _case(model, shape_of_config(config), ())


def _experts(kind: str, **more: object) -> Case:
    config = hf.AutoConfig.for_model(kind, **TEXT, **more)
    # One multiplication an expert: the counter does not know grouped ones.
    model = hf.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return _case(model, shape_of_config(config), ())


TOKEN_IDS = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}


def _qwen(kind: str, cls: Any, patch: int, **vision: object) -> Case:
    rope = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e4}
    config = hf.AutoConfig.for_model(
        kind,
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={"depth": 3, "num_heads": 2, "patch_size": patch, **vision},
        **TOKEN_IDS,
    )
    processor = Given(size={"shortest_edge": 3136, "longest_edge": 200000})
    shape = shape_of_config(config, image_processor=processor)
    media = [shape.image(300, 220), shape.video(8, 2.0, 112, 170)]
    pixels = torch.randn(sum(m.units * m.unit_tokens for m in media), shape.vision.patch_width)
    split = media[0].unit_tokens
    video_grid = [media[1].grid]
    tokens = ids(shape, media)
    return _case(
        cls(config),
        shape,
        media,
        pixel_values=pixels[:split],
        image_grid_thw=torch.tensor([media[0].grid]),
        pixel_values_videos=pixels[split:],
        video_grid_thw=torch.tensor(video_grid),
        mm_token_type_ids=(tokens == 300).int() + 2 * (tokens == 301).int(),
    )


def _qwen2_vl() -> Case:
    cls = hf.Qwen2VLForConditionalGeneration
    return _qwen("qwen2_vl", cls, 14, embed_dim=32, hidden_size=64)


def _qwen25_vl() -> Case:
    vision = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    cls = hf.Qwen2_5_VLForConditionalGeneration
    return _qwen("qwen2_5_vl", cls, 14, **vision, fullatt_block_indexes=[1])


def _qwen3_vl() -> Case:
    vision = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    cls = hf.Qwen3VLForConditionalGeneration
    return _qwen("qwen3_vl", cls, 16, **vision, deepstack_visual_indexes=[0, 1])


def _omni() -> Case:
    rope = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e4}
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        audio_config={
            "encoder_layers": 2,
            "d_model": 32,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "output_dim": 64,
        },
        audio_token_index=304,
        image_token_index=300,
        video_token_index=301,
        audio_start_token_id=305,
        audio_end_token_id=306,
    )
    processor = Given(size={"shortest_edge": 3136, "longest_edge": 200000})
    shape = shape_of_config(config, image_processor=processor)
    media = [shape.audio(7.3)]
    frames = media[0].size[1]
    return _case(
        hf.Qwen2_5OmniThinkerForConditionalGeneration(config),
        shape,
        media,
        input_features=torch.randn(1, 16, frames),
        feature_attention_mask=torch.ones(1, frames, dtype=torch.long),
    )


def _internvl() -> Case:
    config = hf.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "image_size": [112, 112],
        },
        image_seq_length=16,
        image_token_id=300,
    )
    processor = Given(size={"height": 112, "width": 112}, crop_to_patches=True, max_patches=6)
    shape = shape_of_config(config, image_processor=processor)
    media = [shape.image(200, 300)]
    pixels = torch.randn(media[0].units, 3, 112, 112)
    return _case(hf.InternVLForConditionalGeneration(config), shape, media, pixel_values=pixels)


def _llava_onevision() -> Case:
    config = hf.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**SIGLIP, "image_size": 112},
        image_grid_pinpoints=[[112, 112], [112, 224], [224, 112], [224, 224]],
        image_token_index=300,
        video_token_index=301,
    )
    size = {"height": 112, "width": 112}
    pins = [(112, 112), (112, 224), (224, 112), (224, 224)]
    shape = shape_of_config(config, image_processor=Given(size=size, image_grid_pinpoints=pins))
    media = [shape.image(180, 300)]
    return _case(
        hf.LlavaOnevisionForConditionalGeneration(config),
        shape,
        media,
        pixel_values=torch.randn(1, media[0].units, 3, 112, 112),
        image_sizes=torch.tensor([[180, 300]]),
    )


def _gemma3() -> Case:
    config = hf.Gemma3Config(
        text_config={**TEXT, "head_dim": 16, "sliding_window": 64},
        vision_config={**SIGLIP, "image_size": 112},
        mm_tokens_per_image=16,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    )
    shape = shape_of_config(config, image_processor=Given(size={"height": 112, "width": 112}))
    media = [shape.image(180, 300)]
    tokens = ids(shape, media)
    return _case(
        hf.Gemma3ForConditionalGeneration(config),
        shape,
        media,
        pixel_values=torch.randn(1, 3, 112, 112),
        token_type_ids=(tokens == 300).long(),
    )


def _mllama() -> Case:
    config = hf.MllamaConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 5,
            "cross_attention_layers": [3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "intermediate_size": 48,
            "image_size": 112,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2]],
        },
        image_token_index=300,
    )
    processor = Given(size={"height": 112, "width": 112}, max_image_tiles=4)
    shape = shape_of_config(config, image_processor=processor)
    media = [shape.image(200, 200)]
    tokens = ids(shape, media).shape[1]
    return _case(
        hf.MllamaForConditionalGeneration(config),
        shape,
        media,
        pixel_values=torch.randn(1, 1, 4, 3, 112, 112),
        aspect_ratio_mask=torch.ones(1, 1, 4, dtype=torch.long),
        aspect_ratio_ids=torch.tensor([[6]]),
        cross_attention_mask=torch.ones(1, tokens, 1, 4, dtype=torch.long),
    )


def _llama4() -> Case:
    config = hf.Llama4Config(
        text_config={
            **TEXT,
            "head_dim": 16,
            "intermediate_size_mlp": 112,
            # transformers runs every expert on every token, so all of them are active here.
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "image_size": 112,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "vision_output_dim": 40,
        },
        image_token_index=300,
    )
    size = {"height": 112, "width": 112}
    shape = shape_of_config(config, image_processor=Given(size=size, max_patches=4))
    media = [shape.image(200, 200)]
    pixels = torch.randn(media[0].units, 3, 112, 112)
    # transformers 5.24 reads a field that its own output lacks when there are pictures.
    vars(llama4)["MoeCausalLMOutputWithPast"].image_outputs = None
    return _case(hf.Llama4ForConditionalGeneration(config), shape, media, pixel_values=pixels)


def _pixtral(merge: int) -> Case:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "image_size": 224,
        "patch_size": 14,
    }
    text = {"model_type": "mistral", **TEXT, "sliding_window": None}
    config: Any
    if merge == 1:
        config = hf.LlavaConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=300,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    else:
        config = hf.Mistral3Config(
            text_config=text, vision_config=vision, image_token_index=300, spatial_merge_size=merge
        )
    shape = shape_of_config(config, image_processor=Given(size={"longest_edge": 224}))
    media = [shape.image(190, 300)]
    high, wide = media[0].size
    model: Any = hf.LlavaForConditionalGeneration if merge == 1 else None
    model = model or hf.Mistral3ForConditionalGeneration
    return _case(
        model(config),
        shape,
        media,
        pixel_values=torch.randn(1, 3, high, wide),
        image_sizes=torch.tensor([[high, wide]]),
    )


def _idefics3(kind: str, cls: Any) -> Case:
    config = hf.AutoConfig.for_model(
        kind,
        text_config={"model_type": "llama", **TEXT, "pad_token_id": 0},
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "image_size": 112,
            "patch_size": 14,
        },
        image_token_id=300,
        scale_factor=2,
    )
    processor = Given(size={"longest_edge": 448}, max_image_size={"longest_edge": 112})
    shape = shape_of_config(config, image_processor=processor)
    media = [shape.image(200, 300)]
    pixels = torch.randn(1, media[0].units, 3, 112, 112)
    return _case(cls(config), shape, media, pixel_values=pixels)


CASES: Mapping[str, Callable[[], Case]] = {
    "llama": lambda: _text("llama"),
    "qwen2": lambda: _text("qwen2"),
    "qwen3": lambda: _text("qwen3", head_dim=24),
    "gemma2": lambda: _text("gemma2", head_dim=24, sliding_window=8),
    "gemma3_text": lambda: _text("gemma3_text", head_dim=24, sliding_window=8),
    "mistral": lambda: _text("mistral", sliding_window=8),
    "gpt_oss": lambda: _experts("gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: _experts(
        "qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen25_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen2_5_omni": _omni,
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
    "mllama": _mllama,
    "llama4": _llama4,
    "pixtral": lambda: _pixtral(1),
    "mistral3": lambda: _pixtral(2),
    "idefics3": lambda: _idefics3("idefics3", hf.Idefics3ForConditionalGeneration),
    "smolvlm": lambda: _idefics3("smolvlm", hf.SmolVLMForConditionalGeneration),
}

_PLACES: Sequence[tuple[str, tuple[str, str]]] = (
    (r"lm_head", ("llm", "head")),
    (r"(patch_embed|patch_conv|patch_embeddings?|conv1|conv2)\b", ("vision", "patch_embedding")),
    (
        r"(merger|deepstack_merger_list|multi_modal_projector|connector|vision_adapter)\b",
        ("merger",) * 2,
    ),
    (r"audio_tower\.proj$", ("merger", "merger")),
    (
        r"(visual|vision_tower|vision_model|vision_encoder)\b.*\b(attn|attention|self_attn)$",
        ("vision", "attention"),
    ),
    (r"(visual|vision_tower|vision_model)\b.*\b(mlp|feed_forward)$", ("vision", "mlp")),
    (r"audio_tower\..*self_attn$", ("audio", "attention")),
    (r"audio_tower\..*(fc1|fc2)$", ("audio", "mlp")),
    (r"(self_attn|cross_attn)$", ("llm", "attention")),
    (r"(mlp|feed_forward)$", ("llm", "mlp")),
)
"""Where a module's name ends -> what the catalog calls it; the first that fits."""


def counted(case: Case, *, backward: bool = False) -> dict[tuple[str, str], int]:
    """FLOPs by part and module, as torch counts them."""
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        with torch.enable_grad() if backward else torch.no_grad():
            out = case.model(**case.inputs, use_cache=False)
        if backward:
            out.logits.float().sum().backward()
    found: dict[tuple[str, str], int] = {}
    names = {name for name, _ in case.model.named_modules()}
    taken: list[str] = []
    counts = counter.get_flop_counts()
    root = type(case.model).__name__
    for name in sorted(counts, key=len):
        inner = name.removeprefix(f"{root}.")
        if inner not in names or any(inner.startswith(f"{done}.") for done in taken):
            continue
        for pattern, place in _PLACES:
            if re.search(pattern, inner):
                part, module = place
                if "audio_tower" in inner and part == "vision":
                    part = "audio"
                found[part, module] = found.get((part, module), 0) + sum(counts[name].values())
                taken.append(inner)
                break
    found["", "all"] = counter.get_total_flops()
    return found
