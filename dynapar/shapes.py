"""The shape of a model: what its media become in tokens, patches and encoder units.

Everything follows from sizes that stand in file headers; nothing is decoded, and neither torch nor
transformers is imported.

An *encoder unit* is what one rank encodes whole: an image, a tile or crop of one, a temporal group
of a video (the frames that one patch spans in time), or an audio clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dynapar.errors import SampleError

IMAGE_KIND, VIDEO_KIND, AUDIO_KIND = 1, 2, 3
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
    mlp_matrices: int = 3
    """Of `mlp_width`: 3 for a gated MLP, 2 for a plain one."""
    window: int = 0
    """Tokens that the windowed layers see back, themselves included; 0: no such layers."""
    window_layers: int = 0
    """Layers with the window; the others see the whole sample."""
    chunked: bool = False
    """The window is a chunk with fixed borders, not one that slides."""
    two_way_media: bool = False
    """Tokens of one image see each other both ways."""
    expert_layers: int = 0
    """Layers whose MLP is a mixture of experts."""
    experts: int = 0
    active_experts: int = 0
    """Experts that a token passes."""
    expert_width: int = 0
    """MLP width of one expert."""
    shared_width: int = 0
    """MLP width of the expert that every token passes; 0: none."""
    cross_layers: int = 0
    """Layers, among `layers`, that attend to the encoder's tokens instead of the text's."""


class Projection(NamedTuple):
    """A matrix between the encoder and the language model."""

    inputs: int
    outputs: int
    rows: Literal["llm", "patch", "key"]
    """What it acts on: LLM tokens, patches, or the keys of cross-attention."""


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
    mlp_matrices: int = 2
    """Of `mlp_width`: 3 for a gated MLP, 2 for a plain one."""
    class_tokens: int = 0
    """Encoder tokens of a unit that are no patches."""
    projections: tuple[Projection, ...] = ()
    """The merger, in order."""

    @property
    def patch_width(self) -> int:
        """Numbers in one patch: colours x frames x rows x columns."""
        return 3 * self.frames * self.patch * self.patch


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioShape:
    """The audio encoder: two convolutions, layers, and a pooling by 2."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    mels: int
    """Frequency bands."""
    window: int
    """Mel frames that are convolved and attend together."""
    max_frames: int
    """Mel frames after which a clip is cut."""
    sample_rate: int
    """Samples in one second."""
    hop: int
    """Samples from one mel frame to the next."""
    projections: tuple[Projection, ...]
    """The merger, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRules:
    """How pixels are resized and scaled before they are cut into patches."""

    min_pixels: int
    """Of one image or frame after resizing; 0: no limit."""
    max_pixels: int
    """Of one image or frame after resizing; 0: no limit."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRules:
    """How an image is cut into tiles of one size, or fitted to an edge; 0 where it does not apply.

    The family's formula says which of these it reads.
    """

    edge: int = 0
    """Pixels along one side of a tile, or along the longest side of an image."""
    most: int = 0
    """Tiles of one image, without its overview."""
    tokens: int = 0
    """LLM tokens of one tile."""
    frame_tokens: int = 0
    """LLM tokens of one frame of a video."""
    grids: tuple[tuple[int, int], ...] = ()
    """Rows and columns of tiles that are allowed; empty: all within `most`."""
    most_features: int = 0
    """Tiles whose worth of features an image may keep."""
    long_edge: int = 0
    """Pixels to which the longest side is scaled first."""
    min_crop: int = 0
    """Pixels along the shorter side below which nothing is cropped."""
    min_ratio: float = 0.0
    """Long side over short side from which crops are made."""


class SpecialTokens(NamedTuple):
    """Ids of the tokens that stand for media; -1 where the family has none."""

    image: int = -1
    video: int = -1
    vision_start: int = -1
    vision_end: int = -1
    audio: int = -1


class MediaTokens(NamedTuple):
    """What one image, video or audio clip becomes."""

    kind: int
    """IMAGE_KIND, VIDEO_KIND or AUDIO_KIND."""
    size: tuple[int, int]
    """Pixels after resizing: height, width; mel bands and frames of an audio clip."""
    grid: tuple[int, int, int]
    """Patches: encoder units, rows, columns; positions of an audio clip are one row."""
    llm_tokens: int
    """Placeholders in the text, without the boundary tokens around them."""
    frames: tuple[int, ...]
    """Indices of the frames used, ascending; empty for an image."""
    seconds_per_group: float
    """Time between temporal groups; 0.0 for an image."""
    class_tokens: int = 0
    """Encoder tokens of each unit that are no patches."""
    boundary_tokens: int = 0
    """Text tokens that come with it: start and end, time stamps, row breaks."""
    keys: int = 0
    """Encoder tokens that cross-attention layers see; 0: there are none."""
    fps: float = 0.0
    """Frames a second of a video's file; 0.0 for others."""

    @property
    def units(self) -> int:
        """Encoder units: 1 for an image, its tiles, or the temporal groups of a video."""
        return self.grid[0]

    @property
    def unit_tokens(self) -> int:
        """Encoder tokens of each unit."""
        return self.grid[1] * self.grid[2] + self.class_tokens


