"""Put states and activations together: what a model needs on one rank, and what then fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dynapar.devices import encoder_parameters, total_parameters
from dynapar.errors import ConfigError
from dynapar.memory.activations import (
    INDEX_BYTES,
    Numerics,
    compute_bytes,
    encoder_forward_bytes,
    encoder_layer,
    llm_layer,
    loss_bytes,
    merger_bytes,
    patch_bytes,
    table_bytes,
)
from dynapar.memory.budget import shown
from dynapar.memory.limits import MemoryLimits, Piece, PolicyLimits
from dynapar.memory.policies import ASSUMED_HOST_RATE, Policy
from dynapar.memory.states import Sharding, States, state_bytes
from dynapar.shapes import ModelShape

RESERVE = 0.08
"""Share of a budget that stays free, for the context, workspaces and an allocator's fragments: a
prior, measured nowhere yet."""
PEER_BYTES = 16 << 20
"""Of a transport's buffers for each other rank that a rank meets: two directions of two channels of
NCCL's default buffer of 4 MiB. A prior, measured nowhere yet."""
LEAST_CAPACITY = 16
"""Tokens below which a policy counts as not fitting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """A model and how it is trained, as far as its bytes depend on it."""

    shape: ModelShape
    sharding: Sharding = "ddp"
    ranks: int = 1
    """Over which states are cut."""
    low_precision: bool = True
    """Layers compute in bfloat16: by autocast under "ddp", else with bfloat16 weights."""
    loss_chunk: int = 1024
    """Tokens whose logits exist at a time."""
    peers: int = 0
    """Other ranks that a rank may meet."""
    encoder_trained: bool = True

    @property
    def numerics(self) -> Numerics:
        """In what layers compute."""
        if not self.low_precision:
            return "float32"
        return "autocast" if self.sharding == "ddp" else "bfloat16"

    @property
    def parameters(self) -> int:
        """Of the whole model: its matrices and tables."""
        return int(total_parameters(self.shape.text) + encoder_parameters(self.shape))

    def states(self) -> States:
        """Weights, gradients and optimizer on one rank."""
        encoder = int(encoder_parameters(self.shape))
        return state_bytes(
            self.parameters,
            trained=self.parameters - (0 if self.encoder_trained else encoder),
            layer=self._layer_weights,
            sharding=self.sharding,
            ranks=self.ranks,
            weight_bytes=compute_bytes(self.numerics),
        )

    @property
    def _layer_weights(self) -> int:
        text = self.shape.text
        tables = text.vocabulary * text.width * (1 if text.tied else 2)
        return int(total_parameters(text) - tables) // max(1, text.layers)

    def encoder_ratio(self) -> int:
        """Encoder tokens that come with an LLM token of the model's media; 0 without media."""
        if self.shape.family.image is None:
            return 0
        item = self.shape.image(1024, 1024)
        return -(-item.units * item.unit_tokens // max(1, item.llm_tokens))

    def pieces(self, policy: Policy) -> tuple[Piece, ...]:
        """Bytes at each moment that may be the peak of a microbatch, states included."""
        return tuple(self._moments(policy))

    def _moments(self, policy: Policy) -> Iterator[Piece]:
        text, numerics, states = self.shape.text, self.numerics, self.states()
        layer, loss = llm_layer(text, numerics), loss_bytes(text, numerics, chunk=self.loss_chunk)
        held = states.held + self.peers * PEER_BYTES
        weights = 2 * self._layer_weights if numerics == "autocast" else 0
        encoder = 2 * int(encoder_parameters(self.shape)) if numerics == "autocast" else 0
        copies = weights * text.layers + encoder
        media = self._media(policy)
        base = text.layers * layer.kept(policy) + table_bytes(text.head_width, numerics)
        base += INDEX_BYTES
        graph = copies if policy == "none" else 0
        running = graph if policy == "none" else weights
        # In this order: loss forward and backward, the last norm, the last layer's MLP and
        # attention in backward.
        yield Piece(held + copies + loss.forward, base + loss.token, media)
        yield Piece(held + graph + loss.backward, base + loss.token, media)
        yield Piece(held + graph, base + loss.norm, media)
        again = layer.again(policy)
        yield Piece(held + running, base + again + layer.gradients, media)
        attention = base + again - layer.mlp + layer.exchange
        yield Piece(held + running, attention, media)
        if self.shape.vision.layers:
            yield from self._encoder_moments(policy, held, encoder)
        yield Piece(states.held - states.gathered + states.optimizer_step, 0, 0)

    def _media(self, policy: Policy) -> int:
        """Per encoder token, while the language model runs."""
        vision, numerics = self.shape.vision, self.numerics
        if not vision.layers:
            return 0
        rows = (2 if numerics == "bfloat16" else 4) * self.shape.text.width
        pixels = patch_bytes(vision, numerics)
        if not self.encoder_trained:
            return -(-rows // vision.merge**2) + 4 * vision.patch_width
        block = encoder_layer(vision, numerics)
        merger = merger_bytes(vision, numerics, width=self.shape.text.width)
        tables = table_bytes(vision.width // vision.heads, "float32")
        return vision.layers * block.kept(policy) + merger + pixels + tables

    def _encoder_moments(self, policy: Policy, held: int, copies: int) -> Iterator[Piece]:
        """A block of the encoder in forward, and where it is trained the last one in backward."""
        vision, numerics = self.shape.vision, self.numerics
        block = encoder_layer(vision, numerics)
        rows = (2 if numerics == "bfloat16" else 4) * self.shape.text.width
        least = patch_bytes(vision, numerics) + table_bytes(vision.width // vision.heads, "float32")
        # The joined pixels in float32 stay as long as the encoder runs.
        pixels = 0 if numerics == "float32" else 4 * vision.patch_width
        forward = least + pixels + encoder_forward_bytes(vision, numerics)
        if not self.encoder_trained:
            yield Piece(held + copies, rows, forward + block.mlp)
            return
        yield Piece(held + copies, rows, forward + vision.layers * block.kept(policy))
        busy = vision.layers * block.kept(policy) + block.again(policy) + block.gradients
        yield Piece(held, rows, least + busy)

    def host_bytes(self) -> tuple[int, int]:
        """Bytes that an LLM token and an encoder token send to the host under "offload"."""
        text, vision = self.shape.text, self.shape.vision
        token = text.layers * llm_layer(text, self.numerics).input
        if not vision.layers or not self.encoder_trained:
            return token, 0
        return token, vision.layers * encoder_layer(vision, self.numerics).input


def memory_limits(
    model: MemoryModel,
    *,
    memory: int,
    policies: Sequence[Policy],
    encoder_capacity: int | None = None,
    host_bytes_per_s: float = ASSUMED_HOST_RATE,
) -> MemoryLimits:
    """What fits into a device's memory under each policy.

    Without an encoder capacity, a rank may encode as many encoder tokens as come with a capacity
    full of media tokens, and both fit at once.

    Args:
        model: The model, and how it is trained.
        memory: Bytes of the device; `RESERVE` of them stay free.
        policies: That microbatches may have; those under which nothing fits are left out.
        encoder_capacity: Encoder tokens that a rank may encode; None to derive them.
        host_bytes_per_s: Between device and host, one way.

    Raises:
        ConfigError: States alone exceed the budget, or no policy leaves room for a microbatch; the
            message has the bytes.
    """
    budget = int(memory * (1 - RESERVE))
    states = model.states()
    ratio = model.encoder_ratio()
    found = []
    for policy in policies:
        host = model.host_bytes() if policy == "offload" else (0, 0)
        limits = PolicyLimits(
            policy=policy,
            pieces=model.pieces(policy),
            capacity=0,
            encoder_capacity=encoder_capacity or 1,
            host_token=host[0],
            host_encoder_token=host[1],
        )
        if encoder_capacity is None:
            # So many tokens of media, and what is encoded for them.
            both = [Piece(p.fixed, p.token + ratio * p.encoder_token, 0) for p in limits.pieces]
            capacity = replace(limits, pieces=tuple(both)).room(budget, 0)
            limits = replace(limits, encoder_capacity=max(1, ratio * capacity))
        else:
            capacity = limits.room(budget, encoder_capacity)
        if capacity >= LEAST_CAPACITY:
            found.append(replace(limits, capacity=capacity))
    if found:
        return MemoryLimits(
            budget=budget,
            policies=tuple(found),
            host_bytes_per_s=host_bytes_per_s,
            encoder_trained=model.encoder_trained,
        )
    raise _nothing_fits(model, states, memory, budget, policies)


def _nothing_fits(
    model: MemoryModel, states: States, memory: int, budget: int, policies: Sequence[Policy]
) -> ConfigError:
    reserved = f"memory {shown(memory)}, less {RESERVE:.0%} that stays free, is {shown(budget)}"
    held = (
        f"weights {shown(states.parameters + states.gathered)}, gradients "
        f"{shown(states.gradients)}, optimizer {shown(states.optimizer)} "
        f"({model.shape.name}, sharding {model.sharding!r}, ranks {model.ranks})"
    )
    least = max(states.held, states.held - states.gathered + states.optimizer_step)
    if least >= budget:
        if least > states.held:
            held += f", and the optimizer's step {shown(states.optimizer_step)}"
        hint = (
            'shard them (--sharding full, with --sync microbatch, or "gathered" or "zero1")'
            if model.sharding == "ddp"
            else "take more ranks or another sharding"
        )
        return ConfigError(
            f"{reserved}; states alone take {shown(least)}: {held}. Give more memory, or {hint}"
        )
    last = policies[-1]
    needs = max(p.fixed + LEAST_CAPACITY * p.token for p in model.pieces(last))
    return ConfigError(
        f"{reserved}; a microbatch of {LEAST_CAPACITY} tokens under recompute {last!r} takes "
        f"{shown(needs)}, of which states {shown(states.held)}: {held}. Give more memory, a "
        f"smaller loss_chunk (now {model.loss_chunk}), or allow recompute full or offload"
    )
