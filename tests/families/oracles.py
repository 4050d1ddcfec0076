"""Token counts by transformers' own processors, without pixels.

Classes that import torchvision are loaded with an empty one, since torchvision resizes pixels and
decides no size. Methods run on a stand-in for `self` where the class cannot be made without a
tokenizer.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.image_utils import ChannelDimension, SizeDict
from transformers.models.gemma3 import image_processing_pil_gemma3 as gemma3_images
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as internvl_images
from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics_images
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.mllama import image_processing_pil_mllama as mllama_images
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral_images
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm import image_processing_pil_smolvlm as smolvlm_images

from dynapar.families.presets import Preset


class Count(NamedTuple):
    """What an image becomes."""

    llm_tokens: int
    boundary_tokens: int
    units: int
    unit_tokens: int


Oracle = Callable[[int, int], Count]
"""(height, width) -> tokens; raises ValueError for what the processor refuses."""


@contextmanager
def empty_torchvision() -> Iterator[None]:
    """torchvision as names alone, while it is imported."""
    parts = ["torchvision", "transforms", "v2", "functional"]
    names = [".".join(parts[: n + 1]) for n in range(4)]
    before = {name: sys.modules.get(name) for name in names}
    stubs = [types.ModuleType(name) for name in names]
    for parent, child, part in zip(stubs, stubs[1:], parts[1:], strict=False):
        setattr(parent, part, child)
    sys.modules.update(zip(names, stubs, strict=True))
    try:
        yield
    finally:
        for name, stub in before.items():
            if stub is None:
                del sys.modules[name]
            else:
                sys.modules[name] = stub


def load(family: str, stem: str) -> ModuleType:
    """A module of transformers under another name, with an empty torchvision."""
    path = Path(transformers.__file__).parent / "models" / family / f"{stem}.py"
    name = f"transformers.models.{family}.{stem}_for_tests"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # transformers looks its source up
    with empty_torchvision():
        spec.loader.exec_module(module)
    return module


def blank(height: int, width: int) -> np.ndarray[Any, Any]:
    """Pixels that take no memory, channels first."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


def special_tokens(text: str) -> tuple[int, int]:
    """Line breaks, which join, and special tokens in angle brackets, of a processor's text."""
    return len(re.findall(r"\n+", text)), len(re.findall(r"<[^>]*>", text))


