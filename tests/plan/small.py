"""A small plan by hand, for tests of its form and of what checks it."""

from __future__ import annotations

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.plan import StepPlan, Sync
from dynapar.planner import PlannerConfig, assemble
from tests.samples import table

COSTS = load_costs(None)
SAMPLES = table([9000, 700, 5000, 3000, 1200, 50], [[400, 300], [250], [], [], [90], []])


def plan(sync: Sync = "step") -> StepPlan:
    """Rank 0 and 1 share s0, s1 stays whole on rank 1; the others run on one rank each."""
    return assemble(
        SAMPLES,
        microbatches=[
            ((0, 1), [(0, (0, 1)), (1, (1,))]),
            ((2,), [(2, (2,))]),
            ((0,), [(3, (0,)), (5, (0,))]),
            ((3,), [(4, (3,))]),
        ],
        step=7,
        cluster=Cluster(nodes=1, ranks_per_node=4),
        costs=COSTS,
        config=PlannerConfig(capacity=6000, encoder_capacity=800, sync=sync),
    )
