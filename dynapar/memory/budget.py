"""Bytes as people write them."""

from __future__ import annotations

import re

from dynapar.errors import ConfigError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
CAPACITY_NEEDS = (
    "give --capacity and --encoder-capacity, or --memory with --model, from which they follow"
)
"""What to do where neither is given."""


def parse_bytes(text: str, *, what: str = "memory") -> int:
    """Read "80GB", "141e9" or "24GiB".

    Args:
        text: A number and a unit: B, KB, MB, GB, TB (powers of 1,000), KiB, ... (of 1,024).
        what: What to call it in messages.

    Raises:
        ConfigError: It is nothing of the kind, or no byte at all.

    >>> parse_bytes("80GB"), parse_bytes("1.5 KiB")
    (80000000000, 1536)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([KMGT]?)(i?)B?\s*", text)
    if not found or (found[3] and not found[2]):
        raise ConfigError(f"{what} is {text!r}; expected bytes with a unit, such as 80GB or 24GiB")
    scale = 2 ** (10 * "KMGT".index(found[2]) + 10) if found[3] else UNITS[found[2]]
    value = int(float(found[1]) * scale)
    if value < 1:
        raise ConfigError(f"{what} is {text!r}; expected 1 byte or more, such as 80GB")
    return value


def shown(count: float) -> str:
    """Bytes for a message, in powers of 1,000.

    >>> shown(80_000_000_000), shown(1234)
    ('80.0 GB', '1.2 KB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.1f} TB"
