"""Released checkpoints: what their files say, as far as shapes and token counts need it.

Values come from the released files; those that stand in `tests/families/test_presets.py` were
compared with the model catalog's tables. Give a model folder where a number must be certain.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

Values = Mapping[str, object]


class Preset(NamedTuple):
    """A released checkpoint's files."""

    config: Values
    """config.json."""
    image: Values = MappingProxyType({})
    """preprocessor_config.json."""
    video: Values | None = None
    """video_preprocessor_config.json; None: as for images."""


def _text(
    kind: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocabulary: int,
    **more: object,
) -> dict[str, object]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        **more,
    }


def _qwen2(
    layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocabulary: int = 152064
) -> dict[str, object]:
    tied = width < 2560
    return _text("qwen2", layers, width, heads, kv_heads, mlp, vocabulary, tie_word_embeddings=tied)


def _qwen3(
    kind: str, layers: int, width: int, heads: int, mlp: int, *, tied: bool, experts: int = 0
) -> dict[str, object]:
    more: dict[str, object] = {"head_dim": 128, "tie_word_embeddings": tied}
    if experts:
        more |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": experts}
    return _text(kind, layers, width, heads, 4 if experts else 8, mlp, 151936, **more)


def _llama(
    layers: int, width: int, heads: int, mlp: int, kind: str = "llama", **more: object
) -> dict[str, object]:
    return _text(kind, layers, width, heads, 8, mlp, 128256, **more)


def _mistral(
    width: int, mlp: int, vocabulary: int, layers: int = 40, **more: object
) -> dict[str, object]:
    more = {"sliding_window": None, "head_dim": 128, **more}
    return _text("mistral", layers, width, 32, 8, mlp, vocabulary, **more)


def _gemma(
    kind: str, layers: int, width: int, heads: int, kv_heads: int, mlp: int, **more: object
) -> dict[str, object]:
    vocabulary = 256000 if kind == "gemma2" else 262208
    more = {"head_dim": 256, "tie_word_embeddings": True, **more}
    return _text(kind, layers, width, heads, kv_heads, mlp, vocabulary, **more)


_QWEN2 = {
    "0.5b": _qwen2(24, 896, 14, 2, 4864, 151936),
    "1.5b": _qwen2(28, 1536, 12, 2, 8960, 151936),
    "3b": _qwen2(36, 2048, 16, 2, 11008, 151936),
    "7b": _qwen2(28, 3584, 28, 4, 18944),
    "14b": _qwen2(48, 5120, 40, 8, 13824),
    "32b": _qwen2(64, 5120, 40, 8, 27648),
    "72b": _qwen2(80, 8192, 64, 8, 29568),
}

_QWEN3 = {
    "0.6b": _qwen3("qwen3", 28, 1024, 16, 3072, tied=True),
    "1.7b": _qwen3("qwen3", 28, 2048, 16, 6144, tied=True),
    "4b": _qwen3("qwen3", 36, 2560, 32, 9728, tied=True),
    "8b": _qwen3("qwen3", 36, 4096, 32, 12288, tied=False),
    "14b": _qwen3("qwen3", 40, 5120, 40, 17408, tied=False),
    "32b": _qwen3("qwen3", 64, 5120, 64, 25600, tied=False),
    "30b-a3b": _qwen3("qwen3_moe", 48, 2048, 32, 6144, tied=False, experts=768),
    "235b-a22b": _qwen3("qwen3_moe", 94, 4096, 64, 12288, tied=False, experts=1536),
}

_GEMMA3 = {
    "4b": _gemma("gemma3_text", 34, 2560, 8, 4, 10240, sliding_window=1024),
    "12b": _gemma("gemma3_text", 48, 3840, 16, 8, 15360, sliding_window=1024),
    "27b": _gemma("gemma3_text", 62, 5376, 32, 16, 21504, sliding_window=1024, head_dim=128),
}


def _gpt_oss(layers: int, experts: int) -> Preset:
    more = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4}
    return Preset(_text("gpt_oss", layers, 2880, 64, 8, 2880, 201088, sliding_window=128, **more))


