"""Give samples to the machines that suit them, without looking at all machines for each.

Machines of one width are the leaves of a tree, whose nodes hold the least and the greatest end and
the fewest tokens below them: branches that cannot hold a better machine are not entered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._jit import kernel
from .moldable import (
    NEVER,
    Jobs,
    Limits,
    dealt_tokens,
    overhead,
    remainder,
    width_columns,
)
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


@kernel
def fill_machines(
    strip: Strip, samples: IntArray, target: int, single: bool, best_fit: bool, partial: bool,
    jobs: Jobs, limits: Limits, costs: Coefficients,
) -> bool:  # fmt: skip
    """Give each sample to the machine that ends earliest with it.

    Args:
        strip: Its machines are open; changed in place.
        samples: In the order in which they are given.
        target: Where the machines should end, in ticks.
        single: One microbatch a machine; otherwise a full one is closed and another opened.
        best_fit: Prefer the machine that ends last, but by `target`.
        partial: Samples that would not end by `target` stay out.
        jobs: All samples.
        limits: Cluster and capacities.
        costs: The coefficients.

    Returns:
        Whether every sample found room; the first that does not ends it, unless `partial`.
    """
    # One body with local names, taken once: what is called, or takes arrays out of a structure,
    # for each sample costs more than what it does.
    forest = plant(strip)
    table, shares, column = width_columns(forest.widths, jobs, costs)
    widths, bases, leaves, tree = forest.widths, forest.base, forest.leaves, forest.tree
    earliest, latest, held, stack = forest.earliest, forest.latest, forest.tokens, forest.stack
    machine, leaf = forest.machine, forest.leaf
    ends, shadows, tops = strip.machine_end, strip.machine_shadow, strip.machine_top
    used, encoded, largest = strip.tokens, strip.encoder_tokens, strip.unit_size
    counts, dearest, second = strip.units, strip.unit_ticks, strip.shadow
    extras = np.empty(widths.shape[0], np.int64)
    for w in range(widths.shape[0]):
        extras[w] = overhead(widths[w], costs)
    capacity, encoder_capacity = limits.capacity, limits.encoder_capacity
    sizes, units, encoders = jobs.unit_size, jobs.units, jobs.encoder_tokens
    dears, others = jobs.unit_ticks, jobs.shadow
    for i in samples:
        size, count, encoder, dear, shadow = sizes[i], units[i], encoders[i], dears[i], others[i]
        m, end, new = -1, NEVER, False
        fullest = best_fit
        while True:
            best_key = -1 if fullest else NEVER
            for w in range(widths.shape[0]):
                width, base = widths[w], bases[w]
                tokens, added = shares[i, column[w]], table[i, column[w]]
                if tokens > capacity:
                    continue
                extra = extras[w] + remainder(dear, width)
                most = max(added + extra, shadow // width)
                fresh = (
                    encoder == 0 or dealt_tokens(encoder, size, count, width) <= encoder_capacity
                )
                stack[0], depth = 1, 1
                while depth > 0:
                    depth -= 1
                    node = stack[depth]
                    at = base + node
                    least = earliest[at] + added
                    if held[at] + tokens > capacity:
                        if single:
                            continue
                        least += extras[w]
                    if fullest:
                        if least > target or latest[at] + most <= best_key:
                            continue
                    elif least >= best_key:
                        continue
                    if node < leaves[w]:
                        one = 2 * node
                        at = base + one
                        if fullest:
                            first = one if latest[at] >= latest[at + 1] else one + 1
                        else:
                            first = one if earliest[at] <= earliest[at + 1] else one + 1
                        stack[depth], stack[depth + 1] = 2 * one + 1 - first, first
                        depth += 2
                        continue
                    found = machine[at]
                    if found < 0:
                        continue
                    b = tops[found]
                    opens = b < 0 or held[at] + tokens > capacity
                    if not opens and encoder > 0:
                        dealt = dealt_tokens(
                            encoded[b] + encoder, max(largest[b], size), counts[b] + count, width
                        )
                        opens = dealt > encoder_capacity
                    ending = earliest[at] + added
                    if opens:
                        if (single and b >= 0) or not fresh:
                            continue
                        ending += extra
                    elif dear > dearest[b]:
                        ending += remainder(dear - dearest[b], width)
                    key = max(ending, shadows[found] + shadow // width)
                    if (fullest and best_key < key <= target) or (not fullest and key < best_key):
                        m, best_key, end, new = found, key, ending, opens
            if m >= 0 or not fullest:
                break
            fullest = False
        if m < 0 or (partial and end > target):
            if not partial:
                return False
            continue
        if new:
            _open(strip, m)
        b, w = tops[m], tree[m]
        used[b] += shares[i, column[w]]
        encoded[b] += encoder
        largest[b] = max(largest[b], size)
        dearest[b] = max(dearest[b], dear)
        counts[b] += count
        second[b] += shadow
        strip.microbatch[i] = b
        ends[m] = end
        shadows[m] += shadow // widths[w]
        base, node = bases[w], leaf[m]
        earliest[base + node] = end
        latest[base + node] = max(end, shadows[m])
        held[base + node] = used[b]
        node //= 2
        while node > 0:
            at = base + 2 * node
            earliest[base + node] = min(earliest[at], earliest[at + 1])
            latest[base + node] = max(latest[at], latest[at + 1])
            held[base + node] = min(held[at], held[at + 1])
            node //= 2
    return True


@kernel
def _open(strip: Strip, m: int) -> None:
    """Open a microbatch on machine m."""
    b = strip.counts[0]
    strip.counts[0] += 1
    strip.first[b], strip.width[b] = strip.machine_first[m], strip.machine_width[m]
    strip.start[b] = strip.machine_end[m]
    strip.machine[b] = m
    strip.machine_top[m] = b
