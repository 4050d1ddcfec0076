"""Tilings against all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dynapar.packing.moldable import NEVER, Limits, may_start
from dynapar.packing.ticks import IntArray
from dynapar.packing.tiling import tile


def limits(
    nodes: int, node: int, degrees: tuple[int, ...], *, aligned: bool, pod: int = 0
) -> Limits:
    return Limits(
        ranks=nodes * node,
        node=node,
        grain=node // 2 if node % 2 == 0 else node,
        degrees=np.array(degrees, np.int64),
        largest=degrees[-1],
        pod=pod or nodes * node,
        aligned=aligned,
        capacity=1,
        encoder_capacity=1,
    )


def oracle(table: IntArray, cluster: Limits) -> int:
    """The least largest time over all ways to give the blocks degrees."""
    best = NEVER
    degrees = cluster.degrees.tolist()
    for columns in itertools.product(range(len(degrees)), repeat=len(table)):
        widths = [degrees[column] for column in columns]
        firsts = np.cumsum([0, *widths]).tolist()
        if firsts[-1] != cluster.ranks:
            continue
        if all(may_start(f, w, cluster) for f, w in zip(firsts, widths, strict=False)):
            best = min(best, max(int(table[row, c]) for row, c in enumerate(columns)))
    return best


@pytest.mark.parametrize(
    ("nodes", "node", "degrees"),
    [
        (1, 4, (1, 2, 3, 4)),
        (1, 8, (1, 2, 4, 8)),
        (2, 4, (1, 2, 3, 4, 6, 8)),
        (3, 2, (1, 2, 3, 4, 5, 6)),
        (2, 3, (1, 2, 3, 6)),
        (1, 6, (1, 2, 4)),
    ],
)
@pytest.mark.parametrize("aligned", [False, True])
def test_no_way_is_sooner(
    nodes: int, node: int, degrees: tuple[int, ...], *, aligned: bool
) -> None:
    cluster = limits(nodes, node, degrees, aligned=aligned)
    rng = np.random.default_rng(0)
    for _ in range(40):
        blocks = int(rng.integers(1, 6))
        work = rng.integers(1, 100, blocks)
        table = 10 + 60 * work[:, None] // cluster.degrees[None, :] + 2 * cluster.degrees[None, :]
        table[rng.random(table.shape) < 0.1] = NEVER
        value, widths = tile(table, cluster)
        assert value == oracle(table, cluster)
        if value == NEVER:
            continue
        firsts = np.cumsum([0, *widths.tolist()]).tolist()
        assert firsts[-1] == cluster.ranks
        columns = [degrees.index(width) for width in widths.tolist()]
        assert max(int(table[row, c]) for row, c in enumerate(columns)) == value
        assert all(may_start(f, w, cluster) for f, w in zip(firsts, widths.tolist(), strict=False))


@pytest.mark.parametrize("pod", [8, 12])
@pytest.mark.parametrize("aligned", [False, True])
def test_where_windows_start(pod: int, *, aligned: bool) -> None:
    """Against the words: in a node anywhere, across nodes at half nodes, or at multiples."""
    degrees = tuple(d for d in (1, 2, 3, 4, 6, 8, 10, 12) if d <= pod)
    cluster = limits(3, 4, degrees, aligned=aligned, pod=pod)
    for degree in degrees:
        for first in range(12):
            last = first + degree - 1
            fits = first // 4 == last // 4 if degree <= 4 else first % 2 == 0 and last < 12
            offset = first % 4 if degree <= 4 else first
            expected = fits and (not aligned or offset % degree == 0)
            expected = expected and first // pod == last // pod
            assert may_start(first, degree, cluster) == expected