NO_VISION = VisionShape(
    layers=0,
    width=0,
    heads=0,
    mlp_width=0,
    patch=1,
    frames=1,
    merge=1,
    window=0,
    full_layers=(),
    tokens_per_second=1,
)
"""The vision encoder of a model that has none."""
PLAIN_PIXELS = PixelRules(
    min_pixels=0, max_pixels=0, mean=(0.5,) * 3, std=(0.5,) * 3, scale=1 / 255
)
"""Colours from -1 to 1, and no limit on the size."""
ALL_FRAMES = FrameRules(fps=0.0, count=None, min_frames=1, max_frames=1 << 62, budget_tokens=None)
"""A video is used frame by frame."""
NO_TILES = TileRules()
NO_TOKENS = SpecialTokens()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model: its family, its sizes, and the rules of its processor."""

    name: str
    """Name of the preset, or of the folder that it was read from."""
    family: Family
    """The formulas."""
    text: TextShape
    folder: Path | None = None
    """Where its files are; None for a preset, which has no tokenizer."""
    vision: VisionShape = NO_VISION
    audio_encoder: AudioShape | None = None
    image_rules: PixelRules = PLAIN_PIXELS
    video_rules: PixelRules = PLAIN_PIXELS
    frame_rules: FrameRules = ALL_FRAMES
    tile_rules: TileRules = NO_TILES
    tokens: SpecialTokens = NO_TOKENS

    @property
    def has_media(self) -> bool:
        """Whether the model takes anything but text."""
        return any((self.family.image, self.family.video, self.family.audio))

    def image(self, height: int, width: int, *, images: int = 1) -> MediaTokens:
        """Tokens of an image.

        Args:
            height: Pixels in the file.
            width: Pixels in the file.
            images: Images in its sample; LLaVA-OneVision tiles an image only when it is alone.

        Raises:
            SampleError: The size is not positive, or one side is over 200 times the other, or the
                model takes no images.
        """
        if self.family.image is None:
            raise self._refusal("images")
        _check_size("an image", height, width)
        return self.family.image(self, height, width, images)

    def video(self, frames: int, fps: float, height: int, width: int) -> MediaTokens:
        """Tokens of a video; `frames` and `fps` are the file's, before sampling.

        Raises:
            SampleError: It has no frames or no frame rate, or its size is not possible, or the
                model takes no videos.
        """
        if self.family.video is None:
            raise self._refusal("videos")
        if frames < 1 or not 0 < fps < math.inf:
            raise SampleError(
                f"a video has {frames} frames at {fps} frames per second; expected 1 or more of "
                "each. Remove the sample or repair the file."
            )
        _check_size("a video", height, width)
        return self.family.video(self, frames, fps, height, width)._replace(fps=fps)

    def audio(self, seconds: float) -> MediaTokens:
        """Tokens of an audio clip.

        Raises:
            SampleError: It has no length, or is too short for one token, or the model takes no
                audio.
        """
        if self.family.audio is None or self.audio_encoder is None:
            raise self._refusal("audio")
        if not 0 < seconds < math.inf:
            raise SampleError(
                f"an audio clip lasts {seconds} seconds; expected a positive length. Remove the "
                "sample or repair the file."
            )
        return self.family.audio(self, self.audio_encoder, seconds)

    def settings(self) -> dict[str, str]:
        """All that token counts and pixels depend on; an index is valid for equal settings only."""
        flat = {"family": self.family.name}
        vision = self.vision
        flat |= {f"vision.{k}": str(getattr(vision, k)) for k in ("patch", "frames", "merge")}
        for name, rules in (("image", self.image_rules), ("video", self.video_rules)):
            flat |= {f"{name}.{k}": str(getattr(rules, k)) for k in PixelRules.__slots__}
        flat |= {f"video.{k}": str(getattr(self.frame_rules, k)) for k in FrameRules.__slots__}
        flat |= {f"tile.{k}": str(getattr(self.tile_rules, k)) for k in TileRules.__slots__}
        if (audio := self.audio_encoder) is not None:
            names = ("window", "max_frames", "sample_rate", "hop")
            flat |= {f"audio.{k}": str(getattr(audio, k)) for k in names}
        flat |= {f"tokens.{k}": str(v) for k, v in self.tokens._asdict().items()}
        return flat

    def _refusal(self, what: str) -> SampleError:
        kinds = {
            "images": self.family.image is not None,
            "videos": self.family.video is not None,
            "audio": self.family.audio is not None,
        }
        taken = [kind for kind, takes in kinds.items() if takes]
        return SampleError(
            f"model {self.name!r} takes no {what}; expected {' or '.join(taken) or 'text alone'}. "
            "Remove the sample or take another model."
        )


def _check_size(what: str, height: int, width: int) -> None:
    if min(height, width) < 1:
        raise SampleError(
            f"{what} is {height} x {width} pixels; expected 1 or more each way. Remove the sample "
            "or repair the file."
        )


class Family(NamedTuple):
    """The formulas that a family of models shares."""

    name: str
    """`model_type` of config.json."""
    image: Callable[[ModelShape, int, int, int], MediaTokens] | None
    """(shape, height, width, images of the sample); None: the model takes no images."""
    video: Callable[[ModelShape, int, float, int, int], MediaTokens] | None
    """(shape, frames, fps, height, width), the file's."""
    default_system: str
    """The system turn that the chat format adds where a conversation has none; may be empty."""
    audio: Callable[[ModelShape, AudioShape, float], MediaTokens] | None = None
    """(shape, its audio encoder, seconds)."""
