"""Follow how fast each rank is, by what its microbatches took against what they were to take.

A long batch is long in the prediction as well; a slow rank is slow against its own prediction.
So what is followed is the ratio of the two, by rank.
"""

from __future__ import annotations

from dynapar.costs import TICKS_PER_SECOND, Costs, coefficients
from dynapar.plan import StepPlan
from dynapar.plan.pricing import price_layout


def predict_ranks(plan: StepPlan, costs: Costs) -> tuple[tuple[float, ...], ...]:
    """What each rank has to do for each microbatch of its queue, by the planner's own pricing.

    Unlike a microbatch's time this is not that of its slowest rank, so it can be held against the
    CPU time of one rank.

    Args:
        plan: Of a step.
        costs: That it was made with.

    Returns:
        For each rank, seconds at full speed, in the order of its queue; 0 for a dummy.
    """
    layout = plan.layout()
    loads = price_layout(
        layout,
        plan.samples,
        costs,
        ranks_per_node=plan.ranks_per_node,
        recompute=plan.columns.recompute,
        memory=plan.memory,
    )
    fixed = coefficients(costs, ranks_per_node=plan.ranks_per_node).fixed
    own = (loads.parts.sum(axis=1) + fixed) / TICKS_PER_SECOND
    return tuple(
        tuple(
            0.0 if b is None else float(own[loads.starts[b] + rank - layout.first[b]])
            for b in queue
        )
        for rank, queue in enumerate(plan.queues)
    )
