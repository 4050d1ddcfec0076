"""Costs of any catalog model on a device that nobody has measured yet.

Rates are the vendor's peaks times `EFFICIENCY`, which is chosen so that a 7B model on an H100 comes
out near the shipped reference; nothing here is measured, and the costs say so. What the form of a
cost file cannot express is counted from above or left out:

- windowed layers count as linear work over their whole window, which is too much for samples
  shorter than the window; so do those of audio encoders, over windows that are full;
- layers of cross-attention (Llama 3.2 Vision) count as linear work, over the keys of one image for
  every token: too much for samples without images, too little for those with several. The matrices
  that make the keys count with the encoder, whose tokens they are;
- the output layer is left out, as in all costs: it runs for targets alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from dynapar.costs import (
    AttentionCosts,
    Costs,
    EncoderCosts,
    ExchangeCosts,
    FixedCosts,
    LinearCosts,
    ShardedCosts,
    StepCosts,
    load_costs,
)
from dynapar.errors import CostsError
from dynapar.flops import Part, Work, linear_parameters, sample_work
from dynapar.shapes import MediaTokens, ModelShape, TextShape


class Device(NamedTuple):
    """Peak rates of one accelerator, from its data sheet."""

    flops: float
    """Dense bf16 FLOPs per second."""
    node_bytes: float
    """Bytes per second to the other ranks of a node, one way."""
    network_bytes: float
    """Bytes per second to other nodes, one way, of its share of the node's network."""


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "A100": Device(312e12, 300e9, 25e9),
        "H100": Device(989e12, 450e9, 50e9),
        "H200": Device(989e12, 450e9, 50e9),
    }
)
"""SXM boards, with a network card of 200 (A100) or 400 Gbit/s for each. An H200 computes like an
H100; it holds more, which is a matter of capacity."""


class Efficiency(NamedTuple):
    """Which share of each peak is reached, far from small sizes."""

    linear: float
    attention: float
    encoder: float
    node: float
    network: float


EFFICIENCY = Efficiency(linear=0.40, attention=0.30, encoder=0.22, node=0.45, network=0.80)
LAYER_SECONDS = 0.0006
"""Overhead of a microbatch for each layer of LLM and encoder."""
HALF_RATE_TOKENS, HALF_RATE_SEGMENT, HOP_SECONDS = 64.0, 256.0, 1e-5
"""As in the reference: tokens at half rate of linear layers, of attention; latency of a hop."""
PARAMETER_BYTES, REFERENCE_PARAMETERS = 2, 6.8e9
"""Bytes of a gathered parameter; parameters of the reference, by which the closing pass scales."""
TYPICAL_IMAGE = (1024, 1024)
"""Height and width of the image by which an encoder token's work is counted."""
TYPICAL_SECONDS = 30.0
"""Length of the audio clip by which an encoder token's work is counted."""
SCORES, WEIGHTS = 3.5, 6.0
"""FLOPs forward and backward: of scores, over their forward; of weights, for each parameter."""


