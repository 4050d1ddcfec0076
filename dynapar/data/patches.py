"""Pixels to patches, number for number what Qwen2.5-VL's image processor of transformers gives.

Resizing is Pillow's bicubic filter, for frames of videos as well (transformers resizes those with
torchvision, whose filter rounds differently by at most a few 255ths). Scaling and normalising act
on single bytes, so they are a table of 256 numbers for each colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

from dynapar.data.header import Pixels
from dynapar.shapes import PixelRules, VisionShape

FloatArray = npt.NDArray[np.float32]


def unit_patches(
    frames: Sequence[Pixels], *, size: tuple[int, int], rules: PixelRules, vision: VisionShape
) -> FloatArray:
    """The patches of one encoder unit.

    Args:
        frames: An image alone, or the frames of a temporal group; the last one is repeated where
            the group is not full. Each (height, width, 3) uint8.
        size: Height and width after resizing.
        rules: Scaling of colours.
        vision: Patch and merge sizes.

    Returns:
        (rows * columns, 3 * frames * patch * patch) float32; patches that merge into one LLM token
        follow each other, each flattened as colour, frame, row, column.
    """
    table = _table(rules)
    scaled = [_look_up(table, _resize(frame, size)) for frame in frames]
    scaled += [scaled[-1]] * (vision.frames - len(scaled))
    merge, patch = vision.merge, vision.patch
    rows, columns = size[0] // patch, size[1] // patch
    cut = np.stack(scaled).reshape(
        vision.frames, 3, rows // merge, merge, patch, columns // merge, merge, patch
    )
    ordered = cut.transpose(2, 5, 3, 6, 1, 0, 4, 7)
    return np.ascontiguousarray(ordered).reshape(rows * columns, vision.patch_width)


def _resize(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    if pixels.shape[:2] == size:
        return pixels
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC))


def _look_up(table: FloatArray, pixels: Pixels) -> FloatArray:
    return np.stack([table[colour].take(pixels[:, :, colour]) for colour in range(3)])


@lru_cache(maxsize=8)
def _table(rules: PixelRules) -> FloatArray:
    """(3, 256): the number for each byte of each colour, rounded where transformers rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rules.scale).astype(np.float32)
    mean, std = (np.array(x, np.float32)[:, None] for x in (rules.mean, rules.std))
    table: FloatArray = (scaled[None] - mean) / std
    return table
