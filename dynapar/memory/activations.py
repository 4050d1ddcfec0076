"""Bytes that a token leaves behind in each layer, and at most needs at once, by recompute policy.

Counted are the tensors that autograd saves in transformers' own layers (Llama, Qwen2, Qwen2.5-VL)
around `dynapar::attend`, storage by storage; a tensor that two operators save counts once. Of a
layer of width h with q query and k key widths, N heads and an MLP of width i, with B bytes of the
compute type and R of the residual stream:

    norm        x, its normalised form, the scaled result: 12 h in float32; in low precision the
                first is float32, the others are B, once more for every linear layer that casts
    attention   q and its output 2 q B, keys and values 2 k B, log-sum-exp 4 N
    MLP         gate, its activation, up, their product: 4 i B (2 i B without a gate)

which is the count of Korthikanti et al. (arXiv 2205.05198, section 4) for these layers, without
dropout and with exact attention. What is kept by a policy, besides a layer's input R h: nothing
("full"), output and log-sum-exp of attention ("selective", the tensors that cost most time a byte).
`docs/memory.md` has all formulas beside measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dynapar.memory.policies import Policy
from dynapar.shapes import TextShape, VisionShape

Numerics = Literal["float32", "autocast", "bfloat16"]
"""float32 throughout; bfloat16 layers over float32 weights and float32 residuals, as the trainer's
`precision: bfloat16` is; weights and residuals in bfloat16, as FSDP2's mixed precision is."""

INDEX_BYTES = 64
"""Ids, kinds, targets, positions of a token, and what is made of them."""


def compute_bytes(numerics: Numerics) -> int:
    """Of a number that layers compute with."""
    return 4 if numerics == "float32" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes a token of one layer."""

    saved: int
    """By autograd, where nothing is recomputed."""
    input: int
    """Of the layer's input."""
    input_is_saved: bool
    """Whether `saved` includes the input itself, and not a copy of it in another type."""
    attention: int
    """Of `saved`: what attention gave."""
    mlp: int
    """Of `saved`: inside the MLP, freed before the layer's attention is differentiated."""
    gradients: int
    """Made in backward at the MLP, where the layer needs most."""
    exchange: int
    """Made in attention's backward: gradients, sums, and rows of other ranks on their way."""

    def kept(self, policy: Policy) -> int:
        """Between forward and backward."""
        if policy == "none":
            return self.saved
        if policy == "offload":
            return 0
        return self.input + (self.attention if policy == "selective" else 0)

    def again(self, policy: Policy) -> int:
        """Beside `kept`, while this layer is in backward: what was computed again."""
        if policy == "none":
            return 0
        held = self.input if self.input_is_saved else 0
        if policy == "offload":
            return self.saved + self.input - held
        return self.saved - held - (self.attention if policy == "selective" else 0)


def norm_bytes(width: int, *, numerics: Numerics, residual: int, consumers: int) -> int:
    """Bytes that an RMS norm saves of a token.

    Args:
        width: Of the residual stream.
        numerics: Of the model.
        residual: Bytes of a number of the residual stream.
        consumers: Linear layers that read the result; under autocast each casts it anew.
    """
    if numerics == "float32":
        return 12 * width + 4
    scaled = 2 * width * (consumers if numerics == "autocast" else 1)
    # A float32 residual is saved itself, with a float32 normalised form; else in a float32 copy.
    return 4 * width + residual * width + scaled + 4


def llm_layer(text: TextShape, numerics: Numerics) -> LayerBytes:
    """Of one layer of the language model, on average over its dense and its expert layers.

    Experts are counted as their tokens, gathered and given back: an estimate, not measured.
    """
    b = compute_bytes(numerics)
    residual = 2 if numerics == "bfloat16" else 4
    h, q, k = text.width, text.heads * text.head_width, text.kv_heads * text.head_width
    gated = text.mlp_matrices == 3
    norms = norm_bytes(h, numerics=numerics, residual=residual, consumers=3)
    norms += norm_bytes(h, numerics=numerics, residual=residual, consumers=2 if gated else 1)
    attention = b * q + 4 * text.heads
    times = 4 if gated else 2
    experts = text.active_experts * (times * b * text.expert_width + 2 * b * h)
    experts += times * b * text.shared_width + 8 * text.experts
    dense = times * b * text.mlp_width
    sparse = text.expert_layers
    mlp = ((text.layers - sparse) * dense + sparse * experts) // max(1, text.layers)
    return LayerBytes(
        saved=norms + attention + b * (q + 2 * k) + mlp,
        input=residual * h,
        input_is_saved=residual == 4,
        attention=attention,
        mlp=mlp,
        gradients=mlp // 2 + residual * h,
        exchange=b * (2 * q + 2 * k) + 4 * (q + 2 * k) + 2 * k * (4 * b + 8),
    )


