"""The step that all others are measured by: one process, each sample alone, unpacked.

It goes through the model's own forward, with the model's own position ids, merging of media and
masks, and shares nothing with the planned execution but the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.runtime.adapter import find_decoder, find_family


def count_targets(samples: Sequence[LoadedSample]) -> int:
    """The positions of all samples that have a loss."""
    return sum(int((sample.targets != IGNORE).sum()) for sample in samples)


def reference_step(
    model: PreTrainedModel,
    samples: Sequence[LoadedSample],
    *,
    targets: int,
    autocast: torch.dtype | None = None,
) -> float:
    """Loss and gradient of a global batch; the gradient is added to the parameters'.

    Sets the model's attention to torch's scaled dot product, or to plain matrix products for the
    models that this is not made for (softcap, sinks).

    Args:
        model: The whole model.
        samples: All samples of the batch, each with all its encoder units.
        targets: N, by which the sum of token losses is divided.
        autocast: Run the model under autocast to this type.

    Returns:
        The sum of token losses / N.
    """
    family = find_family(model)
    text = "sdpa" if find_decoder(model)._supports_sdpa else "eager"
    names = {"": text} if family is None else {"": text, "text_config": text}
    model.set_attn_implementation(names if family is None else {**names, "vision_config": "sdpa"})
    device, total = model.device, 0.0
    for sample in samples:
        inputs = {} if family is None else family.whole_inputs(sample)
        enabled = autocast is not None
        with torch.autocast(device.type, dtype=autocast, enabled=enabled):
            logits = model(
                input_ids=sample.input_ids[None].to(device),
                use_cache=False,
                **{
                    name: value.to(device, model.dtype if value.is_floating_point() else None)
                    for name, value in inputs.items()
                },
            ).logits[0]
        # Not the model's own loss: it rounds logits to float32 and averages over the sample.
        loss = functional.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
            sample.targets.to(device),
            ignore_index=IGNORE,
            reduction="sum",
        )
        if loss.requires_grad:
            (loss / max(targets, 1)).backward()
        total += float(loss.detach())
    return total / max(targets, 1)


class Widening(TorchFunctionMode):
    """Make the float32 islands of a float64 model (norms, rotary tables, softmax) float64.

    Without it a model in float64 rounds to float32 on its way, and differences vanish, or grow to
    1e-7 where a rounding tips over. Modes are off during backward, so it does not reach layers
    that are recomputed. Build the model outside of it: initialisation may draw other numbers.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` with float32 replaced by float64 wherever it is named."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*map(wide, args), **{k: wide(x) for k, x in (kwargs or {}).items()})
