"""Tables of samples that share prefixes, for tests that group them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from dynapar.meta import SampleTable
from dynapar.prefixes import Prefix, collect_prefixes


class Group(NamedTuple):
    """Samples of one prefix; or, without tokens in the prefix, samples that share nothing."""

    tokens: int
    """LLM tokens of the prefix."""
    branches: tuple[int, ...]
    """LLM tokens of each sample after it."""
    units: tuple[int, ...] = ()
    """Encoder tokens of the prefix's units; each LLM placeholder of them is one token."""
    own_units: tuple[tuple[int, ...], ...] = ()
    """Encoder tokens of each branch's units."""


def prefixed(groups: Sequence[Group], turns: int = 1) -> SampleTable:
    """Samples "s0", "s1", ... of prefixes "p0", "p1", ...; every `turns`-th one after another."""
    rows = []
    for number, group in enumerate(groups):
        for place, branch in enumerate(group.branches):
            own = group.own_units[place] if group.own_units else ()
            count = len(group.units)
            text = group.tokens - count
            prefix = Prefix(f"p{number}", group.tokens, text, count) if group.tokens else None
            rows.append((group.tokens + branch, (*group.units, *own), prefix))
    rows = [row for turn in range(turns) for row in rows[turn::turns]]
    tokens = np.array([row[0] for row in rows], np.int64)
    counts = np.array([len(row[1]) for row in rows], np.int64)
    texts = tokens - counts
    return SampleTable(
        ids=tuple(f"s{i}" for i in range(len(rows))),
        llm_tokens=tokens,
        text_tokens=texts,
        label_tokens=np.maximum(texts - 1, 0),
        modalities=(counts > 0).astype(np.uint8),
        unit_offsets=np.cumsum([0, *counts]).astype(np.int64),
        unit_tokens=np.array([unit for row in rows for unit in row[1]], np.int64),
        prefixes=collect_prefixes([(f"s{i}", row[1], row[2]) for i, row in enumerate(rows)]),
    )


@st.composite
def tables(draw: st.DrawFn, tokens: int = 60, groups: int = 5) -> SampleTable:
    """Of up to so many groups, each of a prefix and branches of up to so many tokens."""
    made = []
    for _ in range(draw(st.integers(1, groups))):
        branches = tuple(draw(st.lists(st.integers(4, tokens), min_size=1, max_size=5)))
        units = tuple(draw(st.lists(st.integers(1, 30), max_size=2)))
        own = tuple(tuple(draw(st.lists(st.integers(1, 30), max_size=2))) for _ in branches)
        least = len(units) + 1 if units else 0
        made.append(Group(draw(st.integers(least, tokens)), branches, units, own))
    shared = [group if group.tokens else group._replace(units=()) for group in made]
    return prefixed(shared, turns=draw(st.integers(1, 3)))
