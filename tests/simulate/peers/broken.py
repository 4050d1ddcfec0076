"""A peer whose import fails."""

from __future__ import annotations

from importlib import import_module

from dynapar.simulate.peers.request import Planner


def load() -> Planner:
    planner: Planner = import_module("no_such_module").planner
    return planner
