"""Position ids of whole samples, before anything is cut: mRoPE of Qwen2.5-VL; of text, a count.

Text runs on alike in all three rows (time, height, width). A picture or video starts at the
position reached: time grows by the seconds between temporal groups, height and width with rows and
columns of the merged grid; after it the text goes on `max(rows, columns)` further, which for long
videos is *below* the largest time: the rule of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynapar.shapes import MediaTokens, VisionShape

IntArray = npt.NDArray[np.int64]


def text_positions(length: int) -> IntArray:
    """Of a sample for a model without media: (1, length) int64."""
    return np.arange(length, dtype=np.int64)[None]


def mrope_positions(kinds: IntArray, media: Sequence[MediaTokens], vision: VisionShape) -> IntArray:
    """Time, height and width of every token.

    Args:
        kinds: (L,) 0 for text, else the kind of media that the placeholder belongs to.
        media: The media in the order of their placeholders; adjacent ones of one kind need not be
            parted by text.
        vision: The encoder; merge and tokens per second matter.

    Returns:
        (3, L) int64.
    """
    positions = np.empty((3, len(kinds)), np.int64)
    places = np.flatnonzero(kinds)
    done, taken, reached = 0, 0, 0
    for item in media:
        first = int(places[taken])
        positions[:, done:first] = reached + np.arange(first - done)
        reached += first - done
        done = first + item.llm_tokens
        taken += item.llm_tokens
        groups, rows, columns = item.grid
        rows, columns = rows // vision.merge, columns // vision.merge
        # float32 as in transformers: the product is truncated, so its rounding counts.
        step = np.float32(vision.tokens_per_second) * np.float32(item.seconds_per_group)
        time = (np.arange(groups, dtype=np.float32) * step).astype(np.int64)
        block = positions[:, first:done].reshape(3, groups, rows, columns)
        block[0] = reached + time[:, None, None]
        block[1] = reached + np.arange(rows)[None, :, None]
        block[2] = reached + np.arange(columns)[None, None, :]
        reached += max(rows, columns)
    positions[:, done:] = reached + np.arange(len(kinds) - done)
    return positions
