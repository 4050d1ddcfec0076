"""Share the heads of attention out over the members of a group: any heads over any group.

Query heads are cut so that the busiest member has as few as possible. A key/value head goes to all
members that hold a query head of it, so there may be fewer of them than members. Imports nothing:
the planner counts bytes by it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads that one member computes; none where there are more members than query heads."""

    q: tuple[int, int]
    """First query head, and one after the last."""
    kv: tuple[int, int]
    """The key/value heads that these read, likewise."""
    repeats: tuple[int, ...]
    """Kernels give every key/value head equally many query heads. Where these read unequally many,
    how often each key/value head is repeated so that it holds; else empty."""

    @property
    def q_heads(self) -> int:
        """Query heads of the member."""
        return self.q[1] - self.q[0]

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the member, before repeating."""
        return self.kv[1] - self.kv[0]


@functools.lru_cache
def share_heads(q_heads: int, kv_heads: int, members: int) -> tuple[Heads, ...]:
    """The heads of each member of a group.

    Cuts fall between as many query heads of one key/value head as possible without giving the
    busiest member more: fewer key/value heads are then shared or repeated.

    Args:
        q_heads: Query heads, a multiple of `kv_heads`.
        kv_heads: Key/value heads, 1 or more.
        members: Of the group, 1 or more.

    >>> [heads.q for heads in share_heads(7, 1, 3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    each = q_heads // kv_heads
    fewest = math.ceil(q_heads / members)
    grain = max(
        g for g in range(1, each + 1)
        if each % g == 0 and g * math.ceil(q_heads / g / members) == fewest
    )  # fmt: skip
    cuts = [i * (q_heads // grain) // members * grain for i in range(members + 1)]
    return tuple(_heads(first, stop, each) for first, stop in itertools.pairwise(cuts))


def kv_is_shared(heads: Sequence[Heads]) -> bool:
    """Whether some key/value head is read by more than one member of a group."""
    held = [share.kv for share in heads if share.q_heads]
    return any(first < stop for (_, stop), (first, _) in itertools.pairwise(held))


def _heads(first: int, stop: int, each: int) -> Heads:
    if first == stop:
        return Heads(q=(first, stop), kv=(0, 0), repeats=())
    kv = first // each, (stop - 1) // each + 1
    readers = [min(stop, (g + 1) * each) - max(first, g * each) for g in range(*kv)]
    unit = math.gcd(*readers)
    even = len(set(readers)) == 1
    return Heads(q=(first, stop), kv=kv, repeats=() if even else tuple(n // unit for n in readers))
