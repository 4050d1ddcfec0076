"""A peer that misbehaves, in the way that the degree asks for."""

from __future__ import annotations

import signal

from dynapar.simulate.peers.request import PeerError, Piece, Plan, Planner, Request

GOOD, ENDLESS, CRASHES, WAITS, REFUSES, CHATTERS = range(1, 7)


def load() -> Planner:
    return planner


def planner(request: Request) -> Plan:
    if request.degree == ENDLESS:
        while True:
            pass
    if request.degree == CRASHES:
        raise KeyError("group of 3")
    if request.degree == WAITS:
        signal.pause()
    if request.degree == REFUSES:
        raise PeerError("no plan for 3 samples")
    if request.degree == CHATTERS:
        print("groups made" * 1000)
    return [Piece(row, (0,), (row,)) for row in range(len(request.tokens))]
