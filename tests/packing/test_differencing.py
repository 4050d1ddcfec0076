from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.packing.differencing import largest_differencing

WEIGHTS = st.lists(st.integers(0, 1000), max_size=40)


def slow_differencing(weights: list[int], bins: int) -> list[int]:
    """Sums of the bins, descending: whole partitions in a list, joined by the rule's own words."""
    parts = [([w] + [0] * (bins - 1), age) for age, w in enumerate(weights)]
    for age in range(len(weights), 2 * len(weights) - 1):
        parts.sort(key=lambda part: (part[0][-1] - part[0][0], part[1]))
        (one, _), (other, _), *rest = parts
        joined = sorted((a + b for a, b in zip(one, other[::-1], strict=True)), reverse=True)
        parts = [*rest, (joined, age)]
    return parts[0][0] if parts else [0] * bins


def sums(weights: list[int], bins: int) -> list[int]:
    found = largest_differencing(np.array(weights, np.int64), bins)
    assert len(found) == len(weights)
    assert all(0 <= b < bins for b in found)
    return [sum(w for w, b in zip(weights, found, strict=True) if b == k) for k in range(bins)]


@given(WEIGHTS, st.integers(1, 9))
def test_it_is_karmarkars_and_karps_rule(weights: list[int], bins: int) -> None:
    assert sorted(sums(weights, bins), reverse=True) == slow_differencing(weights, bins)


def test_the_textbook_example() -> None:
    assert sums([8, 7, 6, 5, 4], 2) == [16, 14]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="bins is 0; expected 1 or more"):
        largest_differencing(np.array([1]), 0)
    with pytest.raises(ValueError, match="weights has -1; expected 0 or more"):
        largest_differencing(np.array([3, -1]), 2)
