"""What a step needs from a model of transformers, beyond what all of them offer alike.

Embedding, language model, head and sliding windows are found through common attributes. A family
adds how its encoder is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dynapar.attention.bands import Bands, causal
from dynapar.attention.bands import window as sliding
from dynapar.data.samples import IMAGE_KIND, TEXT_KIND, VIDEO_KIND, LoadedSample
from dynapar.errors import ModelError
from dynapar.runtime.attention_interface import NAME, register
from dynapar.runtime.layout import BoundLayout, Unit

Encode = Callable[[PreTrainedModel, Sequence[Unit]], Tensor]
"""(model, units) -> (rows of all units in order, width); one call of the encoder."""


def _encode_qwen(model: PreTrainedModel, units: Sequence[Unit]) -> Tensor:
    """Images and groups of video frames in one call: their code paths are the same."""
    visual = model.model.visual
    grids = torch.tensor([unit.grid for unit in units], device=visual.device)
    patches = torch.cat([unit.patches for unit in units]).to(visual.device, visual.dtype)
    rows = visual(patches, grid_thw=grids, return_dict=True).pooler_output
    return rows if torch.is_tensor(rows) else torch.cat(tuple(rows))


def _qwen_inputs(sample: LoadedSample) -> dict[str, Tensor]:
    inputs = {"mm_token_type_ids": sample.kinds[None]}
    for kind, pixels, grid in (
        (IMAGE_KIND, "pixel_values", "image_grid_thw"),
        (VIDEO_KIND, "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in sample.media if item.kind == kind]
        if not items:
            continue
        owner = [item.kind for item in sample.media for _ in range(item.units)]
        inputs[pixels] = torch.cat([sample.units[n] for n, k in enumerate(owner) if k == kind])
        inputs[grid] = torch.tensor([item.grid for item in items])
        if kind == VIDEO_KIND:
            inputs["second_per_grid_ts"] = torch.tensor([item.seconds_per_group for item in items])
    return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What differs between families of models."""

    encode: Encode
    encoder: str
    """Path of the encoder, projector included, inside the model."""
    whole_inputs: Callable[[LoadedSample], dict[str, Tensor]]
    """What the model's own forward takes for a whole sample beside its token ids."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"qwen2_5_vl": Family(encode=_encode_qwen, encoder="model.visual", whole_inputs=_qwen_inputs)}
)
"""By `model_type` of the model's configuration. A model without media needs no entry."""


class Adapter:
    """The parts of a model that a microbatch calls one by one.

    Attributes:
        model: The whole model, its text layers on dynapar's attention.
        windows: The distinct sliding windows of its attention layers; None is no window.
        encoder_is_trained: Whether a parameter that media pass before the language model is.
    """

    def __init__(self, model: PreTrainedModel):
        """Take over a model's text attention.

        Raises:
            ModelError: The model has media of an unknown family, or uses dropout.
        """
        self.model = model
        self.family = find_family(model)
        self.encoder_is_trained = self.family is not None and any(
            parameter.requires_grad
            for parameter in model.get_submodule(self.family.encoder).parameters()
        )
        self.windows = _windows(model)
        _refuse_dropout(model)
        register()
        self.use_attention(NAME)

    def use_attention(self, name: str) -> None:
        """Set the text layers' attention; a plain string would set the encoder's, too."""
        if self.family is None:
            self.model.set_attn_implementation(name)
        else:
            self.model.set_attn_implementation(
                {"": name, "text_config": name, "vision_config": "sdpa"}
            )

    def bands(self, sample: LoadedSample, window: int | None) -> Bands:
        """The mask of one sample in the layers with this sliding window."""
        length = len(sample.input_ids)
        return causal(length) if window is None else sliding(length, width=window)

    def embed(self, input_ids: Tensor, kinds: Tensor) -> Tensor:
        """(n,) to (n, width); rows of placeholders are replaced later, their ids may be any."""
        embedded: Tensor = self.model.get_input_embeddings()(
            input_ids.masked_fill(kinds != TEXT_KIND, 0)
        )
        return embedded

    def encode(self, units: Sequence[Unit]) -> Tensor:
        """(rows of all units in order, width), in one call of the encoder."""
        if self.family is None:
            raise ModelError(
                f"a sample has media, and model type {self.model.config.model_type!r} has none; "
                f"expected one of {sorted(FAMILIES)}"
            )
        return self.family.encode(self.model, units)

    def hidden(self, embeds: Tensor, positions: Tensor, plan: BoundLayout) -> Tensor:
        """The language model: (n, width) and (1 or 3, n) position ids to (n, width)."""
        states: Tensor = self.model.get_decoder()(
            inputs_embeds=embeds[None],
            position_ids=positions if len(positions) == 1 else positions[:, None],
            attention_mask=None,
            use_cache=False,
            dynapar_plan=plan,
        ).last_hidden_state
        return states[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, width) to (n, vocabulary)."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        logits: Tensor = head(hidden)
        return logits


def find_family(model: PreTrainedModel) -> Family | None:
    """The model's family, or None for a text model.

    Raises:
        ModelError: The model has media and its family is unknown.
    """
    config = model.config
    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type]
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise ModelError(
            f"model type {config.model_type!r} has media that this version cannot run; "
            f"expected one of {sorted(FAMILIES)} or a text model"
        )
    return None


def _windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """In the order of the layers, each once."""
    layers = model.get_decoder().layers
    found = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    return tuple(dict.fromkeys(found))


def _refuse_dropout(model: PreTrainedModel) -> None:
    """Dropout draws other numbers in every layout, so no layout would give the same gradient."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                f"{name} has dropout {module.p}; expected 0, since dropout depends on the layout. "
                "Set it to 0 in the model's configuration"
            )
