"""Give every degree a colour: from blue for one rank to violet for hundreds, octave by octave."""

from __future__ import annotations

import math
from collections.abc import Iterable

_OCTAVES = (
    (0x6F, 0x8F, 0xC9),
    (0x1F, 0x9A, 0xA8),
    (0x62, 0xA6, 0x4B),
    (0xD2, 0xA4, 0x24),
    (0xE0, 0x72, 0x2E),
    (0xCF, 0x46, 0x4C),
    (0xB4, 0x48, 0x9A),
    (0x7F, 0x55, 0xB5),
    (0x4D, 0x56, 0xA6),
)
"""Of 1, 2, 4, ... 256 ranks; in between in equal ratios. Readable on white and on black."""


def colour(degree: int) -> str:
    """The colour of a degree, such as "#6f8fc9"."""
    place = min(math.log2(max(degree, 1)), len(_OCTAVES) - 1.0)
    below = min(int(place), len(_OCTAVES) - 2)
    part = place - below
    mixed = (
        round(low + part * (high - low))
        for low, high in zip(_OCTAVES[below], _OCTAVES[below + 1], strict=True)
    )
    return "#" + "".join(f"{value:02x}" for value in mixed)


def lighter(shade: str) -> str:
    """A colour mixed with as much white."""
    parts = (int(shade[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{(value + 255) // 2:02x}" for value in parts)


def css(degrees: Iterable[int]) -> str:
    """Two rules a degree, for shapes and for boxes of HTML alike: d4, and d4 with enc (lighter)."""
    rules = []
    for degree in sorted(set(degrees)):
        shade = colour(degree)
        rules.append(f".d{degree}{{fill:{shade};background-color:{shade}}}")
        rules.append(f".d{degree}.enc{{fill:{lighter(shade)};background-color:{lighter(shade)}}}")
    return "".join(rules)