TEXT_PRESETS: Mapping[str, Preset] = MappingProxyType(
    {f"qwen2.5-{size}": Preset(values) for size, values in _QWEN2.items()}
    | {f"qwen3-{size}": Preset(values) for size, values in _QWEN3.items()}
    | {
        "llama-3.1-8b": Preset(_llama(32, 4096, 32, 14336)),
        "llama-3.1-70b": Preset(_llama(80, 8192, 64, 28672)),
        "llama-3.1-405b": Preset(_llama(126, 16384, 128, 53248)),
        "llama-3.2-1b": Preset(_llama(16, 2048, 32, 8192, head_dim=64, tie_word_embeddings=True)),
        "llama-3.2-3b": Preset(_llama(28, 3072, 24, 8192, tie_word_embeddings=True)),
        "llama-3.3-70b": Preset(_llama(80, 8192, 64, 28672)),
        "gemma-2-2b": Preset(_gemma("gemma2", 26, 2304, 8, 4, 9216, sliding_window=4096)),
        "gemma-2-9b": Preset(_gemma("gemma2", 42, 3584, 16, 8, 14336, sliding_window=4096)),
        "gemma-2-27b": Preset(
            _gemma("gemma2", 46, 4608, 32, 16, 36864, sliding_window=4096, head_dim=128)
        ),
        "gemma-3-1b": Preset(
            _gemma("gemma3_text", 26, 1152, 4, 1, 6912, sliding_window=512) | {"vocab_size": 262144}
        ),
        "mistral-7b": Preset(_mistral(4096, 14336, 32768, layers=32)),
        "mistral-nemo-12b": Preset(_mistral(5120, 14336, 131072)),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
    }
)
"""Models without media."""

_QWEN_PIXELS: Values = MappingProxyType({"min_pixels": 3136, "max_pixels": 12845056})


def _qwen_vl(kind: str, text: Values, **vision: object) -> Preset:
    config = {"model_type": kind, "vision_config": vision}
    if kind == "qwen2_5_omni":
        thinker = {"text_config": {**text, "model_type": f"{kind}_text"}, "vision_config": vision}
        audio = {"d_model": 1280, "output_dim": text["hidden_size"]}
        config = {"model_type": kind, "thinker_config": thinker | {"audio_config": audio}}
        return Preset(config, {**_QWEN_PIXELS, "chunk_length": 300})
    return Preset({**text, **config}, _QWEN_PIXELS)


def _qwen3_vl(text: dict[str, object], *, large: bool) -> Preset:
    kind = "qwen3_vl_moe" if text["model_type"] == "qwen3_moe" else "qwen3_vl"
    vision: dict[str, object] = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
    stacked = [8, 16, 24]
    if not large:
        vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
        stacked = [5, 11, 17]
    vision |= {"deepstack_visual_indexes": stacked, "out_hidden_size": text["hidden_size"]}
    return Preset(
        {
            "model_type": kind,
            "text_config": text | {"model_type": f"{kind}_text"},
            "vision_config": vision,
            "tie_word_embeddings": text["tie_word_embeddings"],
        },
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
    )


_SIGLIP: Values = MappingProxyType(
    {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "patch_size": 14,
    }
)
_INTERN_6B: Values = MappingProxyType(
    {
        "hidden_size": 3200,
        "num_hidden_layers": 45,
        "num_attention_heads": 25,
        "intermediate_size": 12800,
    }
)


def _internvl(text: dict[str, object], *, large: bool = False) -> Preset:
    text = text | {"vocab_size": 151674, "tie_word_embeddings": False}
    vision = _INTERN_6B if large else {"hidden_size": 1024}
    size = {"height": 448, "width": 448}
    return Preset(
        {"model_type": "internvl", "text_config": text, "vision_config": vision},
        {"size": size, "crop_to_patches": True, "max_patches": 12},
        {"size": size},
    )


def _llava_onevision(text: dict[str, object], vocabulary: int) -> Preset:
    return Preset(
        {
            "model_type": "llava_onevision",
            "text_config": text | {"vocab_size": vocabulary},
            "vision_config": {**_SIGLIP, "num_hidden_layers": 26},
        },
        {"size": {"height": 384, "width": 384}},
    )


def _gemma3(text: Values) -> Preset:
    config = {"model_type": "gemma3", "text_config": text, "vision_config": _SIGLIP}
    return Preset(config, {"size": {"height": 896, "width": 896}})


def _mllama(layers: int, width: int, heads: int, mlp: int) -> Preset:
    cross = list(range(3, layers, 5))
    text = _llama(layers, width, heads, mlp, "mllama_text_model", cross_attention_layers=cross)
    config = {"model_type": "mllama", "text_config": text, "vision_config": {"image_size": 560}}
    return Preset(config, {"size": {"height": 560, "width": 560}, "max_image_tiles": 4})


