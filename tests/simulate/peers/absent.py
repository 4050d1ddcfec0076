"""A peer that is not installed."""

from __future__ import annotations

from dynapar.simulate.peers.request import PeerMissingError, Planner


def load() -> Planner:
    raise PeerMissingError("absent is not installed; pip install absent==1")
