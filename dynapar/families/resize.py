"""To what size pictures and frames are resized, and which frames of a video are used."""

from __future__ import annotations

import math

import numpy as np

from dynapar.errors import SampleError
from dynapar.shapes import FrameRules

MAX_ASPECT_RATIO = 200
"""Long side over short side; Qwen's processors refuse more."""


def fit_pixels(
    height: int, width: int, *, multiple: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The multiples of `multiple` nearest to a size, inside an area (Qwen).

    Raises:
        SampleError: A side is below 1, or one is over 200 times the other.

    >>> fit_pixels(512, 512, multiple=28, min_pixels=3136, max_pixels=12845056)
    (504, 504)
    """
    _check_ratio(height, width)
    high, wide = (round(side / multiple) * multiple for side in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high, wide = (
            max(multiple, math.floor(side / shrink / multiple) * multiple)
            for side in (height, width)
        )
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(side * grow / multiple) * multiple for side in (height, width))
    return high, wide


def fit_clip(
    frames: int, height: int, width: int, *, multiple: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The size of frames whose pixels together lie inside an area (Qwen3-VL).

    Args:
        frames: Frames used, 1 or more.
        height: Pixels in the file.
        width: Pixels in the file.
        multiple: Of both sides, afterwards.
        min_pixels: Of all frames together.
        max_pixels: Of all frames together.

    Raises:
        SampleError: A side is below 1, or one is over 200 times the other.

    >>> fit_clip(8, 720, 1280, multiple=32, min_pixels=4096, max_pixels=25165824)
    (704, 1280)
    """
    if min(height, width) >= 1 and min(height, width) < multiple:
        grow = max(multiple / height, multiple / width)
        height, width = int(height * grow), int(width * grow)
    _check_ratio(height, width)
    high, wide = (round(side / multiple) * multiple for side in (height, width))
    pixels = round(frames / 2) * 2 * high * wide
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        high, wide = (
            max(multiple, math.floor(side / shrink / multiple) * multiple)
            for side in (height, width)
        )
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        high, wide = (math.ceil(side * grow / multiple) * multiple for side in (height, width))
    return high, wide


def fit_edge(height: int, width: int, *, edge: int, multiple: int) -> tuple[int, int]:
    """Shrink until no side is above `edge`, then up to multiples (Pixtral, Mistral 3).

    Raises:
        SampleError: It is so thin that nothing is left of one side.

    >>> fit_edge(1080, 1920, edge=1024, multiple=16)
    (576, 1024)
    """
    ratio = max(height / edge, width / edge)
    if ratio > 1:
        shrunk = math.floor(height / ratio), math.floor(width / ratio)
        if 0 in shrunk:
            raise SampleError(
                f"a picture is {height} x {width} pixels, of which {shrunk[0]} x {shrunk[1]} are "
                f"left when its longest side is {edge}; expected 1 or more each way. Remove the "
                "sample or crop it."
            )
        height, width = shrunk
    return ((height - 1) // multiple + 1) * multiple, ((width - 1) // multiple + 1) * multiple


def fit_long_edge(height: int, width: int, *, edge: int, limit: int = 4096) -> tuple[int, int]:
    """Scale the longest side to `edge`, the other one to an even number (Idefics3, SmolVLM).

    >>> fit_long_edge(1080, 1920, edge=2048)
    (1152, 2048)
    """
    ratio = width / height
    if width >= height:
        height, width = int(edge / ratio), edge
        height += height % 2
    else:
        height, width = edge, int(edge * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > limit:
        height, width = int(limit / ratio), limit
    elif height > width and height > limit:
        height, width = limit, int(limit * ratio)
    return max(height, 1), max(width, 1)


def sample_frames(frames: int, fps: float, *, rules: FrameRules, group: int) -> tuple[int, ...]:
    """Which frames are used: evenly spread, a multiple of `group` where it has them (Qwen2-VL).

    Args:
        frames: Frames in the file, 1 or more.
        fps: The file's frames per second.
        rules: How many to take.
        group: Frames in a temporal group.

    >>> rules = FrameRules(fps=2, count=None, min_frames=4, max_frames=768, budget_tokens=None)
    >>> sample_frames(132, 25.0, rules=rules, group=2)
    (0, 13, 26, 39, 52, 66, 79, 92, 105, 118)
    """
    if rules.count is not None:
        wanted = min(round(rules.count / group) * group, frames)
    else:
        most = math.floor(min(rules.max_frames, frames) / group) * group
        asked = min(max(frames / fps * rules.fps, rules.min_frames), most, frames)
        wanted = math.floor(asked / group) * group
    if wanted < 1:
        return tuple(range(frames))
    # As torch.arange(0, frames, frames / wanted).int(): counted in float64, rounded to float32.
    step = frames / wanted
    places = (np.arange(math.ceil(frames / step)) * step).astype(np.float32)
    return tuple(places.astype(np.int64).tolist())


def spread_frames(frames: int, fps: float, *, rules: FrameRules) -> tuple[int, ...]:
    """Which frames are used: evenly spread from the first to the last (Qwen3-VL).

    >>> rules = FrameRules(fps=2, count=None, min_frames=4, max_frames=768, budget_tokens=None)
    >>> spread_frames(132, 25.0, rules=rules)
    (0, 15, 29, 44, 58, 73, 87, 102, 116, 131)
    """
    if rules.count is not None:
        wanted = rules.count
    else:
        asked = int(frames / fps * rules.fps)
        wanted = min(max(asked, rules.min_frames), rules.max_frames, frames)
    return tuple(np.linspace(0, frames - 1, wanted).round().astype(np.int64).tolist())


def centred_frames(frames: int, fps: float, *, rules: FrameRules) -> tuple[int, ...]:
    """Which frames are used: the middle of each of equal parts (InternVL).

    Args:
        frames: Frames in the file, 1 or more.
        fps: The file's frames per second.
        rules: How many to take; every frame where it says neither a count nor a rate.

    Raises:
        SampleError: More frames are asked for than there are.

    >>> rules = FrameRules(fps=0, count=8, min_frames=1, max_frames=99, budget_tokens=None)
    >>> centred_frames(132, 25.0, rules=rules)
    (8, 24, 41, 57, 74, 90, 107, 123)
    """
    if rules.count is None and rules.fps <= 0:
        return tuple(range(frames))
    wanted = rules.count if rules.count is not None else int(frames / fps * rules.fps)
    if not 1 <= wanted <= frames:
        raise SampleError(
            f"a video has {frames} frames at {fps} frames per second, of which {wanted} are to be "
            f"used; expected 1 to {frames}. Remove the sample or change the processor's num_frames."
        )
    step = frames / wanted
    start = step / 2
    places = start + np.arange(math.ceil((frames - start) / step)) * step
    return tuple(places.astype(np.float32).astype(np.int64).tolist())


def skipping_frames(frames: int, fps: float, *, rules: FrameRules) -> tuple[int, ...]:
    """Which frames are used: evenly spread, of long videos without their ends (SmolVLM).

    >>> rules = FrameRules(fps=1, count=None, min_frames=1, max_frames=64, budget_tokens=None)
    >>> skipping_frames(132, 25.0, rules=rules)
    (0, 32, 65, 98, 131)
    """
    seconds = frames / fps
    wanted = max(1, min(round(rules.fps * seconds), rules.max_frames))
    first, last = 0, frames - 1
    if seconds - 2 > rules.max_frames * rules.fps:
        first, last = int(fps), min(int(frames - fps), frames - 1)
        if first >= last:
            first, last = 0, frames - 1
    places = np.unique(np.linspace(first, last, wanted, dtype=np.int64))
    return tuple(places.tolist())


def _check_ratio(height: int, width: int) -> None:
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise SampleError(
            f"a picture is {height} x {width} pixels; expected sides of 1 or more, the longer at "
            f"most {MAX_ASPECT_RATIO} times the shorter. Remove the sample or crop it."
        )
