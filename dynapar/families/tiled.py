"""Families that cut a picture into tiles of one size: how many, and the tokens they become."""

from __future__ import annotations

from dynapar.families.resize import centred_frames, fit_long_edge, skipping_frames
from dynapar.families.tiles import (
    fullest_grid,
    least_scaled_canvas,
    nearest_ratio,
    pan_and_scan,
    split_rows,
    unpadded_features,
)
from dynapar.shapes import IMAGE_KIND, VIDEO_KIND, Family, MediaTokens, ModelShape


def _tiles(
    shape: ModelShape,
    tiles: int,
    llm_tokens: int,
    *,
    boundary: int,
    size: tuple[int, int] | None = None,
    used: tuple[int, ...] = (),
    seconds: float = 0.0,
) -> MediaTokens:
    """So many encoder units of one tile each."""
    side = shape.tile_rules.edge // shape.vision.patch
    return MediaTokens(
        VIDEO_KIND if used else IMAGE_KIND,
        (shape.tile_rules.edge,) * 2 if size is None else size,
        (tiles, side, side),
        llm_tokens,
        used,
        seconds,
        class_tokens=shape.vision.class_tokens,
        boundary_tokens=boundary,
    )


def _frames(
    shape: ModelShape, used: tuple[int, ...], frames: int, fps: float, *, more: int, boundary: int
) -> MediaTokens:
    """One tile a frame, and `more` LLM tokens of the clip as a whole."""
    llm_tokens = len(used) * shape.tile_rules.frame_tokens + more
    seconds = frames / fps / len(used)
    return _tiles(shape, len(used), llm_tokens, boundary=boundary, used=used, seconds=seconds)


def _intern_image(shape: ModelShape, height: int, width: int, images: int) -> MediaTokens:
    del images
    rules = shape.tile_rules
    columns, rows = 1, 1
    if rules.most > 0:
        columns, rows = nearest_ratio(height, width, edge=rules.edge, most=rules.most)
    tiles = columns * rows + (1 if columns * rows > 1 else 0)
    size = rows * rules.edge, columns * rules.edge
    return _tiles(shape, tiles, tiles * rules.tokens, boundary=2, size=size)


def _intern_video(
    shape: ModelShape, frames: int, fps: float, height: int, width: int
) -> MediaTokens:
    """Before each frame stands "FrameN: ": 3 tokens and one a digit; line breaks part frames."""
    del height, width
    used = centred_frames(frames, fps, rules=shape.frame_rules)
    text = sum(3 + len(str(number + 1)) + 2 for number in range(len(used))) + len(used) - 1
    return _frames(shape, used, frames, fps, more=0, boundary=text)


def _llava_image(shape: ModelShape, height: int, width: int, images: int) -> MediaTokens:
    rules = shape.tile_rules
    side = rules.edge // shape.vision.patch
    if images > 1:
        return _tiles(shape, 1, rules.tokens + 1, boundary=0)
    grid = fullest_grid(height, width, edge=rules.edge, choices=rules.grids)
    rows, columns = unpadded_features(height, width, grid=grid, side=side, most=rules.most_features)
    size = grid[0] * rules.edge, grid[1] * rules.edge
    # Each row of features ends in a learned token.
    llm_tokens = rules.tokens + rows * columns + rows
    return _tiles(shape, grid[0] * grid[1] + 1, llm_tokens, boundary=0, size=size)


def _llava_video(
    shape: ModelShape, frames: int, fps: float, height: int, width: int
) -> MediaTokens:
    del height, width
    return _frames(shape, _evenly(shape, frames, fps), frames, fps, more=1, boundary=0)


def _evenly(shape: ModelShape, frames: int, fps: float) -> tuple[int, ...]:
    """Frames from the first on, at equal steps: what the general video processor takes."""
    rules = shape.frame_rules
    wanted = rules.count
    if wanted is None:
        wanted = int(frames / fps * rules.fps) if rules.fps > 0 else frames
    wanted = max(1, min(wanted, frames))
    return tuple(int(number * (frames / wanted)) for number in range(wanted))


def _gemma_image(shape: ModelShape, height: int, width: int, images: int) -> MediaTokens:
    """Crops stand in a sentence, whose tokens are estimated: 17, and 1 between crops."""
    del images
    rules = shape.tile_rules
    crops = 0
    if rules.most > 0:
        crops = pan_and_scan(
            height, width, most=rules.most, min_crop=rules.min_crop, min_ratio=rules.min_ratio
        )
    text = 4 * (1 + crops) + (17 + crops - 1 if crops else 0)
    return _tiles(shape, 1 + crops, (1 + crops) * rules.tokens, boundary=text)


def _llama4_image(shape: ModelShape, height: int, width: int, images: int) -> MediaTokens:
    del images
    rules = shape.tile_rules
    rows, columns = least_scaled_canvas(height, width, edge=rules.edge, most=rules.most)
    tiles, separators = rows * columns, 0
    if tiles > 1:
        tiles, separators = tiles + 1, tiles
    size = rows * rules.edge, columns * rules.edge
    return _tiles(shape, tiles, tiles * rules.tokens, boundary=3 + separators, size=size)


def _mllama_image(shape: ModelShape, height: int, width: int, images: int) -> MediaTokens:
    """One unit: all tile slots attend to each other, the empty ones under a mask.

    Each slot is its patches and a class token, padded to a multiple of 8. Cross-attention sees the
    slots without that padding.
    """
    del images
    rules = shape.tile_rules
    rows, columns = least_scaled_canvas(height, width, edge=rules.edge, most=rules.most)
    side = rules.edge // shape.vision.patch
    slot = side * side + shape.vision.class_tokens
    padded = -(-slot // 8) * 8
    return MediaTokens(
        IMAGE_KIND,
        (rows * rules.edge, columns * rules.edge),
        (1, rules.most * side, side),
        rules.tokens,
        (),
        0.0,
        class_tokens=rules.most * (padded - side * side),
        keys=rules.most * slot,
    )


def _idefics_image(shape: ModelShape, height: int, width: int, images: int) -> MediaTokens:
    """Each tile stands after its place, each row of tiles before a line break, and an overview."""
    del images
    rules = shape.tile_rules
    rows = columns = 0
    if rules.long_edge > 0:
        scaled = fit_long_edge(height, width, edge=rules.long_edge)
        rows, columns = split_rows(*scaled, edge=rules.edge)
    tiles = rows * columns + 1
    size = max(rows, 1) * rules.edge, max(columns, 1) * rules.edge
    boundary = 3 + rows * (2 * columns + 1)
    return _tiles(shape, tiles, tiles * rules.tokens, boundary=boundary, size=size)


def _smolvlm_video(
    shape: ModelShape, frames: int, fps: float, height: int, width: int
) -> MediaTokens:
    """The text around the frames is estimated: 24 tokens, and 13 a frame with its time."""
    del height, width
    used = skipping_frames(frames, fps, rules=shape.frame_rules)
    return _frames(shape, used, frames, fps, more=0, boundary=24 + 13 * len(used))


INTERNVL = Family("internvl", _intern_image, _intern_video, "")
LLAVA_ONEVISION = Family("llava_onevision", _llava_image, _llava_video, "")
GEMMA3 = Family("gemma3", _gemma_image, None, "")
LLAMA4 = Family("llama4", _llama4_image, None, "")
MLLAMA = Family("mllama", _mllama_image, None, "")
IDEFICS3 = Family("idefics3", _idefics_image, None, "")
SMOLVLM = Family("smolvlm", _idefics_image, _smolvlm_video, "")
