"""How a media item stands in the text of a sample: what processors put where a template has marks.

A chat template leaves one mark for each item. The processors of transformers 5.24 replace it with
text, special tokens among it, and runs of the token that embeddings take the place of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple

from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, VIDEO_KIND, MediaTokens, ModelShape

Piece = str | int
"""Text, or how many placeholders follow each other."""


class Spelling(NamedTuple):
    """One kind of media in the text of one family."""

    mark: str
    """What the chat template leaves for an item."""
    write: Callable[[ModelShape, MediaTokens], list[Piece]]
    """(shape, item) -> what takes the mark's place."""


def _run(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    del shape
    return [item.llm_tokens]


def _groups_with_times(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    """Qwen3-VL: each temporal group after the mean time of its first and last frame."""
    group, used = shape.vision.frames, item.frames
    pieces: list[Piece] = []
    for first in range(0, len(used), group):
        last = used[min(first + group, len(used)) - 1]
        time = (used[first] / item.fps + last / item.fps) / 2
        pieces += [f"<{time:.1f} seconds><|vision_start|>", item.llm_tokens // item.units]
        pieces.append("<|vision_end|>")
    return pieces


def _intern_image(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    del shape
    return ["<img>", item.llm_tokens, "</img>"]


def _intern_video(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    pieces: list[Piece] = []
    for number in range(item.units):
        pieces += ["\n"] if number else []
        pieces += [f"Frame{number + 1}: <img>", shape.tile_rules.frame_tokens, "</img>"]
    return pieces


def _gemma_image(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    one: list[Piece] = ["\n\n<start_of_image>", shape.tile_rules.tokens, "<end_of_image>\n\n"]
    if item.units == 1:
        return one
    pieces: list[Piece] = ["Here is the original image ", *one]
    pieces.append(" and here are some crops to help you see better ")
    for crop in range(item.units - 1):
        pieces += [" ", *one] if crop else one
    return pieces


def _llama4_image(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    tokens = shape.tile_rules.tokens
    pieces: list[Piece] = ["<|image_start|>"]
    if item.units > 1:
        rows, columns = (side // shape.tile_rules.edge for side in item.size)
        more: list[Piece] = ["<|tile_x_separator|>", tokens]
        pieces += [tokens, *more * (columns - 1), "<|tile_y_separator|>"] * rows
    return [*pieces, "<|image|>", tokens, "<|image_end|>"]


def _rows_with_breaks(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    rows, columns = (side // shape.vision.merge for side in item.grid[1:])
    row: list[Piece] = [columns, "[IMG_BREAK]"]
    return [*(row * rows)[:-1], "[IMG_END]"]


def _idefics_image(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    tokens, around = shape.tile_rules.tokens, "<fake_token_around_image>"
    pieces: list[Piece] = []
    if item.units > 1:
        rows, columns = (side // shape.tile_rules.edge for side in item.size)
        for row in range(rows):
            for column in range(columns):
                pieces += [f"{around}<row_{row + 1}_col_{column + 1}>", tokens]
            pieces.append("\n")
        pieces.append("\n")
    return [*pieces, f"{around}<global-img>", tokens, around]


def _smolvlm_video(shape: ModelShape, item: MediaTokens) -> list[Piece]:
    around = "<fake_token_around_image>"
    length = timedelta(seconds=int(round(item.seconds_per_group * len(item.frames), 6)))
    pieces: list[Piece] = [
        f"You are provided the following series of {in_words(len(item.frames))} frames from a "
        f"{length} [H:MM:SS] video.\n"
    ]
    for frame in item.frames:
        time = frame / item.fps
        stamp = f"{int(time // 60):02d}:{int(time % 60):02d}"
        pieces.append(f"\nFrame from {stamp}:{around}<global-img>")
        pieces += [shape.tile_rules.frame_tokens, around]
    return [*pieces, "\n\n"]


_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number of frames, 0 to 999,999, as the package num2words spells it.

    >>> in_words(64), in_words(115), in_words(2000)
    ('sixty-four', 'one hundred and fifteen', 'two thousand')
    """
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens = _TENS[number // 10]
        return f"{tens}-{_ONES[number % 10]}" if number % 10 else tens
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest, many = number % unit, f"{in_words(number // unit)} {name}"
    if not rest:
        return many
    return (
        f"{many} and {in_words(rest)}" if rest < 100 or unit == 100 else f"{many}, {in_words(rest)}"
    )


_QWEN2 = {
    IMAGE_KIND: Spelling("<|image_pad|>", _run),
    VIDEO_KIND: Spelling("<|video_pad|>", _run),
}
_QWEN3 = _QWEN2 | {VIDEO_KIND: Spelling("<|video_pad|>", _groups_with_times)}
_OMNI = {
    IMAGE_KIND: Spelling("<|IMAGE|>", _run),
    VIDEO_KIND: Spelling("<|VIDEO|>", _run),
    AUDIO_KIND: Spelling("<|AUDIO|>", _run),
}
_ROWS = {IMAGE_KIND: Spelling("[IMG]", _rows_with_breaks)}
_IDEFICS = {IMAGE_KIND: Spelling("<image>", _idefics_image)}

SPELLINGS: Mapping[str, Mapping[int, Spelling]] = MappingProxyType(
    {
        "qwen2_vl": _QWEN2,
        "qwen2_5_vl": _QWEN2,
        "qwen3_vl": _QWEN3,
        "qwen3_vl_moe": _QWEN3,
        "qwen2_5_omni": _OMNI,
        "qwen2_5_omni_thinker": _OMNI,
        "internvl": {
            IMAGE_KIND: Spelling("<IMG_CONTEXT>", _intern_image),
            VIDEO_KIND: Spelling("<video>", _intern_video),
        },
        "llava_onevision": {
            IMAGE_KIND: Spelling("<image>", _run),
            VIDEO_KIND: Spelling("<video>", _run),
        },
        "gemma3": {IMAGE_KIND: Spelling("<start_of_image>", _gemma_image)},
        "mllama": {IMAGE_KIND: Spelling("<|image|>", _run)},
        "llama4": {IMAGE_KIND: Spelling("<|image|>", _llama4_image)},
        "llava": _ROWS,
        "mistral3": _ROWS,
        "idefics3": _IDEFICS,
        "smolvlm": _IDEFICS | {VIDEO_KIND: Spelling("<video>", _smolvlm_video)},
    }
)
"""By family and kind of media."""


def placeholder(shape: ModelShape, kind: int) -> int:
    """Id of the token that embeddings of a kind take the place of; -1 where there is none."""
    tokens = shape.tokens
    if kind == AUDIO_KIND:
        return tokens.audio
    if kind == VIDEO_KIND and shape.family.name not in ("internvl", "smolvlm"):
        return tokens.video
    return tokens.image
