"""Tell what the attention layers of a model see, and group those that see alike.

Transformers builds masks in each model's own forward, and hands none to an attention function that
it does not know. What they say is told here from the configuration of each layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from dynapar.errors import ModelError


class MaskClass(NamedTuple):
    """Attention layers that see alike: one attention plan serves all of them."""

    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None is no window."""
    chunk: int | None = None
    """A token sees those before it in its own chunk of so many tokens; None is no chunks."""

    def __str__(self) -> str:
        if self.window is not None:
            return f"sliding window {self.window}"
        return "causal" if self.chunk is None else f"chunks of {self.chunk}"


def mask_of(attention: nn.Module) -> MaskClass:
    """The class of an attention layer of a language model.

    Args:
        attention: A module with the `config` and `layer_idx` that transformers gives it.

    Raises:
        ModelError: The layer is of a type that is not known here.
    """
    config: Any = attention.config
    layer: Any = attention.layer_idx
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Mistral and those like it: the window is for all layers.
        return MaskClass(window=window)
    kind = kinds[layer]
    if kind == "full_attention":
        return MaskClass()
    if kind == "sliding_attention" and window is not None:
        return MaskClass(window=window)
    if kind == "chunked_attention":
        return MaskClass(chunk=config.attention_chunk_size)
    raise ModelError(
        f"layer {layer} of model type {config.model_type!r} is of type {kind!r}; expected "
        "full_attention, sliding_attention with a sliding_window, or chunked_attention. "
        "This model's attention is not supported"
    )


def masks_of(decoder: nn.Module) -> tuple[MaskClass, ...]:
    """The distinct classes of a language model, in the order of its layers.

    Raises:
        ModelError: A layer has no attention, attends to the future, or is of an unknown type.
    """
    found = []
    layers: Any = decoder.layers
    for number, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            raise ModelError(
                f"layer {number}, {type(layer).__name__}, has no self_attn; expected attention in "
                "every layer, since other ways to mix tokens do not work on shards. This model is "
                "not supported"
            )
        if not getattr(attention, "is_causal", True):
            raise ModelError(
                f"layer {number}, {type(attention).__name__}, attends to later tokens; expected "
                "causal attention. Turn use_bidirectional_attention off, or use another model"
            )
        found.append(mask_of(attention))
    return tuple(dict.fromkeys(found))