def encoder_layer(vision: VisionShape, numerics: Numerics) -> LayerBytes:
    """Of one block of a vision encoder whose attention is torch's own, per encoder token.

    Keys and values stay views of one tensor of width 3 w; the parts of windowed attention are
    joined in one more. Under autocast its residual stream is bfloat16. An encoder without a gate
    is counted with the layer norms that such encoders have.
    """
    b, w = compute_bytes(numerics), vision.width
    gated = vision.mlp_matrices == 3
    consumers = 2 if gated else 1
    norms = norm_bytes(w, numerics=numerics, residual=b, consumers=1)
    norms += norm_bytes(w, numerics=numerics, residual=b, consumers=consumers)
    if not gated:  # Layer norms save no normalised form.
        norms -= 2 * b * w
    attention = b * w + 4 * vision.heads
    mlp = (4 if gated else 2) * b * vision.mlp_width
    return LayerBytes(
        saved=norms + attention + 6 * b * w + mlp,
        input=b * w,
        input_is_saved=b == 4,
        attention=attention,
        mlp=mlp,
        gradients=mlp // 2 + b * w,
        exchange=0,
    )


def encoder_forward_bytes(vision: VisionShape, numerics: Numerics) -> int:
    """Per encoder token: what a block holds where its queries and keys are turned, in float32.

    The residual stream and its sum, the norm's result, queries, keys and values; and in float32
    the queries and keys (in low precision copies), their products and the first sum.
    """
    b, w = compute_bytes(numerics), vision.width
    turned = 4 * w * (4 if numerics == "float32" else 6)
    return 2 * b * w + 4 * w + 3 * b * w + turned


def merger_bytes(vision: VisionShape, numerics: Numerics, *, width: int) -> int:
    """Per encoder token: the merger's own layers, and the rows that go into the language model.

    Args:
        vision: The encoder.
        numerics: Of the model.
        width: Of the language model.
    """
    b, group = compute_bytes(numerics), vision.merge**2
    total = norm_bytes(vision.width, numerics=numerics, residual=b, consumers=1) * group
    for projection in vision.projections[:-1]:
        total += 2 * b * projection.outputs * (group if projection.rows == "patch" else 1)
    total += (2 if numerics == "bfloat16" else 4) * width
    return -(-total // group)


def patch_bytes(vision: VisionShape, numerics: Numerics) -> int:
    """Per encoder token: its pixels in float32, and joined in the type that is convolved."""
    return vision.patch_width * (4 + compute_bytes(numerics))


def table_bytes(head_width: int, numerics: Numerics) -> int:
    """Per token: cosines and sines of its position."""
    return 2 * head_width * (2 if numerics == "bfloat16" else 4)


class LossBytes(NamedTuple):
    """Bytes of the chunked loss."""

    forward: int
    """Of a chunk's logits and their log-softmax."""
    backward: int
    """Of a chunk's log-softmax, its gradient and the logits', and of the head's gradient."""
    token: int
    """Per token: the last norm, the rows that have a target, and their gradients."""
    norm: int
    """Per token: in the last norm's backward."""


def loss_bytes(text: TextShape, numerics: Numerics, *, chunk: int) -> LossBytes:
    """Of `dynapar.runtime.loss`, whose chunks are recomputed in backward.

    Args:
        text: The language model.
        numerics: Of the model.
        chunk: Tokens whose logits exist at a time.
    """
    h, head = text.width, text.width * text.vocabulary
    logits = 4 * chunk * text.vocabulary
    gradient = {"float32": 4 * head, "autocast": 6 * head, "bfloat16": 2 * head}[numerics]
    token = {"float32": 20 * h, "autocast": 16 * h, "bfloat16": 12 * h}[numerics]
    cast = 2 * head if numerics == "autocast" else 0
    return LossBytes(2 * logits + cast, 3 * logits + gradient, token, 24 * h)
