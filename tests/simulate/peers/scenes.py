"""Steps for tests of peers, and the check that all of their plans have to pass."""

from __future__ import annotations

import pytest

from dynapar.cluster import Cluster
from dynapar.meta import SampleTable
from dynapar.plan import Sync
from dynapar.planner import PlannerConfig
from dynapar.planner.problem import Problem, make_problem
from dynapar.simulate.peers import PeerMissingError
from dynapar.simulate.peers.process import peer
from dynapar.simulate.peers.request import Plan
from tests.simulate.scenes import COSTS, config


def problem_of(
    samples: SampleTable,
    cluster: str,
    sync: Sync = "step",
    *,
    planner: PlannerConfig | None = None,
) -> Problem:
    return make_problem(
        samples,
        step=0,
        cluster=Cluster.parse(cluster),
        costs=COSTS,
        config=planner or config(sync),
    )


def installed(name: str) -> None:
    """Skip a test of a peer that is not installed."""
    try:
        peer(name).wait()
    except PeerMissingError as error:
        pytest.skip(str(error))


def check_rows(plan: Plan, count: int) -> None:
    """Each sample once, and in each wave each rank once at most."""
    assert sorted(row for piece in plan for row in piece.rows) == list(range(count))
    taken = [(piece.wave, rank) for piece in plan for rank in piece.ranks]
    assert len(taken) == len(set(taken))
    assert [piece.wave for piece in plan] == sorted(piece.wave for piece in plan)
