"""The attention function that transformers calls in a model's text layers, under one name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dynapar.attention.api import attend
from dynapar.errors import ModelError
from dynapar.runtime.layout import BoundLayout
from dynapar.runtime.masks import mask_of

NAME = "dynapar"
"""Of the attention implementation. One with "flash" in it would make transformers load a kernel."""

_KNOWN = frozenset(
    {"is_causal", "output_attentions", "output_router_logits", "position_ids", "use_cache"}
    | {"sliding_window"}
)
"""Keywords that do not change what a planned attention means, and the window, which is checked."""


def dynapar_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
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
        softcap: Of the logits (Gemma 2).
        s_aux: (query heads,), sinks (gpt-oss).
        dynapar_plan: The model keyword that carries the microbatch's plans to every layer.
        others: What else the model passes: `sliding_window`, which must be that of the layer's
            type, and keywords that change nothing.

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
    unknown = sorted(k for k, v in others.items() if v is not None and k not in _KNOWN)
    if unknown:
        raise ModelError(
            f"{name} passes {', '.join(unknown)} to attention; expected none of it. "
            "This model's attention is not supported"
        )
    mask = mask_of(module)
    if others.get("sliding_window", mask.window) != mask.window:
        raise ModelError(
            f"{name} of layer {module.layer_idx} passes another sliding window than its type has, "
            f"{mask}; expected the same. This model's attention is not supported"
        )
    if mask not in dynapar_plan.plans:
        raise ModelError(
            f"{name} of layer {module.layer_idx} attends by {mask}; expected one of "
            f"{[str(known) for known in dynapar_plan.plans]}, for which the plan was made. Make "
            "the Adapter after the last change of the model's configuration"
        )
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = query * _missing_temperature(module, query, dynapar_plan)
    tokens = dynapar_plan.shard.tokens
    rows = [x[0].transpose(0, 1)[:tokens] for x in (query, key, value)]
    if torch.is_autocast_enabled(query.device.type):
        # As torch's own attention does: rotary tables leave queries and keys in float32.
        low = torch.get_autocast_dtype(query.device.type)
        rows = [x.to(low) for x in rows]
    q, k, v = rows
    out = attend(q, k, v, dynapar_plan.plans[mask], scale=scaling, softcap=softcap, sinks=s_aux)
    padding = query.shape[2] - tokens
    if padding:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
    return out[None], None


def _missing_temperature(module: nn.Module, query: Tensor, plan: BoundLayout) -> Tensor:
    """What queries lack of a temperature that grows with the position (Llama 4): (n, 1).

    The layer has scaled them as if its rows were a sequence of their own. Where these are fewer
    than `floor_scale`, it has scaled by 1.
    """
    layer: Any = module

    def scale(positions: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1.0) / layer.floor_scale)
        scales: Tensor = torch.log1p(steps) * layer.attn_scale + 1.0
        return scales

    rows = torch.arange(query.shape[2], device=query.device)
    missing = scale(plan.shard.positions[0]) / scale(rows)
    return missing[:, None].to(query.dtype)


def register() -> None:
    """Make `dynapar` a known attention implementation; may be called again."""
    AttentionInterface.register(NAME, dynapar_attention)
