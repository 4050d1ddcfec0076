"""Language models: their shapes from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from dynapar.errors import ModelError
from dynapar.families.defaults import CLASS_DEFAULTS
from dynapar.modelfiles import ModelFiles, Section
from dynapar.shapes import Family, ModelShape, TextShape

TEXT_TYPES = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Values of `model_type` of models without media."""

PATTERNS: Mapping[str, int] = MappingProxyType(
    {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "llama4_text": 4}
)
"""Every how many layers one sees the whole sample, by `model_type`; the others have a window."""

PER_TYPE_EXPERTS = ("gpt_oss", "llama4_text")
"""Types whose `intermediate_size` is that of an expert."""


def read_text(section: Section, *, tied: bool | None = None) -> TextShape:
    """The shape of a language model.

    Args:
        section: Its configuration, with `model_type`.
        tied: Whether the output layer is the embedding table; None: as the section says.

    Raises:
        ModelError: The type is unknown, or a value is missing or out of range.
    """
    kind = section.text("model_type")
    if kind not in CLASS_DEFAULTS:
        raise ModelError(
            f"{section.place}: model_type is {kind!r}; expected a language model among "
            f"{sorted(name for name in CLASS_DEFAULTS if 'vision' not in name)}"
        )
    section = section.over(CLASS_DEFAULTS[kind])
    layers = section.integer("num_hidden_layers", least=1)
    width = section.integer("hidden_size", least=1)
    heads = section.integer("num_attention_heads", least=1)
    own = "head_dim" in section or ("head_dim" in section.defaults and kind in _FIXED_HEADS)
    window, windowed = _windows(section, kind, layers)
    shape = TextShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=_kv_heads(section, kind, heads),
        head_width=section.integer("head_dim", least=1) if own else width // heads,
        mlp_width=section.integer("intermediate_size", least=1),
        vocabulary=section.integer("vocab_size", least=1),
        tied=section.flag("tie_word_embeddings") if tied is None else tied,
        window=window,
        window_layers=windowed,
        chunked=kind == "llama4_text",
        two_way_media=kind == "gemma3_text",
    )
    if kind == "mllama_text_model":
        return replace(shape, cross_layers=len(section.numbers("cross_attention_layers")))
    return _with_experts(shape, section, kind)


_FIXED_HEADS = frozenset(
    {"gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3"}
    | {"qwen3_vl_text", "qwen3_vl_moe_text"}
)
"""Types whose class sets the width of a head whatever the width of the model."""


def _kv_heads(section: Section, kind: str, heads: int) -> int:
    if kind == "llama" and "num_key_value_heads" not in section:
        return heads
    return section.integer("num_key_value_heads", least=1)


def _windows(section: Section, kind: str, layers: int) -> tuple[int, int]:
    """Tokens of the window, and how many layers have it."""
    key = "attention_chunk_size" if kind == "llama4_text" else "sliding_window"
    silent = key in section.values and section.values[key] is None
    if silent or (key not in section and key not in section.defaults):
        return 0, 0
    switched = "use_sliding_window" in section.defaults
    if switched and not section.flag("use_sliding_window"):
        return 0, 0
    window = section.integer(key, least=1)
    named = section.values.get("layer_types")
    if isinstance(named, list):
        return window, sum(1 for name in named if name != "full_attention")
    if kind in PATTERNS:
        every = PATTERNS[kind]
        for name in ("sliding_window_pattern", "_sliding_window_pattern"):
            if name in section:
                every = section.integer(name, least=1)
        return window, layers - layers // every
    if switched:
        below = section.integer("max_window_layers") if "max_window_layers" in section else 28
        return window, max(layers - below, 0)
    return window, layers


def _with_experts(shape: TextShape, section: Section, kind: str) -> TextShape:
    old, new = "num_experts", "num_local_experts"
    if new not in section.defaults:
        return shape
    count = section.integer(old if old in section else new)
    if count < 1:
        return shape
    layers = shape.layers
    if kind == "llama4_text":
        step = section.integer("interleave_moe_layer_step")
        named = section.values.get("moe_layers")
        sparse = len(named) if isinstance(named, list) else layers // step if step else 0
    elif kind == "gpt_oss":
        sparse = layers
    else:
        step = section.integer("decoder_sparse_step", least=1)
        dense = {int(layer) for layer in section.numbers("mlp_only_layers")}
        sparse = sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    width = "intermediate_size" if kind in PER_TYPE_EXPERTS else "moe_intermediate_size"
    expert = section.integer(width, least=1)
    return replace(
        shape,
        mlp_width=section.integer("intermediate_size_mlp", least=1)
        if kind == "llama4_text"
        else shape.mlp_width,
        expert_layers=sparse,
        experts=count,
        active_experts=section.integer("num_experts_per_tok", least=1),
        expert_width=expert,
        shared_width=expert if kind == "llama4_text" else 0,
    )


def nested_text(config: Section, *, kind: str) -> TextShape:
    """The language model inside a model with media; `kind` where its section names no type.

    Files released before transformers 5 keep some families' numbers at the root.
    """
    nested = "text_config" in config
    section = config.section("text_config", {}) if nested else config
    values = dict(section.values)
    if not nested or "model_type" not in values:
        values["model_type"] = kind
    own = Section(place=section.place, values=values)
    # Which of the two levels ties the output layer is settled differently in each release.
    named = [s for s in (config, own) if "tie_word_embeddings" in s]
    tied = any(s.flag("tie_word_embeddings") for s in named) if named else None
    return read_text(own, tied=tied)


def read_text_model(files: ModelFiles, name: str) -> ModelShape:
    """The shape of a model without media."""
    kind = files.config.text("model_type")
    return ModelShape(name=name, family=TEXT_FAMILIES[kind], text=read_text(files.config))


TEXT_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {kind: Family(kind, None, None, "") for kind in TEXT_TYPES}
)
"""Families without media, by `model_type`."""
