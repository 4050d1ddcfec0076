"""Find the machine that suits a sample without looking at all of them.

Machines of one width are the leaves of a tree, whose nodes hold the least and the greatest end and
the fewest tokens below them: branches that cannot hold a better machine are not entered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import inlined, kernel
from .moldable import NEVER, Jobs, Limits, dealt_tokens, overhead, remainder
from .strip import Strip
from .ticks import Coefficients, IntArray


class Forest(NamedTuple):
    """A binary tree for each width; node 1 is a root, nodes 2k and 2k + 1 are below node k."""

    widths: IntArray
    """(w,) ranks of the machines of each tree, ascending."""
    base: IntArray
    """(w,) where the nodes of each tree begin."""
    leaves: IntArray
    """(w,) leaves of each tree, a power of two; node `leaves` is the first of them."""
    earliest: IntArray
    """(nodes,) least end of the machines below."""
    latest: IntArray
    """(nodes,) greatest end, or second load if that is greater; -1 without machines."""
    tokens: IntArray
    """(nodes,) fewest tokens in the open microbatch of a machine below."""
    machine: IntArray
    """(nodes,) the machine of each leaf, or -1."""
    leaf: IntArray
    """(machines,) the node of each machine."""
    tree: IntArray
    """(machines,) the tree of each machine."""
    stack: IntArray
    """Scratch."""


@kernel
def plant(strip: Strip) -> Forest:
    """Trees of all machines of a strip."""
    count = strip.counts[1]
    own = strip.machine_width[:count]
    widths = np.unique(own)
    trees = widths.shape[0]
    base, leaves = np.zeros(trees, np.int64), np.ones(trees, np.int64)
    members = np.zeros(trees, np.int64)
    tree = np.searchsorted(widths, own).astype(np.int64)
    for m in range(count):
        members[tree[m]] += 1
    nodes = 0
    for w in range(trees):
        while leaves[w] < members[w]:
            leaves[w] *= 2
        base[w] = nodes
        nodes += 2 * leaves[w]
    forest = Forest(
        widths,
        base,
        leaves,
        np.full(nodes, NEVER, np.int64),
        np.full(nodes, -1, np.int64),
        np.full(nodes, NEVER, np.int64),
        np.full(nodes, -1, np.int64),
        np.zeros(count, np.int64),
        tree,
        np.zeros(128, np.int64),
    )
    members[:] = 0
    for m in range(count):
        w = tree[m]
        node = base[w] + leaves[w] + members[w]
        members[w] += 1
        forest.machine[node], forest.leaf[m] = m, node - base[w]
        forest.earliest[node] = strip.machine_end[m]
        forest.latest[node] = max(strip.machine_end[m], strip.machine_shadow[m])
        top = strip.machine_top[m]
        forest.tokens[node] = strip.tokens[top] if top >= 0 else 0
    for w in range(trees):
        for node in range(leaves[w] - 1, 0, -1):
            one, at = base[w] + 2 * node, base[w] + node
            forest.earliest[at] = min(forest.earliest[one], forest.earliest[one + 1])
            forest.latest[at] = max(forest.latest[one], forest.latest[one + 1])
            forest.tokens[at] = min(forest.tokens[one], forest.tokens[one + 1])
    return forest


@inlined
def refresh(forest: Forest, strip: Strip, m: int) -> None:
    """Take over machine m's end and open microbatch."""
    base, node = forest.base[forest.tree[m]], forest.leaf[m]
    earliest, latest, tokens = forest.earliest, forest.latest, forest.tokens
    earliest[base + node] = strip.machine_end[m]
    latest[base + node] = max(strip.machine_end[m], strip.machine_shadow[m])
    top = strip.machine_top[m]
    tokens[base + node] = strip.tokens[top] if top >= 0 else 0
    node //= 2
    while node > 0:
        one, at = base + 2 * node, base + node
        earliest[at] = min(earliest[one], earliest[one + 1])
        latest[at] = max(latest[one], latest[one + 1])
        tokens[at] = min(tokens[one], tokens[one + 1])
        node //= 2


@inlined
def pick(
    forest: Forest, strip: Strip, i: int, target: int, fullest: bool, single: bool,
    ticks: IntArray, share: IntArray, column: IntArray, jobs: Jobs, limits: Limits,
    costs: Coefficients,
) -> tuple[int, int, bool]:  # fmt: skip
    """The machine for sample i: that which ends earliest with it, or (`fullest`) last by `target`.

    Args:
        forest: The machines.
        strip: Their microbatches.
        i: The sample.
        target: Read where `fullest`.
        fullest: Which machine is wanted.
        single: One microbatch a machine; otherwise a full one is closed and another opened.
        ticks: (n, c) ticks of each sample at each width (see `moldable.width_columns`).
        share: (n, c) its tokens on a rank, likewise.
        column: (w,) the column of each tree.
        jobs: All samples.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        The machine (-1: none has room), its end with the sample, and whether that needs a new
        microbatch.
    """
    # One body with local names: a call for each machine would cost more than what it does.
    earliest, latest, held, stack = forest.earliest, forest.latest, forest.tokens, forest.stack
    tops, shadows, encoded = strip.machine_top, strip.machine_shadow, strip.encoder_tokens
    largest, counts, dearest = strip.unit_size, strip.units, strip.unit_ticks
    size, count, encoder = jobs.unit_size[i], jobs.units[i], jobs.encoder_tokens[i]
    dear, shadow = jobs.unit_ticks[i], jobs.shadow[i]
    capacity, encoder_capacity = limits.capacity, limits.encoder_capacity
    best, best_end, best_new = -1, NEVER, False
    best_key = -1 if fullest else NEVER
    for w in range(forest.widths.shape[0]):
        width, base, leaves = forest.widths[w], forest.base[w], forest.leaves[w]
        tokens, added = share[i, column[w]], ticks[i, column[w]]
        if tokens > capacity:
            continue
        extra = overhead(width, costs) + remainder(dear, width)
        most = max(added + extra, shadow // width)
        fresh = encoder == 0 or dealt_tokens(encoder, size, count, width) <= encoder_capacity
        stack[0], depth = 1, 1
        while depth > 0:
            depth -= 1
            node = stack[depth]
            at = base + node
            least = earliest[at] + added
            if held[at] + tokens > capacity:
                if single:
                    continue
                least += overhead(width, costs)
            if fullest:
                if least > target or latest[at] + most <= best_key:
                    continue
            elif least >= best_key:
                continue
            if node < leaves:
                one = 2 * node
                if fullest:
                    first = one if latest[base + one] >= latest[base + one + 1] else one + 1
                else:
                    first = one if earliest[base + one] <= earliest[base + one + 1] else one + 1
                stack[depth], stack[depth + 1] = 2 * one + 1 - first, first
                depth += 2
                continue
            m = forest.machine[at]
            if m < 0:
                continue
            b = tops[m]
            new = b < 0 or held[at] + tokens > capacity
            if not new and encoder > 0:
                largest_unit = max(largest[b], size)
                dealt = dealt_tokens(encoded[b] + encoder, largest_unit, counts[b] + count, width)
                new = dealt > encoder_capacity
            end = earliest[at] + added
            if new:
                if (single and b >= 0) or not fresh:
                    continue
                end += extra
            elif dear > dearest[b]:
                end += remainder(dear - dearest[b], width)
            key = max(end, shadows[m] + shadow // width)
            if (fullest and best_key < key <= target) or (not fullest and key < best_key):
                best, best_key, best_end, best_new = m, key, end, new
    return best, best_end, best_new