def _llama4(experts: int, every: int) -> Preset:
    text = {"model_type": "llama4_text", "num_local_experts": experts}
    vision = {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096}
    return Preset(
        {
            "model_type": "llama4",
            "text_config": text | {"interleave_moe_layer_step": every},
            "vision_config": vision,
        },
        {"size": {"height": 336, "width": 336}, "max_patches": 16},
    )


def _smolvlm(text: Values) -> Preset:
    vision = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "patch_size": 16,
        "intermediate_size": 3072,
    }
    return Preset(
        {
            "model_type": "smolvlm",
            "text_config": text,
            "vision_config": vision,
            "scale_factor": 4,
        },
        {
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
        },
    )


def _idefics3(text: Values, edge: int, merge: int) -> Preset:
    vision = {key: value for key, value in _SIGLIP.items() if key != "model_type"}
    return Preset(
        {
            "model_type": "idefics3",
            "text_config": text,
            "vision_config": vision,
            "scale_factor": merge,
        },
        {"size": {"longest_edge": 4 * edge}, "max_image_size": {"longest_edge": edge}},
    )


_PIXTRAL_VISION: Values = MappingProxyType({"model_type": "pixtral"})

MEDIA_PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        f"qwen2-vl-{size}": _qwen_vl("qwen2_vl", _QWEN2[base], embed_dim=1280, depth=32)
        for size, base in (("2b", "1.5b"), ("7b", "7b"), ("72b", "72b"))
    }
    | {
        f"qwen2.5-vl-{size}": _qwen_vl(
            "qwen2_5_vl",
            _QWEN2[size],
            hidden_size=1280,
            intermediate_size=3420 if size in ("3b", "7b") else 3456,
            tokens_per_second=2,
        )
        for size in ("3b", "7b", "32b", "72b")
    }
    | {
        f"qwen2.5-omni-{size}": _qwen_vl("qwen2_5_omni", _QWEN2[size], hidden_size=1280)
        for size in ("3b", "7b")
    }
    | {
        f"qwen3-vl-{size}": _qwen3_vl(_QWEN3[base], large=size not in ("2b", "4b"))
        for size, base in {
            "2b": "1.7b",
            **{size: size for size in ("4b", "8b", "32b", "30b-a3b", "235b-a22b")},
        }.items()
    }
    | {
        f"internvl3-{size}": _internvl(_QWEN2[base], large=size in ("38b", "78b"))
        for size, base in {
            "1b": "0.5b",
            "2b": "1.5b",
            "8b": "7b",
            "14b": "14b",
            "38b": "32b",
            "78b": "72b",
        }.items()
    }
    | {
        f"llava-onevision-{size}": _llava_onevision(_QWEN2[size], vocabulary)
        for size, vocabulary in (("0.5b", 152000), ("7b", 152128), ("72b", 152128))
    }
    | {f"gemma-3-{size}": _gemma3(text) for size, text in _GEMMA3.items()}
    | {
        "llama-3.2-11b-vision": _mllama(40, 4096, 32, 14336),
        "llama-3.2-90b-vision": _mllama(100, 8192, 64, 28672),
        "llama-4-scout": _llama4(16, 1),
        "llama-4-maverick": _llama4(128, 2),
        "pixtral-12b": Preset(
            {
                "model_type": "llava",
                "text_config": _mistral(5120, 14336, 131072),
                "vision_config": _PIXTRAL_VISION,
                "image_token_index": 10,
            },
            {"size": {"longest_edge": 1024}},
        ),
        "mistral-small-3.1-24b": Preset(
            {
                "model_type": "mistral3",
                "text_config": _mistral(5120, 32768, 131072),
                "vision_config": {**_PIXTRAL_VISION, "patch_size": 14},
            },
            {"size": {"longest_edge": 1540}},
        ),
        "smolvlm-256m": _smolvlm(_text("llama", 30, 576, 9, 3, 1536, 49280)),
        "smolvlm-500m": _smolvlm(_text("llama", 32, 960, 15, 5, 2560, 49280)),
        "smolvlm-2.2b": _idefics3(_text("llama", 24, 2048, 32, 32, 8192, 49155), 384, 3),
        "idefics3-8b": _idefics3(_llama(32, 4096, 32, 14336), 364, 2),
    }
)
"""Models with media."""

RELEASED: Mapping[str, Preset] = MappingProxyType({**MEDIA_PRESETS, **TEXT_PRESETS})
"""All presets, by lower-case name."""
