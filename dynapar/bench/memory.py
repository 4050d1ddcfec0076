"""Hold the memory model to peaks that real models reach, counted storage by storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dynapar.attention.exchange import Transport
from dynapar.bench.live_bytes import LiveBytes
from dynapar.catalog import shape_of_config
from dynapar.data.samples import IGNORE, IMAGE_KIND, LoadedSample, MediaShape
from dynapar.memory import POLICIES, MemoryModel, Policy
from dynapar.plan import MicroBatch, Parts, Placement
from dynapar.runtime import recompute
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor

IMAGE_ID = 310


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small model with random weights, and a microbatch of one sample."""

    name: str
    model: PreTrainedModel
    tokens: int
    sides: tuple[int, ...] = ()
    """Patches along the side of each (square) image."""
    low_precision: bool = False
    """Autocast to bfloat16."""
    chunk: int = 128
    """Of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Predicted and measured bytes of a microbatch under one policy."""

    case: str
    policy: Policy
    tokens: int
    encoder_tokens: int
    predicted: int
    """States included."""
    measured: int
    states: int
    """Parameters and gradients, as measured; there is no optimizer."""

    @property
    def error(self) -> float:
        """Of the whole, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def activations_error(self) -> float:
        """The same without the states."""
        return (self.predicted - self.states) / (self.measured - self.states) - 1


def text_model(
    kind: str = "qwen2", *, layers: int = 6, width: int = 256, mlp: int = 768, vocabulary: int = 512
) -> PreTrainedModel:
    """A small language model: "qwen2", or "llama" without biases."""
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": max(1, width // 128),
        "max_position_embeddings": 1 << 16,
    }
    model: PreTrainedModel = (
        Qwen2ForCausalLM(Qwen2Config(**values))
        if kind == "qwen2"
        else LlamaForCausalLM(LlamaConfig(**values))
    )
    model.train()
    return model


def vision_model(*, layers: int = 4, blocks: int = 8) -> PreTrainedModel:
    """A small Qwen2.5-VL."""
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": 512,
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": layers,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1 << 16,
                "bos_token_id": None,
                "eos_token_id": None,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [4, 6, 6],
                },
            },
            vision_config={
                "hidden_size": 160,
                "intermediate_size": 384,
                "depth": blocks,
                "num_heads": 4,
                "out_hidden_size": 256,
                "patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [3, 7],
                "tokens_per_second": 2,
            },
            image_token_id=IMAGE_ID,
            video_token_id=311,
            vision_start_token_id=312,
            vision_end_token_id=313,
        )
    )
    model.train()
    return model


def cases() -> Iterator[Case]:
    """What the published table measures."""
    for low in (False, True):
        name = "autocast" if low else "float32"
        yield Case(name=f"qwen2, {name}", model=text_model(), tokens=1000, low_precision=low)
        yield Case(
            name=f"llama, wide vocabulary, {name}",
            model=text_model("llama", vocabulary=8192, layers=4),
            tokens=1200,
            low_precision=low,
            chunk=512,
        )
        yield Case(
            name=f"qwen2, narrow MLP, {name}",
            model=text_model(width=384, mlp=640, layers=8),
            tokens=2000,
            low_precision=low,
        )
        yield Case(
            name=f"qwen2.5-vl, {name}",
            model=vision_model(),
            tokens=900,
            sides=(40, 24),
            low_precision=low,
        )


def measure(case: Case, policies: Sequence[Policy] = POLICIES) -> Iterator[Peak]:
    """Run a microbatch under each policy, forward and backward, gradients there already.

    Torch's default group of one rank must exist.
    """
    sample = sample_of(case)
    executor = StepExecutor(
        Adapter(case.model),
        transport=Transport(dist.new_group()),
        loss_chunk=case.chunk,
        autocast=torch.bfloat16 if case.low_precision else None,
    )
    config = case.model.config
    like = "qwen2.5-vl-7b" if case.sides else None
    model = MemoryModel(
        shape=shape_of_config(config, like=like),
        low_precision=case.low_precision,
        loss_chunk=case.chunk,
    )
    optimizer = model.states().optimizer
    targets = int((sample.targets != IGNORE).sum())
    encoded = sum(side * side for side in case.sides)
    run = executor.run
    run(
        executor.prepare_microbatches([microbatch_of(sample, "none")], {0: sample}), targets=targets
    )
    for policy in policies:
        queue = executor.prepare_microbatches([microbatch_of(sample, policy)], {0: sample})
        live = LiveBytes()
        held = [p for p in case.model.parameters()]
        live.hold([*held, *(p.grad for p in held if p.grad is not None)])
        states = live.live
        live.hold(sample.units.values())
        with live, patch.object(recompute, "to_host", _Away):
            run(queue, targets=targets)
        predicted = max(
            piece.fixed + piece.token * case.tokens + piece.encoder_token * encoded
            for piece in model.pieces(policy)[:-1]
        )
        yield Peak(
            case=case.name,
            policy=policy,
            tokens=case.tokens,
            encoder_tokens=encoded,
            predicted=predicted - optimizer,
            measured=live.peak,
            states=states,
        )


class _Away:
    """A copy that does not count, as the host's memory does not on a device."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.copy = tensor.contiguous().view(torch.uint8).numpy().copy()

    def to(self, device: torch.device, **_: bool) -> Tensor:
        """As `Tensor.to`."""
        back = torch.empty(self.shape, dtype=self.dtype, device=device)
        back.view(torch.uint8).numpy()[:] = self.copy
        return back


def sample_of(case: Case) -> LoadedSample:
    """The sample of a case, its images first."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (case.tokens,), generator=generator)
    kinds = torch.zeros_like(ids)
    media, units, place = [], {}, 1
    for number, side in enumerate(case.sides):
        rows = side * side // 4
        ids[place : place + rows], kinds[place : place + rows] = IMAGE_ID, IMAGE_KIND
        place += rows + 1
        units[number] = torch.randn(side * side, 3 * 2 * 14 * 14, generator=generator)
        media.append(MediaShape(IMAGE_KIND, (1, side, side), rows, 1, 0.0))
    targets = nn.functional.pad(ids[1:], (0, 1), value=IGNORE)
    planes = 3 if case.sides else 1
    return LoadedSample(
        id="s0",
        input_ids=ids,
        targets=targets,
        kinds=kinds,
        positions=torch.arange(case.tokens).expand(planes, -1).contiguous(),
        media=tuple(media),
        units=units,
    )


def microbatch_of(sample: LoadedSample, policy: Policy, *, rank: int = 0) -> MicroBatch:
    """One sample alone on a rank."""
    encoded = sum(len(unit) for unit in sample.units.values())
    return MicroBatch(
        ranks=(rank,),
        placements=(Placement(0, (rank,), (rank,) * len(sample.units)),),
        tokens_per_rank=(len(sample.input_ids),),
        encoder_tokens_per_rank=(encoded,),
        ticks=1,
        start=0,
        parts=Parts(1, 0, 0, 0, 0),
        recompute=policy,
    )
