"""Check that a plan keeps to what it says of its own rings and counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dynapar.cluster import Cluster
from dynapar.meta import IntArray
from dynapar.plan.columns import DUMMY, positions
from dynapar.plan.model import StepPlan
from dynapar.rings import allowed_degrees, pod_ranks


def rule_problems(plan: StepPlan) -> Iterator[str]:
    """What breaks `plan.rings` or `plan.equal_counts`, of a plan whose shapes are sound."""
    columns = plan.columns
    names = [f"microbatch {number}" for number in range(len(columns.ticks))]
    yield from _window_problems(plan, names, columns.rank_offsets, columns.ranks)
    names = [f"sample {plan.samples.ids[row]!r}" for row in columns.sample_rows.tolist()]
    yield from _window_problems(plan, names, columns.share_offsets, columns.share_ranks)
    yield from _peer_problems(plan)
    if plan.equal_counts:
        yield from _count_problems(plan)


def _window_problems(
    plan: StepPlan, names: list[str], offsets: IntArray, ranks: IntArray
) -> Iterator[str]:
    node = plan.ranks_per_node
    allowed = allowed_degrees(Cluster(nodes=plan.ranks // node, ranks_per_node=node), plan.rings)
    width, first = np.diff(offsets), ranks[offsets[:-1]]
    for row in np.flatnonzero(~np.isin(width, allowed)).tolist():
        yield (
            f"{names[row]} has {width[row]} rank{'s' if width[row] > 1 else ''}; the plan's rings "
            f"allow {', '.join(map(str, allowed))}"
        )
    pod = pod_ranks(Cluster(nodes=plan.ranks // node, ranks_per_node=node), plan.rings)
    for row in np.flatnonzero((width > node) & (first % pod + width > pod)).tolist():
        yield (
            f"{names[row]} is on ranks {first[row]}..{first[row] + width[row] - 1}, not inside one "
            f"pod of {pod} ranks, which peer_budget {plan.rings.peer_budget} leaves"
        )
    if plan.rings.windows == "aligned":
        place = np.where(width <= node, first % node, first)
        for row in np.flatnonzero(place % width).tolist():
            yield (
                f"{names[row]} is on ranks {first[row]}..{first[row] + width[row] - 1}, which do "
                f"not start at a multiple of {width[row]}; the plan's windows are aligned"
            )


def _peer_problems(plan: StepPlan) -> Iterator[str]:
    """Windows that share a rank overlap, so that all peers of a rank lie in one run."""
    budget = plan.rings.peer_budget
    if budget is None:
        return
    columns = plan.columns
    width = np.diff(columns.rank_offsets)
    first = np.repeat(columns.ranks[columns.rank_offsets[:-1]], width)
    begin, end = np.arange(plan.ranks), np.arange(1, plan.ranks + 1)
    np.minimum.at(begin, columns.ranks, first)
    np.maximum.at(end, columns.ranks, first + np.repeat(width, width))
    for rank in np.flatnonzero(end - begin - 1 > budget):
        yield f"rank {rank} meets {end[rank] - begin[rank] - 1} others; peer_budget is {budget}"


def _count_problems(plan: StepPlan) -> Iterator[str]:
    columns = plan.columns
    lengths = np.unique(np.diff(columns.queue_offsets)).tolist()
    if len(lengths) > 1:
        yield f"queues have lengths {lengths}; equal_counts asks for one"
    if dummies := int((columns.queue == DUMMY).sum()):
        yield f"the queues have {dummies} dummies; equal_counts asks for none"
    runs = columns.queue != DUMMY
    number, index = columns.queue[runs], positions(columns.queue_offsets)[runs]
    least = np.full(len(columns.ticks), len(columns.queue), np.int64)
    most = np.zeros(len(columns.ticks), np.int64)
    np.minimum.at(least, number, index)
    np.maximum.at(most, number, index)
    for each in np.flatnonzero(least < most):
        yield (
            f"microbatch {each} is at places {least[each]} to {most[each]} of its ranks' queues; "
            f"equal_counts asks for one"
        )
    held = np.repeat(np.diff(columns.rank_offsets), np.diff(columns.sample_offsets))
    for entry in np.flatnonzero(columns.degrees != held):
        yield (
            f"sample {plan.samples.ids[columns.sample_rows[entry]]!r} is on "
            f"{columns.degrees[entry]} of the {held[entry]} ranks of its microbatch; equal_counts "
            f"asks for all"
        )
