"""Choose the scheme by which a ring shares attention: the one place where that is decided.

What exists: `local`, where one rank holds all tokens, and `staged`, where the needed rows of keys
and values come straight from their owners in stages. Degree 1 is always local. Imports no torch:
the planner may ask too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

SchemeName = Literal["local", "staged"]

SCHEMES: tuple[SchemeName, ...] = ("local", "staged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a ring shares attention."""

    name: SchemeName
    stages: tuple[tuple[int, ...], ...]
    """Rounds of each exchange: in round t, position p fetches from position p - t (mod degree)."""


def select(degree: int, *, name: str = "auto", stages: int | None = None) -> Scheme:
    """Choose a scheme and its stages.

    Args:
        degree: Positions of the ring, 1 or more.
        name: One of `SCHEMES`, or "auto": local at degree 1, staged above it.
        stages: Exchanges over which the other positions are spread, 1 or more; at most degree - 1
            are used. None is degree - 1, which holds as few fetched rows at once as a ring does;
            1 is an all-gather of the needed rows.

    Raises:
        ValueError: The scheme does not exist, does not fit the degree, or has too few stages.
    """
    chosen: SchemeName = "local" if degree == 1 else "staged"
    if name not in ("auto", chosen):
        exists = "it does not exist" if name not in SCHEMES else "it does not fit this degree"
        raise ValueError(
            f"attention scheme {name!r} was asked for at degree {degree}: {exists}; expected "
            f"'auto' or {chosen!r} (there are {list(SCHEMES)}): use 'auto'"
        )
    if stages is not None and stages < 1:
        raise ValueError(f"stages is {stages}; expected 1 or more: use None for one a position")
    rounds = range(1, degree)
    count = len(rounds) if stages is None else min(stages, len(rounds))
    bounds = [i * len(rounds) // count for i in range(count + 1)] if count else [0]
    return Scheme(
        name=chosen,
        stages=tuple(tuple(rounds[a:b]) for a, b in itertools.pairwise(bounds)),
    )


def staged_bytes(rows: int, *, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that one rank receives in a layer's forward; backward moves twice that.

    Args:
        rows: Key rows that the rank fetches (`AttentionPlan.fetched`).
        kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        itemsize: Bytes of a number on the wire.
    """
    return 2 * rows * kv_heads * head_dim * itemsize
