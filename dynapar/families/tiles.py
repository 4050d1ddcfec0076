"""Into how many tiles or crops a picture is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product


@cache
def grids(most: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) of up to `most` tiles, few tiles first.

    >>> grids(3)
    ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1))
    """
    sides = range(1, most + 1)
    found = [pair for pair in product(sides, sides) if pair[0] * pair[1] <= most]
    return tuple(sorted(found, key=lambda pair: pair[0] * pair[1]))


def nearest_ratio(height: int, width: int, *, edge: int, most: int) -> tuple[int, int]:
    """Columns and rows of the grid nearest to a picture's shape (InternVL).

    On a tie the larger grid wins if the picture fills more than half of it.

    Args:
        height: Pixels.
        width: Pixels.
        edge: Pixels along one side of a tile.
        most: Tiles in the largest grid.

    >>> nearest_ratio(480, 640, edge=448, most=12), nearest_ratio(1080, 1920, edge=448, most=12)
    ((4, 3), (4, 2))
    """
    ratio, area = width / height, height * width
    best, least = (1, 1), math.inf
    for columns, rows in grids(most):
        distance = abs(ratio - columns / rows)
        if distance < least:
            best, least = (columns, rows), distance
        elif distance == least and area > 0.5 * edge * edge * columns * rows:
            best = (columns, rows)
    return best


def least_scaled_canvas(height: int, width: int, *, edge: int, most: int) -> tuple[int, int]:
    """Rows and columns of the canvas that a picture is scaled to least (Llama 3.2 Vision, 4).

    The canvas of the least enlargement; where none is large enough, of the least reduction; the
    smallest area among equals.

    >>> least_scaled_canvas(480, 640, edge=560, most=4)
    (1, 2)
    """
    choices = grids(most)
    scales = [min(rows * edge / height, columns * edge / width) for columns, rows in choices]
    larger = [scale for scale in scales if scale >= 1]
    chosen = min(larger) if larger else max(scales)
    fitting = (pair for pair, scale in zip(choices, scales, strict=True) if scale == chosen)
    columns, rows = min(fitting, key=lambda pair: pair[0] * pair[1])
    return rows, columns


def fullest_grid(
    height: int, width: int, *, edge: int, choices: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Rows and columns of the grid that keeps most of a picture's pixels (LLaVA).

    Among equals the one that wastes least, then the first.

    >>> fullest_grid(480, 640, edge=384, choices=[(1, 1), (1, 2), (2, 1), (2, 2)])
    (2, 2)
    """
    best, kept, wasted = choices[0], 0, math.inf
    for rows, columns in choices:
        high, wide = rows * edge, columns * edge
        scale = min(wide / width, high / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        waste = wide * high - used
        if used > kept or (used == kept and waste < wasted):
            best, kept, wasted = (rows, columns), used, waste
    return best


def unpadded_features(
    height: int, width: int, *, grid: tuple[int, int], side: int, most: int
) -> tuple[int, int]:
    """Rows and columns of features left of a grid when padding is cut away (LLaVA).

    Args:
        height: Pixels of the picture.
        width: Pixels of the picture.
        grid: Rows and columns of tiles.
        side: Features along one side of a tile.
        most: Tiles whose worth of features may stay; more are scaled down.

    >>> unpadded_features(480, 640, grid=(2, 2), side=27, most=9)
    (40, 54)
    """
    rows, columns = grid[0] * side, grid[1] * side
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    ratio = math.sqrt(rows * columns / (most * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return rows, columns


def pan_and_scan(height: int, width: int, *, most: int, min_crop: int, min_ratio: float) -> int:
    """Crops along the long side of a picture, beside the picture itself (Gemma 3).

    >>> pan_and_scan(1080, 1920, most=4, min_crop=256, min_ratio=1.2)
    2
    """
    long, short = max(height, width), min(height, width)
    if long / short < min_ratio:
        return 0
    wanted = min(long // min_crop, math.floor(long / short + 0.5))
    crops = min(most, max(2, wanted))
    return 0 if min(math.ceil(long / crops), short) < min_crop else crops


def split_rows(height: int, width: int, *, edge: int) -> tuple[int, int]:
    """Rows and columns of tiles of a picture; 0 and 0 when it is one tile (Idefics3, SmolVLM).

    >>> split_rows(1152, 2048, edge=512), split_rows(512, 512, edge=512)
    ((3, 4), (0, 0))
    """
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    if max(height, width) <= edge:
        return 0, 0
    return height // edge, width // edge


def pixel_grids(sizes: Iterable[tuple[int, int]], edge: int) -> tuple[tuple[int, int], ...]:
    """Grids in tiles, from their heights and widths in pixels.

    >>> pixel_grids([(384, 768)], 384)
    ((1, 2),)
    """
    return tuple((height // edge, width // edge) for height, width in sizes)
