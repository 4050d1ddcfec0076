"""Entrain's assignment of samples to microbatches (arXiv 2605.27918), written anew.

Written from the paper's abstract and what others say of it; no code of theirs was seen. Its claim
is that one static layout is enough if samples are assigned in two levels: first the encoder's work
is made even over the microbatches of the step, then what the LLM has too much of in one is deferred
to others of the same step. What is open is decided in its favour:

- The degree is the one, of those that divide the cluster and hold the longest sample, at which the
  steps together are shortest here.
- Its estimates of work are our reference costs: a perfect profile.
- Work may be deferred to a microbatch of any ring, not of the same ring alone. A sample's encoder
  units move with it, since encoder and LLM run in one microbatch here; one without media moves
  first where it helps as much.
- Every ring runs the least number of microbatches at which all fits, one more as long as it does
  not. The longest microbatches stand in one wave, the next in another.
"""

from __future__ import annotations

import heapq

import numpy as np

from dynapar.packing.moldable import shared
from dynapar.packing.ticks import IntArray, sample_columns
from dynapar.simulate.peers.dhp import encoder_ticks, unit_sums
from dynapar.simulate.peers.request import PeerError, Piece, Plan, Planner, Request

MOVES = 4
"""Deferrals tried, times the samples."""


def load() -> Planner:
    """Nothing has to be installed."""
    return plan


def plan(request: Request) -> Plan:
    """Plan one step at `request.degree`.

    Raises:
        PeerError: The samples fit into no number of microbatches.
    """
    degree, count = request.degree, len(request.tokens)
    rings = request.ranks // degree
    shares = np.array([shared(tokens, degree) for tokens in request.tokens.tolist()])
    fewest = max(1, -(-int(shares.sum()) // (rings * request.capacity)))
    for microbatches in range(fewest, max(fewest, count) + 1):
        deal = _Deal(request, shares, rings * microbatches)
        if deal.assign():
            deal.defer()
            return deal.pieces(rings)
    raise PeerError(
        f"no number of microbatches up to {count} keeps within capacity {request.capacity:,} and "
        f"encoder_capacity {request.encoder_capacity:,} at degree {degree}"
    )


class _Deal:
    """Samples in `slots` microbatches of all rings."""

    def __init__(self, request: Request, shares: IntArray, slots: int) -> None:
        self.request, self.shares = request, shares
        constants, degree = request.constants, request.degree
        self.encoder = encoder_ticks(request)
        self.llm = sample_columns(request.tokens, degree, constants, reach=request.reach).sum(
            axis=1
        )
        self.encoded = unit_sums(request, request.unit_tokens)
        # As much as whole units can always be dealt out of, each to any rank that has room.
        uneven = int(request.unit_tokens.max(initial=0)) * (degree - 1)
        self.most = request.encoder_capacity * degree - uneven
        self.rows: list[list[int]] = [[] for _ in range(slots)]
        self.loads = np.zeros(slots, np.int64)
        self.tokens, self.encoder_tokens = np.zeros(slots, np.int64), np.zeros(slots, np.int64)

    def assign(self) -> bool:
        """Even out the encoder's work, then the LLM's of samples without media; False: no room."""
        media = np.flatnonzero(self.encoded > 0)
        text = np.flatnonzero(self.encoded == 0)
        media = media[np.argsort(-self.encoder[media], kind="stable")]
        text = text[np.argsort(-self.llm[text], kind="stable")]
        heap = [(0, slot) for slot in range(len(self.rows))]
        if not self._longest_first(media, self.encoder, heap):
            return False
        heap = [(int(load), slot) for slot, load in enumerate(self.loads)]
        heapq.heapify(heap)
        return self._longest_first(text, self.llm, heap)

    def _longest_first(self, order: IntArray, work: IntArray, heap: list[tuple[int, int]]) -> bool:
        """Each to the least loaded microbatch that has room."""
        for i in order.tolist():
            full = []
            while heap and not self._room(i, heap[0][1]):
                full.append(heapq.heappop(heap))
            if not heap:
                return False
            load, slot = heapq.heappop(heap)
            self._put(i, slot)
            heapq.heappush(heap, (load + int(work[i]), slot))
            for entry in full:
                heapq.heappush(heap, entry)
        return True

    def _room(self, i: int, slot: int) -> bool:
        return bool(
            self.tokens[slot] + self.shares[i] <= self.request.capacity
            and self.encoder_tokens[slot] + self.encoded[i] <= self.most
        )

    def _put(self, i: int, slot: int, sign: int = 1) -> None:
        if sign > 0:
            self.rows[slot].append(i)
        else:
            self.rows[slot].remove(i)
        self.loads[slot] += sign * self.llm[i]
        self.tokens[slot] += sign * self.shares[i]
        self.encoder_tokens[slot] += sign * self.encoded[i]

    def defer(self) -> None:
        """Move samples out of the fullest microbatch while that makes the LLM's work more even."""
        for _ in range(MOVES * len(self.llm)):
            fullest, emptiest = int(self.loads.argmax()), int(self.loads.argmin())
            excess = int(self.loads[fullest] - self.loads[emptiest])
            useful = [
                i for i in self.rows[fullest] if self.llm[i] < excess and self._room(i, emptiest)
            ]
            if not useful:
                return
            i = min(useful, key=lambda i: (abs(2 * self.llm[i] - excess), self.encoded[i] > 0, i))
            self._put(i, fullest, -1)
            self._put(i, emptiest)

    def pieces(self, rings: int) -> Plan:
        """Microbatches in waves, the longest together."""
        degree = self.request.degree
        times = self.loads + [int(self.encoder[rows].sum()) // degree for rows in self.rows]
        order = [slot for slot in np.argsort(-times, kind="stable").tolist() if self.rows[slot]]
        made = []
        for place, slot in enumerate(order):
            wave, ring = divmod(place, rings)
            # Back and forth, so that no ring has the longest of every wave.
            ring = ring if wave % 2 == 0 else rings - 1 - ring
            ranks = tuple(range(ring * degree, (ring + 1) * degree))
            made.append(Piece(wave, ranks, tuple(self.rows[slot])))
        return sorted(made)
