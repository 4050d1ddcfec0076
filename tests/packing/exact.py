"""The best plan there is, by trying them all: for a handful of samples on up to four ranks.

Every plan that the contract allows is covered: any windows, any ranks of a sample inside its
microbatch, any rank for each encoder unit, any order, any waves. Slow and obvious on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from dynapar.cluster import Cluster
from dynapar.costs import Costs, coefficients
from dynapar.meta import SampleTable
from dynapar.packing.ticks import latency_ticks, sample_columns, unit_columns

NEVER = 1 << 60
Window = tuple[int, int]


def windows(cluster: Cluster, inside: Window) -> list[Window]:
    """(first, width) of every ring that the cluster allows inside a window."""
    node, half, found = cluster.ranks_per_node, cluster.half_node, []
    first, width = inside
    for size in range(1, width + 1):
        for start in range(first, first + width - size + 1):
            one_node = start // node == (start + size - 1) // node
            whole_halves = start % half == 0 and size % half == 0
            if one_node if size <= node else whole_halves:
                found.append((start, size))
    return found


class Exact:
    """All microbatches of one step, priced."""

    def __init__(
        self, samples: SampleTable, cluster: Cluster, costs: Costs, capacity: int, encoder: int
    ) -> None:
        self.cluster, self.capacity, self.encoder = cluster, capacity, encoder
        self.n = len(samples)
        self.constants = coefficients(costs, ranks_per_node=cluster.ranks_per_node)
        self.tokens = samples.llm_tokens.tolist()
        degrees = range(1, cluster.ranks + 1)
        self.ticks = {
            d: sample_columns(samples.llm_tokens, d, self.constants, reach=samples.reach)
            for d in degrees
        }
        self.units = [samples.units(i).tolist() for i in range(self.n)]
        times = unit_columns(samples.unit_tokens, self.constants).tolist()
        edges = samples.unit_offsets.tolist()
        self.unit_times = [times[edges[i] : edges[i + 1]] for i in range(self.n)]
        self.prices = {
            (window, members): list(self._prices(window, members))
            for window in windows(cluster, (0, cluster.ranks))
            for members in range(1, 1 << self.n)
        }

    def _prices(self, window: Window, members: int) -> Iterator[tuple[int, int, int]]:
        """(whole, encoder, LLM) ticks of every way to run these samples on this window, pruned."""
        rows = [i for i in range(self.n) if members >> i & 1]
        inner = windows(self.cluster, window)
        width = window[1]
        best: set[tuple[int, int, int]] = set()
        units = [(i, u) for i in rows for u in range(len(self.units[i]))]
        for places in product(inner, repeat=len(rows)):
            llm = self._llm(window, rows, places)
            if llm is None:
                continue
            latency = int(latency_ticks(max(size for _, size in places), self.constants))
            base = self.constants.fixed + latency
            for ranks in product(range(width), repeat=len(units)):
                held, load = [0] * width, [0] * width
                for (i, u), rank in zip(units, ranks, strict=True):
                    held[rank] += self.units[i][u]
                    load[rank] += self.unit_times[i][u]
                if max(held) <= self.encoder:
                    whole = max(a + b for a, b in zip(llm, load, strict=True))
                    best.add((whole + base, max(load), max(llm) + base))
        kept = [a for a in best if not any(b != a and _covers(b, a) for b in best)]
        yield from sorted(kept)

    def _llm(self, window: Window, rows: list[int], places: tuple[Window, ...]) -> list[int] | None:
        first, width = window
        load, held, busy = [0] * width, [0] * width, [False] * width
        for i, (start, size) in zip(rows, places, strict=True):
            edges = [k * self.tokens[i] // (2 * size) for k in range(2 * size + 1)]
            for j in range(size):
                rank = start - first + j
                held[rank] += edges[j + 1] - edges[j]
                held[rank] += edges[2 * size - j] - edges[2 * size - 1 - j]
                load[rank] += int(self.ticks[size][i].sum())
                busy[rank] = True
        if max(held) > self.capacity:
            return None
        return [a + self.constants.linear_rank * b for a, b in zip(load, busy, strict=True)]

    def step(self) -> int:
        """The least makespan where ranks meet once."""
        self._best = NEVER
        self._queue((1 << self.n) - 1, (0,) * self.cluster.ranks)
        return self._best

    def _queue(self, left: int, free: tuple[int, ...]) -> None:
        if not left:
            self._best = min(self._best, max(free))
            return
        for (window, members), prices in self.prices.items():
            if members & ~left or not prices:
                continue
            first, width = window
            end = max(free[first : first + width]) + min(whole for whole, _, _ in prices)
            if end < self._best:
                after = (*free[:first], *[end] * width, *free[first + width :])
                self._queue(left & ~members, after)

    def waves(self) -> int:
        """The least makespan where ranks meet in waves."""
        full = 1 << self.n
        wave = [self._wave(members) for members in range(full)]
        best = [0] + [NEVER] * (full - 1)
        for left in range(1, full):
            part = left
            while part:
                best[left] = min(best[left], wave[part] + best[left & ~part])
                part = (part - 1) & left
        return best[-1]

    def _wave(self, members: int) -> int:
        if not members:
            return NEVER
        ways = self._beside(0, members)
        media = any(self.units[i] for i in range(self.n) if members >> i & 1)
        floor = self.constants.encoder_floor if media else 0
        llm = max(self.constants.llm_floor, self.constants.fixed)
        return min((max(e, floor) + max(m, llm) for e, m in ways), default=NEVER)

    def _beside(self, rank: int, members: int) -> set[tuple[int, int]]:
        """(encoder, LLM) of every way to run these samples beside each other from `rank` on."""
        if not members:
            return {(0, 0)}
        if rank == self.cluster.ranks:
            return set()
        ways = set(self._beside(rank + 1, members))
        for (window, own), prices in self.prices.items():
            if window[0] == rank and not own & ~members:
                rest = self._beside(rank + window[1], members & ~own)
                ways |= {(max(e, f), max(m, k)) for _, e, m in prices for f, k in rest}
        return ways


def _covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
