"""Decide by which scheme the rings of a run share attention, and say what was decided.

A configuration asks for a scheme, or leaves it to the prices of `dynapar.attention.prices`. The
choice for a ring follows from its ranks, from what its attention computes and moves, from the
model's heads and from the costs: all ranks find the same without talking.

Plans price every exchange as staged (`dynapar.packing.ticks`). `auto` departs from that only for
what the prices find cheaper; a scheme that was asked for may be dearer, which `describe` says.

Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from dynapar.attention.prices import Layer, Links, price
from dynapar.attention.select import Scheme, select
from dynapar.costs import Costs
from dynapar.errors import ConfigError
from dynapar.shapes import TextShape

SchemeAsked = Literal["auto", "staged", "ulysses", "hybrid"]
"""By price; rows of keys in stages; heads shared by the whole ring; heads shared in groups."""

SHOWN = 6
"""Degrees of which `describe` speaks; of more that a run may have, powers of two and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRules:
    """What a configuration asks for."""

    scheme: SchemeAsked = "auto"
    share: int | None = None
    """Ranks of a group, for "hybrid"; a ring of d ranks has groups of gcd(share, d)."""
    stages: int | None = None
    """Exchanges over which a ring's other groups are spread; None is one for each."""

    def __post_init__(self) -> None:
        if self.scheme not in get_args(SchemeAsked):
            raise ConfigError(
                f"scheme is {self.scheme!r}; expected one of {list(get_args(SchemeAsked))}: "
                "use 'auto'"
            )
        if self.scheme == "hybrid" and (self.share is None or self.share < 2):
            raise ConfigError(
                f"share is {self.share} with scheme 'hybrid'; expected 2 or more ranks of a group "
                "that share heads, such as those of a node. Give share, or use scheme: auto"
            )
        if self.scheme != "hybrid" and self.share is not None:
            raise ConfigError(
                f"share is {self.share} with scheme {self.scheme!r}; expected none, since only "
                "'hybrid' takes it: leave it out, or set scheme: hybrid"
            )
        if self.stages is not None and self.stages < 1:
            raise ConfigError(
                f"stages is {self.stages}; expected 1 or more, or none for one a group"
            )
        if self.stages is not None and self.scheme == "ulysses":
            raise ConfigError(
                f"stages is {self.stages} with scheme 'ulysses'; expected none, since a ring that "
                "shares heads as a whole has no stages: leave it out, or use scheme: hybrid"
            )

    def __str__(self) -> str:
        groups = "" if self.share is None else f" in groups of {self.share}"
        stages = "" if self.stages is None else f", stages {self.stages}"
        return f"{self.scheme}{groups}{stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemes:
    """How each ring of a run shares attention; equal on all ranks."""

    rules: SchemeRules = SchemeRules()
    text: TextShape | None = None
    """The language model's shape; None where no price decides."""
    costs: Costs | None = None
    """What computing and moving cost; None where no price decides."""
    itemsize: int = 4
    """Bytes of a number of queries, keys and values."""
    ranks_per_node: int = 1
    """Ranks 0 to that many - 1 are on one node, and so on."""

    @property
    def figures(self) -> bool:
        """Whether the costs say what schemes cost: what attention computes, and what moves."""
        costs = self.costs
        if costs is None or self.text is None:
            return False
        return costs.attention.layers > 0 and costs.exchange.kv_bytes_per_token > 0

    @property
    def priced(self) -> bool:
        """Whether prices decide, ring by ring."""
        return self.rules.scheme == "auto" and self.figures

    def at(self, degree: int) -> Scheme:
        """The scheme of every ring of a degree, where no price decides."""
        rules = self.rules
        if rules.scheme == "ulysses":
            return select(degree, name="ulysses")
        share = math.gcd(rules.share or 1, degree)
        if 1 < share < degree:
            return select(degree, name="hybrid", share=share, stages=rules.stages)
        return select(degree, name="staged" if share == 1 else "ulysses", stages=rules.stages)

    def of(self, ranks: Sequence[int], *, tokens: float, pairs: float, needed: float) -> Scheme:
        """The scheme of a ring in the layers of one mask class.

        Args:
            ranks: Of the ring; one rank alone is local.
            tokens: Rows of a rank's shard, on average over the ring.
            pairs: Visible (query, key) pairs of a rank, likewise.
            needed: Part of the other ranks' key rows that a rank needs, likewise. Where none is
                needed nothing is exchanged, and the ring is staged.
        """
        if not self.priced or len(ranks) == 1 or needed == 0:
            return self.at(len(ranks))
        layer = self._layer(tokens, pairs, needed)
        return select(len(ranks), stages=self.rules.stages, layer=layer, links=self._links(ranks))

    def of_causal(self, ranks: Sequence[int], tokens: int) -> Scheme:
        """The scheme of a ring that shares one causal sequence, so many tokens a rank."""
        pairs, needed = _causal(len(ranks), tokens)
        return self.of(ranks, tokens=tokens, pairs=pairs, needed=needed)

    def over_staged(self, ranks: Sequence[int], tokens: int) -> float:
        """Predicted time of a causal layer's attention over that of the staged exchange.

        Args:
            ranks: Of the ring, two or more.
            tokens: Of a rank.
        """
        pairs, needed = _causal(len(ranks), tokens)
        mine, staged = self.of_causal(ranks, tokens), select(len(ranks), name="staged")
        seconds = [
            self.seconds(ranks, each, tokens=tokens, pairs=pairs, needed=needed)
            for each in (mine, staged)
        ]
        return seconds[0] / seconds[1]

    def seconds(
        self, ranks: Sequence[int], scheme: Scheme, *, tokens: float, pairs: float, needed: float
    ) -> float:
        """Predicted attention of one layer, forward and backward, under a scheme.

        Args:
            ranks: Of the ring, two or more.
            scheme: For so many ranks.
            tokens: As in `of`.
            pairs: As in `of`.
            needed: As in `of`.
        """
        layer, links = self._layer(tokens, pairs, needed), self._links(ranks)
        return price(layer, links, share=scheme.share, stages=scheme.stages).seconds

    def _layer(self, tokens: float, pairs: float, needed: float) -> Layer:
        assert self.text is not None
        return Layer(
            q_heads=self.text.heads,
            kv_heads=self.text.kv_heads,
            head_dim=self.text.head_width,
            itemsize=self.itemsize,
            tokens=tokens,
            pairs=pairs,
            needed=needed,
        )

    def _links(self, ranks: Sequence[int]) -> Links:
        assert self.costs is not None
        attention, exchange = self.costs.attention, self.costs.exchange
        return Links(
            nodes=tuple(rank // self.ranks_per_node for rank in ranks),
            flops=attention.flops,
            bytes_per_s_in_node=exchange.bytes_per_s_in_node,
            bytes_per_s_across=exchange.bytes_per_s_across,
            latency=exchange.latency,
            half_rate_tokens=attention.half_rate_tokens,
        )


def name_of(degree: int, share: int) -> str:
    """What a ring's scheme is called.

    Args:
        degree: Ranks of the ring.
        share: Ranks of a group.

    >>> name_of(4, 2), name_of(4, 4), name_of(4, 1), name_of(1, 1)
    ('hybrid 2x2', 'ulysses', 'staged', 'local')
    """
    if degree == 1:
        return "local"
    if share == 1:
        return "staged"
    return "ulysses" if share == degree else f"hybrid {share}x{degree // share}"


def name_all(degree: int, shares: Sequence[int]) -> str:
    """The same for the mask classes of a ring: one name, or one for each where they differ.

    >>> name_all(3, (3, 3)), name_all(3, (3, 1))
    ('ulysses', 'ulysses + staged')
    """
    names = [name_of(degree, share) for share in shares]
    return names[0] if len(set(names)) == 1 else " + ".join(names)


def describe(schemes: Schemes, rings: Sequence[Sequence[int]], *, capacity: int) -> list[str]:
    """Which scheme each degree takes and why, and how that stands to what plans are priced by.

    Args:
        schemes: Of the run.
        rings: A ring of each degree that samples may have, ascending; those of one rank are
            passed over.
        capacity: Tokens of a rank up to which schemes may change.

    Returns:
        Lines for people.
    """
    rings = [ring for ring in rings if len(ring) > 1]
    if not rings:
        return ["attention: no rings, each sample is on one rank"]
    shown = rings
    if len(rings) > SHOWN:
        powers = [ring for ring in rings[:-1] if len(ring) & (len(ring) - 1) == 0]
        shown = [*powers[: SHOWN - 1], rings[-1]]
    parts = [f"degree {len(ring)} {_of_degree(schemes, ring, capacity)}" for ring in shown]
    between = "; those between alike" if len(rings) > len(shown) else ""
    lines = [f"attention: {_reason(schemes)}: {'; '.join(parts)}{between}"]
    return lines + _apart(schemes, shown, capacity)


def _reason(schemes: Schemes) -> str:
    rules, costs = schemes.rules, schemes.costs
    if rules.scheme != "auto":
        return f"{rules}, as configured"
    if costs is None:
        return f"{rules}, without costs"
    if not schemes.figures:
        return f"{rules}, costs {costs.name} do not say what moving keys and values costs"
    origin = "" if costs.measured else " (not measured here)"
    return f"{rules}, the cheapest by costs {costs.name}{origin}"


def _of_degree(schemes: Schemes, ring: Sequence[int], capacity: int) -> str:
    if not schemes.priced:
        return name_of(len(ring), schemes.at(len(ring)).share)

    @cache
    def share(tokens: int) -> int:
        return schemes.of_causal(ring, tokens).share

    powers = [1 << n for n in range(capacity.bit_length())]
    grid = sorted({*powers, capacity})
    text = name_of(len(ring), share(grid[0]))
    for low, high in itertools.pairwise(grid):
        if share(low) != share(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if share(middle) == share(low) else (low, middle)
            text += f", from {high:,} tokens a rank {name_of(len(ring), share(high))}"
    return text


def _apart(schemes: Schemes, rings: Sequence[Sequence[int]], capacity: int) -> list[str]:
    """How rings that are not staged stand to what plans are priced by."""
    lines = []
    rules, costs = schemes.rules, schemes.costs
    others = [
        ring
        for ring in rings
        if schemes.of_causal(ring, capacity) != select(len(ring), name="staged")
    ]
    where = None if costs is None else costs.measured_on
    apart = where is not None and where.attention != measured_as(rules)
    if schemes.figures and others:
        ratios = ", ".join(
            f"{schemes.over_staged(ring, capacity):.2f} times that at degree {len(ring)}"
            for ring in others
        )
        lines.append(
            f"attention: plans price rings as staged; by the same costs their attention takes "
            f"{ratios} (a causal sequence of {capacity:,} tokens a rank)"
        )
    elif costs is not None and others and (where is None or apart):
        lines.append(
            f"attention: plans price rings as staged, by costs {costs.name} that do not say what "
            f"{rules} takes"
        )
    if costs is not None and where is not None and apart:
        lines.append(
            f"attention: costs {costs.name} were measured with rings {where.attention}, and these "
            f"run {rules}: calibrate again with this configuration"
        )
    heads = None if schemes.text is None else schemes.text.heads
    idle = [ring for ring in rings if heads and schemes.at(len(ring)).share > heads]
    if idle and not schemes.priced and heads:
        lines.append(
            f"attention: the model has {heads} query heads, so that in rings of {len(idle[0])} or "
            "more some ranks compute no attention: give a smaller share, or max_degree"
        )
    return lines


def measured_as(rules: SchemeRules) -> str:
    """How rings share attention while costs are measured, when no price can decide yet."""
    return str(replace(rules, scheme="staged") if rules.scheme == "auto" else rules)


def _causal(degree: int, tokens: int) -> tuple[float, float]:
    """(pairs, needed) of each rank of a ring that shares one causal sequence in zigzag."""
    length = degree * tokens
    return length * (length + 1) / 2 / degree, 0.75
