"""Choose the scheme by which a ring shares attention: the one place where that is decided.

`local`: one rank holds all tokens. `staged`: the needed rows of keys and values come straight from
their owners in stages. `ulysses`: ranks trade rows for heads, each computes some heads over all
rows, and results go back. `hybrid`: ranks in groups, `ulysses` inside a group and `staged` between
the groups, which then hold the rows together; the other three are its corner cases. Degree 1 is
always local. Without figures the choice is staged; with them, what `prices.price` finds cheapest,
by a margin where it is not staged.

Imports no torch: the planner may ask too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from .prices import Layer, Links, price

SchemeName = Literal["local", "staged", "ulysses", "hybrid"]

SCHEMES: tuple[SchemeName, ...] = ("local", "staged", "ulysses", "hybrid")

MARGIN = 0.05
"""By how much a scheme that shares heads must be cheaper than staged to be chosen: no GPU has
confirmed the prices, and they leave out copies and launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a ring shares attention."""

    name: SchemeName
    share: int = 1
    """Positions of a group, which share heads: groups are runs of so many positions of the ring."""
    stages: tuple[tuple[int, ...], ...]
    """Rounds of each exchange between groups: in round t, group g fetches from group g - t (mod
    their number)."""

    @property
    def groups(self) -> int:
        """Groups of the ring."""
        return 1 + sum(len(rounds) for rounds in self.stages)

    @property
    def degree(self) -> int:
        """Positions of the ring."""
        return self.share * self.groups

    def in_stages(self, stages: int) -> Scheme:
        """The same scheme with its rounds spread over so many exchanges, or fewer.

        Raises:
            ValueError: There are less than 1.
        """
        return _scheme(self.degree, self.share, stages)


def select(
    degree: int,
    *,
    name: str = "auto",
    share: int | None = None,
    stages: int | None = None,
    layer: Layer | None = None,
    links: Links | None = None,
) -> Scheme:
    """Choose a scheme and its stages.

    Args:
        degree: Positions of the ring, 1 or more.
        name: One of `SCHEMES`, or "auto". Degree 1 is local, whichever exists.
        share: Positions of a group, for "hybrid": a divisor of the degree between 1 and itself.
            None is the cheapest, by `layer` and `links`.
        stages: Exchanges over which the other groups are spread, 1 or more; at most one for each
            is used. None is one for each, which holds as few fetched rows at once as a ring does;
            1 is an all-gather of the needed rows.
        layer: What one layer computes and moves. With `links` it makes "auto" the cheapest scheme,
            but staged if no other is cheaper by `MARGIN`; among equals ulysses, then the smallest
            groups. Without, auto is staged.
        links: What computing and moving cost on the ring's ranks.

    Raises:
        ValueError: The scheme does not exist, does not fit the degree, lacks what it needs, or has
            too few stages.
    """
    shares = _shares(degree, name, share)
    schemes = [_scheme(degree, one, stages) for one in shares]
    if len(schemes) == 1:
        return schemes[0]
    if layer is None or links is None:
        if name == "auto":
            return schemes[0]
        raise ValueError(
            f"attention scheme {name!r} at degree {degree} was asked for without share, layer and "
            f"links; expected the positions of a group, one of {shares}, or figures by which to "
            "choose: give share, or use 'auto'"
        )

    def seconds(scheme: Scheme) -> float:
        found = price(layer, links, share=scheme.share, stages=scheme.stages).seconds
        return found if scheme.share == 1 else found * (1 + MARGIN)

    return min(schemes, key=seconds)


def _shares(degree: int, name: str, share: int | None) -> list[int]:
    """The sizes of groups that are asked for, in order of preference."""
    if name not in ("auto", *SCHEMES) or (name == "local" and degree > 1):
        exists = "it does not exist" if name not in SCHEMES else "it does not fit this degree"
        raise ValueError(
            f"attention scheme {name!r} was asked for at degree {degree}: {exists}; expected one "
            f"of {['auto', *SCHEMES[degree > 1 :]]}: use 'auto'"
        )
    if share is not None and name != "hybrid":
        raise ValueError(
            f"share is {share} for attention scheme {name!r}; expected None: only 'hybrid' takes it"
        )
    inside = [u for u in range(2, degree) if degree % u == 0]
    if degree == 1 or name == "staged":
        return [1]
    if name == "ulysses":
        return [degree]
    if name == "auto":
        return [1, degree, *inside]
    if not inside or share not in (None, *inside):
        raise ValueError(
            f"attention scheme 'hybrid' was asked for at degree {degree} with share {share}; "
            f"expected a divisor of the degree, one of {inside}: use 'ulysses' where there is none"
        )
    return inside if share is None else [share]


def _scheme(degree: int, share: int, stages: int | None) -> Scheme:
    if stages is not None and stages < 1:
        raise ValueError(f"stages is {stages}; expected 1 or more: use None for one a group")
    rounds = range(1, degree // share)
    count = len(rounds) if stages is None else min(stages, len(rounds))
    bounds = [i * len(rounds) // count for i in range(count + 1)] if count else [0]
    name: SchemeName = "local"
    if degree > 1:
        name = "staged" if share == 1 else "ulysses" if share == degree else "hybrid"
    return Scheme(
        name=name,
        share=share,
        stages=tuple(tuple(rounds[a:b]) for a, b in itertools.pairwise(bounds)),
    )
