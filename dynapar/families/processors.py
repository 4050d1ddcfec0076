"""What the readers of all families take from processor files: colours, limits, frames."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dynapar.errors import ModelError
from dynapar.modelfiles import Section
from dynapar.shapes import FrameRules, PixelRules

CLIP: Mapping[str, object] = MappingProxyType(
    {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "rescale_factor": 1 / 255,
    }
)
HALVES: Mapping[str, object] = MappingProxyType(
    {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
)
"""Colours, as the processor classes have them."""


def colour_rules(
    section: Section,
    colours: Mapping[str, object],
    *,
    limits: tuple[int, int] = (0, 0),
) -> PixelRules:
    """How pixels are scaled, and how many of them may be left.

    Args:
        section: The processor's.
        colours: Of its class, where the section is silent.
        limits: Fewest and most pixels, already read.

    Raises:
        ModelError: A value is out of range.
    """
    section = section.over(colours)
    mean, std = section.numbers("image_mean"), section.numbers("image_std")
    if len(mean) != 3 or len(std) != 3:
        raise ModelError(f"{section.place}: image_mean {mean} and image_std {std}; expected 3 each")
    return PixelRules(
        min_pixels=limits[0],
        max_pixels=limits[1],
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
        scale=section.number("rescale_factor"),
    )


def pixel_limits(section: Section, least: int, most: int) -> tuple[int, int]:
    """Fewest and most pixels; `least` and `most` where the section is silent (Qwen)."""
    size = section.section("size", {"shortest_edge": least, "longest_edge": most})
    low = section.integer("min_pixels", least=1) if "min_pixels" in section else None
    high = section.integer("max_pixels", least=1) if "max_pixels" in section else None
    return (
        size.integer("shortest_edge", least=1) if low is None else low,
        size.integer("longest_edge", least=1) if high is None else high,
    )


def frame_rules(section: Section, **defaults: float) -> FrameRules:
    """Which frames a video processor takes; `fps` 0 and no `num_frames`: all.

    Args:
        section: The processor's.
        defaults: `fps`, `min_frames`, `max_frames`, `max_video_tokens` of its class.
    """
    section = section.over(defaults)
    capped = section.flag("cap_pixels_per_frame")
    return FrameRules(
        fps=section.number("fps"),
        count=section.integer("num_frames", least=1) if "num_frames" in section else None,
        min_frames=section.integer("min_frames", least=1),
        max_frames=section.integer("max_frames", least=1),
        budget_tokens=section.integer("max_video_tokens", least=1) if capped else None,
    )