def qwen(preset: Preset, patch: int) -> Oracle:
    cls: Any = Qwen2VLImageProcessorPil
    processor = cls(patch_size=patch, **preset.image)

    def count(height: int, width: int) -> Count:
        patches = processor.get_number_of_image_patches(height, width)
        return Count(patches // 4, 2, 1, patches)

    return count


def internvl(preset: Preset) -> Oracle:
    cls: Any = internvl_images.GotOcr2ImageProcessorPil
    processor = cls(**preset.image)
    replacer: Any = SimpleNamespace(
        start_image_token="<a>", image_token="<i>", end_image_token="<b>", image_seq_length=256
    )

    def count(height: int, width: int) -> Count:
        tiles = processor.get_number_of_image_patches(height, width)
        given = {"num_patches": [tiles]}
        text = InternVLProcessor.replace_image_token(replacer, given, 0)
        return Count(text.count("<i>"), len(text) // 3 - text.count("<i>"), tiles, 1025)

    return count


def llava_onevision(preset: Preset) -> Oracle:
    cls: Any = LlavaOnevisionImageProcessorPil
    images = cls(**preset.image)
    processor: Any = SimpleNamespace(
        image_processor=images, num_image_tokens=729, vision_aspect_ratio="anyres_max_9"
    )
    processor._get_unpadded_features = types.MethodType(
        LlavaOnevisionProcessor._get_unpadded_features, processor
    )
    best = sys.modules[LlavaOnevisionProcessor.__module__].select_best_resolution

    def count(height: int, width: int) -> Count:
        features = LlavaOnevisionProcessor._get_number_of_features(
            processor, height, width, 384, 384
        )
        high, wide = best([height, width], images.image_grid_pinpoints)
        return Count(features, 0, high // 384 * (wide // 384) + 1, 729)

    return count


def gemma3(preset: Preset) -> Oracle:
    cls: Any = gemma3_images.Gemma3ImageProcessorPil
    processor = cls(**preset.image)

    def count(height: int, width: int) -> Count:
        crops = 0
        if processor.do_pan_and_scan:
            found = processor.pan_and_scan(
                blank(height, width),
                processor.pan_and_scan_min_crop_size,
                processor.pan_and_scan_max_num_crops,
                processor.pan_and_scan_min_ratio_to_activate,
            )
            crops = len(found)
        return Count(256 * (1 + crops), 4 if crops == 0 else -1, 1 + crops, 4096)

    return count


def mllama(preset: Preset) -> Oracle:
    tiles, edge = 4, 560
    cls: Any = mllama_images.MllamaImageProcessorPil
    processor = cls(**preset.image)
    assert (processor.max_image_tiles, processor.size["height"]) == (tiles, edge)

    def count(height: int, width: int) -> Count:
        mllama_images.get_optimal_tiled_canvas(height, width, tiles, edge)
        return Count(1, 0, 1, tiles * 1608)

    return count


def mllama_canvas(height: int, width: int) -> tuple[int, int]:
    """Pixels of the canvas that a picture is scaled to."""
    high, wide = mllama_images.get_optimal_tiled_canvas(height, width, 4, 560)
    return int(high), int(wide)


def llama4(preset: Preset) -> Oracle:
    module = load("llama4", "image_processing_llama4")
    size = SizeDict(height=336, width=336)
    resolutions = torch.tensor(module.find_supported_resolutions(16, size))
    replacer: Any = SimpleNamespace()

    def count(height: int, width: int) -> Count:
        high, wide = module.get_best_fit((height, width), resolutions).tolist()
        ratio = high // 336, wide // 336
        text = Llama4Processor._prompt_split_image(replacer, ratio, 144)
        placeholders = text.count("<|patch|>")
        tiles = placeholders // 144
        return Count(placeholders, special_tokens(text)[1] - placeholders, tiles, 577)

    return count


def pixtral(preset: Preset, patch: int, merge: int) -> Oracle:
    edge = preset.image["size"]["longest_edge"]  # type: ignore[index]
    processor = load("pixtral", "processing_pixtral").PixtralProcessor
    replacer: Any = SimpleNamespace(
        patch_size=patch,
        spatial_merge_size=merge,
        image_token="<i>",
        image_break_token="<b>",
        image_end_token="<e>",
    )

    def count(height: int, width: int) -> Count:
        high, wide = pixtral_images.get_resize_output_image_size(
            blank(height, width), (edge, edge), (patch * merge,) * 2, ChannelDimension.FIRST
        )
        if min(high, wide) < 1:
            raise ValueError("nothing is left of it")
        text = processor.replace_image_token(replacer, {"image_sizes": [(high, wide)]}, 0)
        placeholders = text.count("<i>")
        patches = high // patch * (wide // patch)
        return Count(placeholders, len(text) // 3 - placeholders, 1, patches)

    return count


def idefics3(preset: Preset, tokens: int, unit: int, *, smol: bool) -> Oracle:
    cls: Any = idefics_images.Idefics3ImageProcessorPil
    if smol:
        cls = smolvlm_images.SmolVLMImageProcessorPil

    class Sized(cls):  # type: ignore[misc]
        """Resizes to pixels that take no memory."""

        def resize(self, image: Any, size: Any, resample: Any = None, **rest: Any) -> Any:
            if size.longest_edge:
                module: Any = sys.modules[cls.__module__]
                high, wide = module.get_resize_output_image_size(image, size.longest_edge)
                return blank(high, wide)
            return blank(size.height, size.width)

    given = {key: value for key, value in preset.image.items() if key != "video_sampling"}
    processor: Any = Sized(**given)
    replacer: Any = SimpleNamespace(
        fake_image_token="<f>", global_image_tag="<g>", image_token="<i>", image_seq_len=tokens
    )

    def count(height: int, width: int) -> Count:
        image = processor.resize(blank(height, width), processor.size)
        edge = processor.max_image_size["longest_edge"]
        image = processor.resize_for_vision_encoder(image, edge)
        frames, rows, columns = processor.split_images(image, processor.max_image_size)
        text = Idefics3Processor.replace_image_token(
            replacer, {"rows": [[rows]], "cols": [[columns]]}, 0
        )
        placeholders = text.count("<i>")
        breaks, special = special_tokens(text)
        return Count(placeholders, special - placeholders + breaks, len(frames), unit)

    return count


def oracle(preset: Preset) -> Oracle:
    """The processor of a preset."""
    kind = preset.config["model_type"]
    vision: Any = preset.config.get("vision_config") or {}
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        return qwen(preset, 14)
    if kind in ("qwen3_vl", "qwen3_vl_moe"):
        return qwen(preset, 16)
    if kind == "qwen2_5_omni":
        image = {key: value for key, value in preset.image.items() if key != "chunk_length"}
        return qwen(preset._replace(image=image), 14)
    if kind == "llava":
        return pixtral(preset, 16, 1)
    if kind == "mistral3":
        return pixtral(preset, 14, 2)
    if kind in ("idefics3", "smolvlm"):
        edge: int = preset.image["max_image_size"]["longest_edge"]  # type: ignore[index]
        side = edge // vision["patch_size"]
        merge: Any = preset.config["scale_factor"]
        tokens = side**2 // merge**2
        return idefics3(preset, tokens, side**2, smol=kind == "smolvlm")
    simple: dict[str, Callable[[Preset], Oracle]] = {
        "internvl": internvl,
        "llava_onevision": llava_onevision,
        "gemma3": gemma3,
        "mllama": mllama,
        "llama4": llama4,
    }
    return simple[str(kind)](preset)
