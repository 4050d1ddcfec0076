"""Run a microbatch's layers under its recompute policy, whatever the one before had.

Checkpointed are the layers that transformers itself checkpoints (`GradientCheckpointingLayer`), in
encoder and language model, with torch's non-reentrant checkpoint. What backward will do is decided
in forward, layer by layer; so the policy is set for the forward pass alone. All ranks of a ring
must use the same one: a rank that recomputes issues its exchanges again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from dynapar.errors import ModelError
from dynapar.memory.policies import Policy

Run = Callable[..., Any]
"""(layer, *its arguments) -> what it gives."""

_ENCODER_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


@cache
def _kept() -> frozenset[object]:
    """Operators whose results "selective" keeps: attention of text layers, and of encoders."""
    ops = torch.ops
    encoder = (getattr(ops.aten, name, None) for name in _ENCODER_ATTENTION)
    return frozenset([ops.dynapar.attend.default, *(op.default for op in encoder if op)])


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    kept = op in _kept()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(_policy)
    return contexts


# Nothing in a layer draws random numbers: dropout is refused.
_full = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, which a device reads and writes without waiting."""
    pinned = tensor.device.type == "cuda"
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=pinned)


def from_host(copy: Tensor, device: torch.device) -> Tensor:
    """A copy of what `to_host` gave, on a device again."""
    return copy.to(device, non_blocking=True, copy=True)


def _offload(layer: Run, *args: Any) -> Any:
    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        return tensor.device, to_host(tensor)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, copy = packed
        return from_host(copy, device)

    # What the checkpoint itself saves: the layer's input.
    with saved_tensors_hooks(pack, unpack):
        return _full(layer, *args)


_RUNS: Mapping[Policy, Run] = MappingProxyType(
    {
        "selective": partial(_full, context_fn=_contexts),
        "full": _full,
        "offload": _offload,
    }
)


@contextmanager
def recomputing(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Within it, forward passes of a model's layers keep what the policy keeps.

    "none" leaves the model as its owner set it; afterwards it is as it was.

    Args:
        model: The whole model, in training mode.
        policy: Of the microbatch.

    Raises:
        ModelError: The model has no layers that can be checkpointed.
    """
    if policy == "none":
        yield
        return
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that can be recomputed (transformers' "
            f"GradientCheckpointingLayer), and a microbatch asks for recompute {policy!r}; "
            "expected some. Plan with recompute none"
        )
    before = [
        (layer, layer.gradient_checkpointing, getattr(layer, "_gradient_checkpointing_func", None))
        for layer in layers
    ]
    try:
        for layer in layers:
            _set(layer, True, _RUNS[policy])
        yield
    finally:
        for layer, on, run in before:
            _set(layer, on, run)


def _set(layer: GradientCheckpointingLayer, on: bool, run: Run | None) -> None:
    layer.gradient_checkpointing = on
    setattr(layer, "_gradient_checkpointing_func", run)  # noqa: B010
