"""Spread weights over bins by largest differencing: Karmarkar and Karp's rule.

Every weight begins as a partition of its own, with all bins but one empty. The two partitions with
the widest spread (fullest bin less emptiest) are joined, the fullest bin of one with the emptiest
of the other, until one is left. It balances few weights better than the longest-first rule, whose
last weights decide how uneven the bins end.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .ticks import IntArray

SORTED_BY_HAND = 16
"""Up to so many sums are sorted by insertion, which allocates nothing else."""


class _Pool(NamedTuple):
    """Partitions of n weights: their bins that are not empty, fullest first.

    Together they never hold more than n bins, so that room for 2n is compacted now and then.
    """

    sums: IntArray
    """(2n,) of the bins."""
    firsts: IntArray
    """(2n,) the first weight of each bin."""
    begin: IntArray
    """(2n,) where each partition's bins begin."""
    size: IntArray
    """(2n,) its bins; 0 once it has been joined."""
    joined: IntArray
    """(n,) the weight whose bin each weight is in; itself for a bin's first."""


@kernel
def _compact(pool: _Pool, partitions: int) -> int:
    """Move all bins to the front; returns how many there are."""
    used = 0
    for p in range(partitions):
        for k in range(pool.size[p]):
            pool.sums[used + k] = pool.sums[pool.begin[p] + k]
            pool.firsts[used + k] = pool.firsts[pool.begin[p] + k]
        pool.begin[p] = used
        used += pool.size[p]
    return used


@kernel
def _fullest_first(sums: IntArray) -> IntArray:
    """Where these sums stand when sorted, fullest first; ties keep their order."""
    count = sums.shape[0]
    if count > SORTED_BY_HAND:
        return np.argsort(-sums, kind="mergesort")
    ranking = np.arange(count)
    for k in range(1, count):
        place, own = k, sums[k]
        while place > 0 and sums[ranking[place - 1]] < own:
            ranking[place] = ranking[place - 1]
            place -= 1
        ranking[place] = k
    return ranking


@kernel
def _join(pool: _Pool, a: int, b: int, bins: int, to: int) -> int:
    """Write the joined partition of a and b at `to`; returns its bins."""
    sums, firsts = pool.sums, pool.firsts
    one, other = pool.begin[a], pool.begin[b]
    both = max(0, pool.size[a] + pool.size[b] - bins)
    one_end, other_end = one + pool.size[a] - both, other + pool.size[b] - both
    for k in range(both):  # the emptiest bins of one meet those of the other, crosswise
        p, q = one_end + k, other_end + both - 1 - k
        sums[p] += sums[q]
        pool.joined[firsts[q]] = firsts[p]
    ranking = _fullest_first(sums[one_end : one_end + both])
    count = int(one_end - one + other_end - other + both)
    shared = 0
    for k in range(to, to + count):  # three runs, each from its fullest bin down
        best, source = -1, 0
        if one < one_end:
            best, source = sums[one], one
        if shared < both and sums[one_end + ranking[shared]] > best:
            source = one_end + ranking[shared]
            best = sums[source]
        if other < other_end and sums[other] > best:
            source = other
        sums[k], firsts[k] = sums[source], firsts[source]
        if source == one and one < one_end:
            one += 1
        elif source == other and other < other_end:
            other += 1
        else:
            shared += 1
    return count


@kernel
def _differencing(weights: IntArray, bins: int) -> IntArray:
    n = weights.shape[0]
    room = 2 * n
    pool = _Pool(
        np.zeros(room, np.int64),
        np.zeros(room, np.int64),
        np.zeros(room, np.int64),
        np.zeros(room, np.int64),
        np.arange(n),
    )
    # Not a comprehension: numba 0.68 loses what is written to a named tuple's arrays beside one.
    heap = [(0, 0)]
    heap.pop()
    for i in range(n):
        pool.sums[i], pool.firsts[i] = weights[i], i
        pool.begin[i], pool.size[i] = i, 1
        heap.append((-int(weights[i]) if bins > 1 else 0, i))
    heapq.heapify(heap)
    used = n
    for age in range(n, 2 * n - 1):
        a, b = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        if used + min(bins, pool.size[a] + pool.size[b]) > 2 * n:
            used = _compact(pool, age)
        count = _join(pool, a, b, bins, used)
        pool.begin[age], pool.size[age] = used, count
        pool.size[a], pool.size[b] = 0, 0
        least = int(pool.sums[used + count - 1]) if count == bins else 0
        heapq.heappush(heap, (least - int(pool.sums[used]), age))
        used += count
    number = np.zeros(n, np.int64)
    last = 2 * n - 2
    for k in range(pool.size[last]):
        number[pool.firsts[pool.begin[last] + k]] = k
    out = np.empty(n, np.int64)
    for i in range(n):
        root = i
        while pool.joined[root] != root:
            root = pool.joined[root]
        pool.joined[i] = root
        out[i] = number[root]
    return out


def largest_differencing(weights: IntArray, bins: int) -> IntArray:
    """Give each weight a bin, so that the fullest bin is little fuller than the emptiest.

    Ties go to the partition that is older. Bins are numbered from the fullest; of bins that would
    be empty there may be some. O(n * bins) time at worst.

    Args:
        weights: (n,) int64, 0 or more.
        bins: 1 or more.

    Returns:
        (n,) int64, the bin of each weight.

    >>> largest_differencing(np.array([8, 7, 6, 5, 4]), 2).tolist()
    [1, 0, 1, 0, 0]
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; expected 1 or more")
    if (weights < 0).any():
        raise ValueError(f"weights has {int(weights.min())}; expected 0 or more")
    if not len(weights):
        return np.zeros(0, np.int64)
    return _differencing(np.array(weights, np.int64), bins)
