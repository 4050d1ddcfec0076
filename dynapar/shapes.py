"""The shape of a model: what its media become in tokens, patches and encoder units.

Everything follows from sizes that stand in file headers; nothing is decoded, and neither torch nor
transformers is imported.

An *encoder unit* is what one rank encodes whole: an image, or a temporal group of a video (the
frames that one patch spans in time).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

IMAGE_KIND, VIDEO_KIND = 1, 2
"""Kinds of media, in the numbering of transformers' `mm_token_type_ids`; 0 is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShape:
    """The language model, as far as costs and bytes depend on it."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    tied: bool
    """Whether the output layer is the embedding table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The vision encoder."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    patch: int
    """Pixels along one side of a patch."""
    frames: int
    """Video frames that one patch spans."""
    merge: int
    """Patches along one side that become one LLM token."""
    window: int
    """Patches along one side of an attention window; 0: no windows."""
    full_layers: tuple[int, ...]
    """Layers that attend over the whole unit; the others inside windows."""
    tokens_per_second: int
    """mRoPE time steps in one second of video."""

    @property
    def patch_width(self) -> int:
        """Numbers in one patch: colours x frames x rows x columns."""
        return 3 * self.frames * self.patch * self.patch


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRules:
    """How pixels are resized and scaled before they are cut into patches."""

    min_pixels: int
    """Of one image or frame after resizing."""
    max_pixels: int
    """Of one image or frame after resizing."""
    mean: tuple[float, float, float]
    """Subtracted from each colour after scaling."""
    std: tuple[float, float, float]
    """Divides each colour after the mean is subtracted."""
    scale: float
    """Multiplies the bytes first; 1 / 255 as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRules:
    """Which frames of a video are used."""

    fps: float
    """Frames taken from one second."""
    count: int | None
    """Frames taken whatever the length; replaces `fps`."""
    min_frames: int
    max_frames: int
    budget_tokens: int | None
    """With it, frames share the pixels of this many LLM tokens (`cap_pixels_per_frame`)."""


class SpecialTokens(NamedTuple):
    """Ids of the tokens that stand for media."""

    image: int
    video: int
    vision_start: int
    vision_end: int


class MediaTokens(NamedTuple):
    """What one image or video becomes."""

    kind: int
    """IMAGE_KIND or VIDEO_KIND."""
    size: tuple[int, int]
    """Pixels after resizing: height, width."""
    grid: tuple[int, int, int]
    """Patches: temporal groups, rows, columns."""
    llm_tokens: int
    """Placeholders in the text, without the boundary tokens around them."""
    frames: tuple[int, ...]
    """Indices of the frames used, ascending; empty for an image."""
    seconds_per_group: float
    """Time between temporal groups; 0.0 for an image."""

    @property
    def units(self) -> int:
        """Encoder units: 1 for an image, the temporal groups of a video."""
        return self.grid[0]

    @property
    def unit_tokens(self) -> int:
        """Encoder tokens of each unit."""
        return self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model: its family, its sizes, and the rules of its processor."""

    name: str
    """Name of the preset, or of the folder that it was read from."""
    family: Family
    """The formulas."""
    folder: Path | None
    """Where its files are; None for a preset, which has no tokenizer."""
    text: TextShape
    vision: VisionShape
    image_rules: PixelRules
    video_rules: PixelRules
    frame_rules: FrameRules
    tokens: SpecialTokens

    def image(self, height: int, width: int) -> MediaTokens:
        """Tokens of an image of `height` x `width` pixels.

        Raises:
            SampleError: The size is not positive, or one side is over 200 times the other.
        """
        return self.family.image(self, height, width)

    def video(self, frames: int, fps: float, height: int, width: int) -> MediaTokens:
        """Tokens of a video; `frames` and `fps` are the file's, before sampling.

        Raises:
            SampleError: It has no frames or no frame rate, or its size is not possible.
        """
        return self.family.video(self, frames, fps, height, width)

    def settings(self) -> dict[str, str]:
        """All that token counts and pixels depend on; an index is valid for equal settings only."""
        flat = {"family": self.family.name}
        vision = self.vision
        flat |= {f"vision.{k}": str(getattr(vision, k)) for k in ("patch", "frames", "merge")}
        for name, rules in (("image", self.image_rules), ("video", self.video_rules)):
            flat |= {f"{name}.{k}": str(getattr(rules, k)) for k in PixelRules.__slots__}
        flat |= {f"video.{k}": str(getattr(self.frame_rules, k)) for k in FrameRules.__slots__}
        flat |= {f"tokens.{k}": str(v) for k, v in self.tokens._asdict().items()}
        return flat


class Family(NamedTuple):
    """The formulas that a family of models shares."""

    name: str
    """`model_type` of config.json."""
    image: Callable[[ModelShape, int, int], MediaTokens]
    """(shape, height, width)."""
    video: Callable[[ModelShape, int, float, int, int], MediaTokens]
    """(shape, frames, fps, height, width), the file's."""
    default_system: str
    """The system turn that the chat format adds where a conversation has none; may be empty."""
