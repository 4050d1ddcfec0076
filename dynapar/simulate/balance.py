"""Spread weights over bins by largest differencing."""

from __future__ import annotations

import heapq

import numpy as np

from dynapar.packing.ticks import IntArray


def largest_differencing(weights: IntArray, bins: int) -> IntArray:
    """Give each weight a bin so that the fullest is little fuller than the emptiest.

    Karmarkar and Karp's rule for any number of bins: every weight begins as a partition of its
    own; the two partitions with the widest spread are joined, the fullest bin of one with the
    emptiest of the other, until one is left. Ties go to the partition that is older. Bins are
    numbered from the fullest.

    Args:
        weights: (n,) int64, 0 or more.
        bins: 1 or more.

    Returns:
        (n,) int64, the bin of each weight.
    """
    n = len(weights)
    if not n:
        return np.zeros(0, np.int64)
    # A partition is its bins' sums, descending, without the empty ones, and a set of each.
    heap: list[tuple[int, int, IntArray, IntArray]] = [
        (-int(weights[i]) if bins > 1 else 0, i, weights[i : i + 1], np.array([i]))
        for i in range(n)
    ]
    heapq.heapify(heap)
    # Sets are trees: `parent` of a set's head is another head, and the last one's is itself.
    parent = np.arange(n)
    for age in range(n, 2 * n - 1):
        _, _, one, one_heads = heapq.heappop(heap)
        _, _, other, other_heads = heapq.heappop(heap)
        sums, heads, gone, kept = _join(one, one_heads, other, other_heads, bins)
        parent[gone] = kept
        spread = int(sums[0] - (sums[-1] if len(sums) == bins else 0))
        heapq.heappush(heap, (-spread, age, sums, heads))
    heads = heap[0][3]
    while not np.array_equal(parent, parent[parent]):
        parent = parent[parent]
    number = np.zeros(n, np.int64)
    number[heads] = np.arange(len(heads))
    return number[parent]


def _join(
    one: IntArray, one_heads: IntArray, other: IntArray, other_heads: IntArray, bins: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Sums and heads of the joined partition; the heads that went into which other heads."""
    both = max(0, len(one) + len(other) - bins)
    # The emptiest `both` bins of one meet the emptiest of the other, crosswise.
    alone, shared = len(one) - both, one[len(one) - both :] + other[len(other) - both :][::-1]
    kept, gone = one_heads[alone:], other_heads[len(other) - both :][::-1]
    sums = np.concatenate((one[:alone], shared, other[: len(other) - both]))
    heads = np.concatenate((one_heads[:alone], kept, other_heads[: len(other) - both]))
    order = np.argsort(-sums, kind="stable")
    return sums[order], heads[order], gone, kept
