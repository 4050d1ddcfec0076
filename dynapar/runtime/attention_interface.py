"""The attention function that transformers calls in a model's text layers, under one name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dynapar.attention.api import attend
from dynapar.errors import ModelError
from dynapar.runtime.layout import BoundLayout

NAME = "dynapar"
"""Of the attention implementation. One with "flash" in it would make transformers load a kernel."""

_HARMLESS = frozenset({"is_causal", "output_attentions", "position_ids", "use_cache"})
"""Keywords that do not change what a planned attention means."""


def dynapar_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    dynapar_plan: BoundLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over this rank's shard.

    Args:
        module: The attention layer, named in errors.
        query: (1, query heads, n, head width).
        key: (1, key heads, n, head width).
        value: (1, key heads, n, head width).
        attention_mask: Must be None: masks come from the plan.
        scaling: Of the logits.
        dropout: Must be 0.
        sliding_window: Of this layer; selects the plan.
        dynapar_plan: The model keyword that carries the microbatch's plans to every layer.
        others: What else the model passes; only keywords that change nothing are accepted.

    Returns:
        ((1, n, query heads, head width), None).

    Raises:
        ModelError: There is no plan, or an argument asks for what the plan does not do.
    """
    name = type(module).__name__
    if dynapar_plan is None:
        raise ModelError(
            f"{name} was called without a plan; call the model through "
            f"dynapar.runtime.MicrobatchModule, or set another attention implementation"
        )
    if attention_mask is not None:
        raise ModelError(
            f"{name} got an attention mask of shape {tuple(attention_mask.shape)}; expected None: "
            "masks come from the plan. Pack samples instead of padding them"
        )
    if dropout > 0:
        raise ModelError(
            f"{name} asks for attention dropout {dropout}; expected 0. "
            "Set attention_dropout to 0 in the model's configuration"
        )
    unknown = sorted(k for k, v in others.items() if v is not None and k not in _HARMLESS)
    if unknown:
        raise ModelError(
            f"{name} passes {', '.join(unknown)} to attention; expected none of it. "
            "This model's attention is not supported"
        )
    if sliding_window not in dynapar_plan.plans:
        raise ModelError(
            f"{name} asks for sliding window {sliding_window}; the plan has "
            f"{list(dynapar_plan.plans)}"
        )
    tokens = dynapar_plan.shard.tokens
    rows = [x[0].transpose(0, 1)[:tokens] for x in (query, key, value)]
    if torch.is_autocast_enabled(query.device.type):
        # As torch's own attention does: rotary tables leave queries and keys in float32.
        low = torch.get_autocast_dtype(query.device.type)
        rows = [x.to(low) for x in rows]
    out = attend(rows[0], rows[1], rows[2], dynapar_plan.plans[sliding_window], scale=scaling)
    padding = query.shape[2] - tokens
    if padding:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
    return out[None], None


def register() -> None:
    """Make `dynapar` a known attention implementation; may be called again."""
    AttentionInterface.register(NAME, dynapar_attention)
