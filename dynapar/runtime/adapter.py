"""What a step needs from a model of transformers, beyond what all of them offer alike.

Embedding, language model, head and mask classes are found through common attributes. A family adds
how its encoder is called. A model type that is not listed is refused: its masks, or what it does to
its logits, might differ without a sign.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dynapar.attention.bands import Bands, causal, chunked, spans, window
from dynapar.attention.trees import tree
from dynapar.data.samples import IMAGE_KIND, TEXT_KIND, VIDEO_KIND, LoadedSample
from dynapar.errors import ModelError
from dynapar.runtime.attention_interface import NAME, register
from dynapar.runtime.layout import BoundLayout, Unit
from dynapar.runtime.masks import MaskClass, masks_of

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


def _encode_gemma(model: PreTrainedModel, units: Sequence[Unit]) -> Tensor:
    """One image or crop for each unit; all of one size."""
    tower = model.model.vision_tower
    pixels = torch.stack([_pixels(unit) for unit in units]).to(tower.device, tower.dtype)
    rows: Tensor = model.model.get_image_features(pixels, return_dict=True).pooler_output
    return rows.flatten(0, 1)


def _pixels(unit: Unit) -> Tensor:
    """(3, height, width) from patches in rows, each flattened as colour, row, column."""
    _, rows, columns = unit.grid
    side = int((unit.patches.shape[1] // 3) ** 0.5)
    cut = unit.patches.reshape(rows, columns, 3, side, side)
    return cut.permute(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)


def _gemma_inputs(sample: LoadedSample) -> dict[str, Tensor]:
    inputs = {"token_type_ids": sample.kinds[None]}
    if sample.media:
        grids = [item.grid for item in sample.media]
        units = [Unit(grid, sample.units[number]) for number, grid in enumerate(grids)]
        inputs["pixel_values"] = torch.stack([_pixels(unit) for unit in units])
    return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What differs between families of models with media."""

    encode: Encode
    encoder: tuple[str, ...]
    """Paths, inside the model, of what media pass before the language model."""
    whole_inputs: Callable[[LoadedSample], dict[str, Tensor]]
    """What the model's own forward takes for a whole sample beside its token ids."""
    two_way_images: bool = False
    """Whether the tokens of an image see each other both ways."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma3": Family(
            encode=_encode_gemma,
            encoder=("model.vision_tower", "model.multi_modal_projector"),
            whole_inputs=_gemma_inputs,
            two_way_images=True,
        ),
        **dict.fromkeys(
            ("qwen2_vl", "qwen2_5_vl"),
            Family(encode=_encode_qwen, encoder=("model.visual",), whole_inputs=_qwen_inputs),
        ),
    }
)
"""By `model_type` of the model's configuration."""

TEXT_MODELS = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Values of `model_type` of the models without media that have been compared with themselves."""


class Adapter:
    """The parts of a model that a microbatch calls one by one.

    Attributes:
        model: The whole model, its text layers on dynapar's attention.
        masks: The distinct mask classes of its attention layers.
        encoder_is_trained: Whether a parameter that media pass before the language model is.
    """

    def __init__(self, model: PreTrainedModel):
        """Take over a model's text attention.

        Raises:
            ModelError: The model is of an unknown type, mixes tokens in a way that shards do not
                allow, has a loss beside that of its tokens, or uses dropout.
        """
        self.model = model
        self.family = find_family(model)
        self.encoder_is_trained = self.family is not None and any(
            parameter.requires_grad
            for path in self.family.encoder
            for parameter in model.get_submodule(path).parameters()
        )
        self.masks = masks_of(find_decoder(model))
        _refuse_dropout(model)
        _refuse_other_losses(model)
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

    def bands(self, sample: LoadedSample, mask: MaskClass) -> Bands:
        """The mask of one sample in the layers of a class.

        Raises:
            ModelError: The sample is a tree, and the layers' mask is none that trees have.
        """
        length = len(sample.input_ids)
        two_way = self.family is not None and self.family.two_way_images
        if sample.tree:
            if mask.chunk is not None or (two_way and sample.media):
                raise ModelError(
                    f"sample {sample.id!r} is a tree, and this model's layers attend by {mask} or "
                    "have images that see each other both ways; expected causal or sliding-window "
                    "layers. Give its branches as samples of their own"
                )
            tokens, parents = zip(*sample.tree, strict=True)
            return tree(tokens, parents, width=mask.window)
        if two_way:
            return spans(
                length, list(_images(sample)), width=mask.window, beyond_width=self._beyond_window
            )
        if mask.chunk is not None:
            return chunked(length, width=mask.chunk)
        return causal(length) if mask.window is None else window(length, width=mask.window)

    @property
    def _beyond_window(self) -> bool:
        """Whether a sliding window does not bound what an image's tokens see of their own image.

        Releases of transformers differ in this; the later rule came with this function.
        """
        # A wrapper of the model may have put a class of its own in front.
        modules = [sys.modules[kind.__module__] for kind in type(self.model.model).__mro__]
        return not any(hasattr(module, "create_masks_for_vision_model") for module in modules)

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
        states: Tensor = find_decoder(self.model)(
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
        config = self.model.config
        softcap: float | None = getattr(config, "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def find_family(model: PreTrainedModel) -> Family | None:
    """The model's family, or None for a text model.

    Raises:
        ModelError: The model's type is unknown.
    """
    kind = model.config.model_type
    if kind in FAMILIES:
        return FAMILIES[kind]
    if kind not in TEXT_MODELS:
        raise ModelError(
            f"model type {kind!r} cannot be run by this version; expected one of "
            f"{sorted((*FAMILIES, *TEXT_MODELS))}, whose masks and logits are known"
        )
    return None


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The language model without its head."""
    found: PreTrainedModel = model.get_decoder()
    # Llama 4 names its parts as if it were inside a model with media, so the search ends at itself.
    return model.model if found is model else found


def _images(sample: LoadedSample) -> Iterator[tuple[int, int]]:
    """(start, stop) of the runs of image tokens: adjacent images are one, as for the model."""
    start = 0
    for is_image, run in itertools.groupby((sample.kinds == IMAGE_KIND).tolist()):
        stop = start + sum(1 for _ in run)
        if is_image:
            yield start, stop
        start = stop


def _refuse_dropout(model: PreTrainedModel) -> None:
    """Dropout draws other numbers in every layout, so no layout would give the same gradient."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                f"{name} has dropout {module.p}; expected 0, since dropout depends on the layout. "
                "Set it to 0 in the model's configuration"
            )


def _refuse_other_losses(model: PreTrainedModel) -> None:
    """The losses of routers are made in the model's own forward, which a step does not call."""
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ModelError(
            "the model's configuration has output_router_logits true; expected false, since the "
            "loss of routers is not part of a step. Set it to false"
        )
