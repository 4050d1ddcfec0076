"""Describe a tree: a sequence whose branches share what comes before them.

Samples that begin alike, such as answers to one prompt or turns of one conversation, need the
shared part once. A tree is a list of *nodes*, runs of tokens, in depth-first order: each after its
parent, before the parent's next child. A token sees the tokens of its own node up to itself and all
tokens of the nodes above it. What it would see in a sequence of its own, root to node, it sees
here, at the same positions.

Imports numpy alone: the planner prices trees by their bands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .bands import UNLIMITED, Band, Bands, IntArray


def tree(lengths: Sequence[int], parents: Sequence[int], *, width: int | None = None) -> Bands:
    """The mask of a tree: one band for each node, or with a window one for each node that sees it.

    Args:
        lengths: Tokens of each node, 1 or more; the sequence is the nodes one after another.
        parents: The parent of each node, by number; -1 for a root. Depth-first order.
        width: Tokens in sight of a sliding window along the path from the root; None is no window.

    Raises:
        ValueError: A length or width is below 1, or the nodes are not a tree in depth-first order.

    >>> [band[:4] for band in tree([3, 2, 4], [-1, 0, 0])]
    [(0, 9, 0, 3), (3, 5, 3, 5), (5, 9, 5, 9)]
    """
    paths = _paths(lengths, parents)
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64)).tolist()
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    if width is None:
        last = list(range(len(lengths)))
        for node, path in enumerate(paths):
            for above in path:
                last[above] = node
        return tuple(
            Band(start, ends[last[node]], start, ends[node], 0, UNLIMITED)
            for node, start in enumerate(starts)
        )
    if width < 1:
        raise ValueError(f"width is {width}; expected 1 or more: count the token itself")
    depths = _depths(lengths, paths)
    # Of other branches: tokens of the sequence that lie before a node and not on its path.
    aside = [start - depth for start, depth in zip(starts, depths, strict=True)]
    return tuple(
        Band(starts[node], ends[node], starts[above], ends[above], skipped, skipped + width - 1)
        for node, path in enumerate(paths)
        for above in path
        for skipped in (aside[node] - aside[above],)
    )


def tree_positions(lengths: Sequence[int], parents: Sequence[int]) -> IntArray:
    """Where each token stands on its path from the root: the position ids of text.

    Args:
        lengths: As of `tree`.
        parents: As of `tree`.

    Returns:
        (tokens,) int64.

    >>> tree_positions([3, 2, 4], [-1, 0, 0]).tolist()
    [0, 1, 2, 3, 4, 3, 4, 5, 6]
    """
    paths = _paths(lengths, parents)
    depths = _depths(lengths, paths)
    runs = [depth + np.arange(length) for length, depth in zip(lengths, depths, strict=True)]
    return np.concatenate([np.empty(0, dtype=np.int64), *runs])


def _depths(lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> list[int]:
    """Tokens above each node."""
    return [sum(lengths[above] for above in path[:-1]) for path in paths]


def _paths(lengths: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The nodes from the root to each node, itself included."""
    if len(lengths) != len(parents):
        raise ValueError(
            f"a tree has {len(lengths)} lengths and {len(parents)} parents; expected one of each "
            "for every node: give -1 as the parent of a root"
        )
    paths: list[tuple[int, ...]] = []
    path: tuple[int, ...] = ()
    for node, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if length < 1:
            raise ValueError(
                f"lengths[{node}] is {length}; expected 1 or more: leave empty nodes out"
            )
        if parent == -1:
            path = ()
        elif parent in path:
            path = path[: path.index(parent) + 1]
        else:
            raise ValueError(
                f"parents[{node}] is {parent}; expected -1 or one of {list(path)}, the nodes from "
                "the root to the node before: list the nodes depth first"
            )
        path = (*path, node)
        paths.append(path)
    return paths
