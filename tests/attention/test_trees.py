"""A tree's mask is, for every path from the root, that of the path alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynapar.attention.bands import check_bands
from dynapar.attention.trees import tree, tree_positions
from tests.attention.test_bands import seen

Tree = tuple[list[int], list[int]]


@st.composite
def trees(draw: st.DrawFn, nodes: int = 8, tokens: int = 6) -> Tree:
    """Lengths and parents, roots too, in depth-first order."""
    lengths = draw(st.lists(st.integers(1, tokens), min_size=1, max_size=nodes))
    parents, path = [-1], [0]
    for node in range(1, len(lengths)):
        parent = draw(st.sampled_from([-1, *path]))
        path = [*path[: path.index(parent) + 1], node] if parent >= 0 else [node]
        parents.append(parent)
    return lengths, parents


def path_rows(lengths: Sequence[int], parents: Sequence[int], node: int) -> NDArray[np.int64]:
    """The tokens of the sequence on the way from the root to the end of a node."""
    ends = np.cumsum(lengths)
    rows: list[int] = []
    while node >= 0:
        rows = [*range(ends[node] - lengths[node], ends[node]), *rows]
        node = parents[node]
    return np.array(rows)


@given(trees(), st.none() | st.integers(1, 20))
def test_each_path_sees_itself_as_it_would_alone_and_nothing_else(
    made: Tree, width: int | None
) -> None:
    lengths, parents = made
    bands = tree(lengths, parents, width=width)
    check_bands(sum(lengths), bands)
    counts = seen(sum(lengths), bands)
    want = np.zeros_like(counts)
    for node in range(len(lengths)):
        rows = path_rows(lengths, parents, node)
        distance = np.arange(len(rows))[:, None] - np.arange(len(rows))[None]
        alone = (distance >= 0) & (distance < (width or len(rows)))
        want[np.ix_(rows, rows)] = alone
    assert (counts == want).all()


@given(trees())
def test_positions_are_those_of_each_path_alone(made: Tree) -> None:
    lengths, parents = made
    positions = tree_positions(lengths, parents)
    for node in range(len(lengths)):
        rows = path_rows(lengths, parents, node)
        assert positions[rows].tolist() == list(range(len(rows)))


def test_a_tree_without_a_window_has_one_band_for_each_node() -> None:
    assert len(tree([5] * 9, [-1, 0, 1, 1, 0, 4, 4, -1, 7])) == 9


def test_large_trees_are_checked_quickly() -> None:
    """Bands that no key of another band meets are not compared with it."""
    count = 20_000
    check_bands(2 * count, tree([2] * count, [-1, *[0] * (count - 1)]))


@pytest.mark.parametrize(
    ("lengths", "parents", "width", "message"),
    [
        ([2, 3], [-1], None, "has 2 lengths and 1 parents; expected one of each for every node"),
        ([2, 0], [-1, 0], None, r"lengths\[1\] is 0; expected 1 or more: leave empty nodes out"),
        ([1, 1], [-1, 1], None, r"parents\[1\] is 1; expected -1 or one of \[0\], the nodes from"),
        ([1, 1, 1, 1], [-1, 0, 0, 1], None, r"parents\[3\] is 1; expected -1 or one of \[0, 2\]"),
        ([1], [-2], None, r"parents\[0\] is -2; expected -1 or one of \[\]"),
        ([2], [-1], 0, "width is 0; expected 1 or more: count the token itself"),
    ],
)
def test_what_is_no_tree_is_named(
    lengths: list[int], parents: list[int], width: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tree(lengths, parents, width=width)


def test_an_empty_tree_is_an_empty_mask() -> None:
    assert tree([], []) == ()
    assert tree_positions([], []).tolist() == []
