"""Bytes of weights, gradients and optimizer on one rank: what stays between microbatches."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Sharding = Literal["ddp", "zero1", "gathered", "full"]
"""Every rank holds all; the optimizer is cut over the ranks (DeepSpeed ZeRO-1); FSDP2 that keeps
its weights gathered for the step; FSDP2 that shards fully (ZeRO-3)."""
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes of a parameter's float32 value, of AdamW's two float32 moments, of a float32 gradient."""
BUFFERED_UNITS = 2
"""Layers whose gathered weights a fully sharded model holds at once: the one that runs, and the
one that is fetched meanwhile."""


class States(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gradients: int
    """With the buckets in which they are reduced."""
    optimizer: int
    gathered: int
    """Weights gathered from other ranks."""
    optimizer_step: int
    """Made while the optimizer steps, when no activations are there."""

    @property
    def held(self) -> int:
        """All that stays while a microbatch runs."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


def state_bytes(
    parameters: int,
    *,
    trained: int,
    layer: int,
    sharding: Sharding,
    ranks: int,
    weight_bytes: int,
) -> States:
    """States of AdamW training with float32 gradients.

    The counts are ZeRO's (Rajbhandari et al., arXiv 1910.02054, section 3.1: float32 value and two
    moments, 12 bytes, besides weights and gradients), with gradients summed in float32. DDP adds
    its buckets: gradients set to None after a step are allocated beside them, not as views of them.
    FSDP2 without reduction inside the step keeps whole gradients; with a reduction in every wave
    only a layer's.

    Args:
        parameters: Of the whole model.
        trained: Those that get a gradient.
        layer: Of the largest layer.
        sharding: How states are cut.
        ranks: Over which they are cut.
        weight_bytes: Of a gathered weight: 4, or 2 where layers compute in bfloat16.
    """
    share = -(-trained // ranks)
    if sharding == "ddp":
        whole = MASTER * parameters, GRADIENT * trained, MOMENTS * trained
        buckets = GRADIENT * trained if ranks > 1 else 0
        return States(whole[0], whole[1] + buckets, whole[2], 0, MASTER * trained)
    if sharding == "zero1":
        # Weights in the compute type; float32 values belong to the optimizer's share.
        master = MASTER if weight_bytes < MASTER else 0
        held = weight_bytes * parameters
        optimizer = (MOMENTS + master) * share
        return States(held, GRADIENT * trained, optimizer, 0, MASTER * share)
    own = MASTER * -(-parameters // ranks)
    if sharding == "gathered":
        gathered = weight_bytes * parameters
        return States(own, GRADIENT * trained, MOMENTS * share, gathered, MASTER * share)
    unit = BUFFERED_UNITS * weight_bytes * layer + GRADIENT * layer
    return States(own, GRADIENT * share, MOMENTS * share, unit, MASTER * share)