def costs_for(shape: ModelShape, device: str) -> Costs:
    """Costs of a model on a device, from peak rates and stated efficiencies.

    Args:
        shape: The model.
        device: One of `DEVICES`.

    Returns:
        Costs named "MODEL@DEVICE", marked as not measured.

    Raises:
        CostsError: The device is unknown.
    """
    peak = DEVICES.get(device.upper())
    if peak is None:
        close = difflib.get_close_matches(device.upper(), DEVICES, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise CostsError(
            f"device {device!r} is unknown; expected one of {', '.join(DEVICES)}{hint} Calibrate "
            f"to get costs of another"
        )
    text, encoder = shape.text, _encoder(shape, peak)
    full = text.layers - text.cross_layers - text.window_layers
    total, encoder_total = total_parameters(text), encoder_parameters(shape)
    closing = load_costs(None).step
    scale = (total + encoder_total) / REFERENCE_PARAMETERS
    return Costs(
        name=f"{shape.name}@{device.upper()}",
        measured=False,
        linear=LinearCosts(
            parameters=_passed_parameters(shape),
            flops=peak.flops * EFFICIENCY.linear,
            half_rate_tokens=HALF_RATE_TOKENS,
        ),
        attention=AttentionCosts(
            layers=full,
            hidden=text.heads * text.head_width,
            flops=peak.flops * EFFICIENCY.attention,
            half_rate_tokens=HALF_RATE_SEGMENT,
        ),
        exchange=ExchangeCosts(
            layers=text.layers - text.cross_layers,
            kv_bytes_per_token=2.0 * text.kv_heads * text.head_width * PARAMETER_BYTES,
            needed_share=0.75,
            passes=3.0,
            bytes_per_s_in_node=peak.node_bytes * EFFICIENCY.node,
            bytes_per_s_across=peak.network_bytes * EFFICIENCY.network,
            latency=HOP_SECONDS,
        ),
        encoder=encoder,
        audio=_audio_encoder(shape, peak),
        fixed=FixedCosts(microbatch=LAYER_SECONDS * (text.layers + shape.vision.layers)),
        sharded=ShardedCosts(
            bytes_per_s=peak.network_bytes,
            llm_bytes=3.0 * PARAMETER_BYTES * total,
            encoder_bytes=3.0 * PARAMETER_BYTES * encoder_total,
        ),
        step=StepCosts(
            closing_step=closing.closing_step * scale,
            closing_microbatch=closing.closing_microbatch * scale,
        ),
    )


def total_parameters(text: TextShape) -> float:
    """Weights of the language model, with embedding, output layer and all experts.

    Args:
        text: Its shape.
    """
    unused = text.experts - text.active_experts
    experts = text.mlp_matrices * text.expert_layers * unused * text.width * text.expert_width
    tables = text.vocabulary * text.width * (1 if text.tied else 2)
    return float(linear_parameters(text) + experts + tables + _cross_parameters(text))


def _cross_parameters(text: TextShape) -> int:
    """Of the layers that attend to the encoder's tokens, which text alone passes over."""
    queries, shared = text.heads * text.head_width, text.kv_heads * text.head_width
    layer = 2 * (queries + shared) + text.mlp_matrices * text.mlp_width
    return text.cross_layers * text.width * layer


def _passed_parameters(shape: ModelShape) -> float:
    """Parameters that a token passes, and windowed scores and those of cross-attention as more."""
    text = shape.text
    queries = text.heads * text.head_width
    pairs = (text.window / 2 if text.chunked else text.window) * text.window_layers
    matrices = _cross_parameters(text) - _key_parameters(text)
    pairs += text.cross_layers * (shape.image(*TYPICAL_IMAGE).keys if text.cross_layers else 0)
    slower = EFFICIENCY.linear / EFFICIENCY.attention
    return linear_parameters(text) + matrices + SCORES / WEIGHTS * 4.0 * pairs * queries * slower


def _key_parameters(text: TextShape) -> int:
    """Of the matrices that make keys and values of the encoder's tokens."""
    return 2 * text.cross_layers * text.width * text.kv_heads * text.head_width


def _encoder(shape: ModelShape, peak: Device) -> EncoderCosts:
    if shape.family.image is None:
        return EncoderCosts()
    vision, image = shape.vision, shape.image(*TYPICAL_IMAGE)
    work = _encoder_work(shape, image, "vision")
    tokens = image.units * image.unit_tokens
    layers = len(vision.full_layers) if vision.window else vision.layers
    whole = 4 * layers * vision.width * image.unit_tokens**2 * image.units
    windowed = (sum(row.scores for row in work) - whole) / tokens
    keys = _key_parameters(shape.text) * image.keys * EFFICIENCY.encoder / EFFICIENCY.linear
    passed = (sum(row.linear for row in work) / 2 + keys) / tokens
    return EncoderCosts(
        parameters=passed + SCORES / WEIGHTS * windowed,
        layers=layers,
        hidden=vision.width,
        flops=peak.flops * EFFICIENCY.encoder,
    )


def _audio_encoder(shape: ModelShape, peak: Device) -> EncoderCosts | None:
    """All of it linear, since an audio encoder attends inside windows."""
    if shape.family.audio is None:
        return None
    clip = shape.audio(TYPICAL_SECONDS)
    work = _encoder_work(shape, clip, "audio")
    passed = sum(row.linear / 2 + SCORES / WEIGHTS * row.scores for row in work)
    rate = peak.flops * EFFICIENCY.encoder
    return EncoderCosts(parameters=passed / clip.unit_tokens, flops=rate)


def _encoder_work(shape: ModelShape, item: MediaTokens, part: Part) -> list[Work]:
    rows = sample_work(shape, item.llm_tokens, [item], head_rows=0)
    return [row for row in rows if row.part in (part, "merger")]


def encoder_parameters(shape: ModelShape) -> float:
    """Weights of the encoders, with their mergers.

    Args:
        shape: The model.
    """
    vision = shape.vision
    layer = 4 * vision.width**2 + vision.mlp_matrices * vision.width * vision.mlp_width
    merger = sum(projection.inputs * projection.outputs for projection in vision.projections)
    seen = vision.layers * layer + merger + vision.patch_width * vision.width
    if (audio := shape.audio_encoder) is None:
        return float(seen)
    layer = 4 * audio.width**2 + 2 * audio.width * audio.mlp_width
    merger = sum(projection.inputs * projection.outputs for projection in audio.projections)
    convolutions = 3 * audio.width * (audio.mels + audio.width)
    return float(seen + audio.layers * layer + merger + convolutions)
