"""From a priced layout to a StepPlan, and from given microbatches to a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import Costs
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.packing.bins import place_in_microbatches
from dynapar.packing.ticks import Layout
from dynapar.plan import PlanColumns, StepPlan, validate
from dynapar.plan.columns import offsets_of, positions, queues_in_order, queues_of_waves
from dynapar.planner.config import PlannerConfig
from dynapar.planner.problem import Candidate, Problem, make_problem, price

GivenSample = tuple[int, tuple[int, ...]]
"""A sample's row, and its ranks in order."""
GivenMicroBatch = tuple[tuple[int, ...], Sequence[GivenSample]]
"""The ranks of a microbatch, and its samples in packing order."""


def to_plan(
    problem: Problem,
    found: Candidate,
    *,
    bound: int,
    homogeneous: tuple[int, int],
    chosen: Literal["dynamic", "homogeneous"],
    seconds: float,
    optimal: bool = False,
) -> StepPlan:
    """Write a priced layout down as a plan.

    Args:
        problem: The step.
        found: The layout and its times.
        bound: The lower bound, in ticks.
        homogeneous: The best single degree and its makespan; (0, 0) when there is none.
        chosen: What `found` is.
        seconds: How long planning took.
        optimal: Whether the makespan is proven to be the least; a makespan at the bound is.
    """
    return StepPlan(
        step=problem.step,
        sync=problem.config.sync,
        ranks=problem.limits.ranks,
        ranks_per_node=problem.limits.node,
        capacity=problem.config.capacity,
        encoder_capacity=problem.config.encoder_capacity,
        rings=problem.config.rings,
        equal_counts=problem.config.equal_counts,
        samples=problem.samples,
        columns=_columns(problem, found),
        makespan=found.makespan,
        lower_bound=bound,
        homogeneous_degree=homogeneous[0],
        homogeneous_makespan=homogeneous[1],
        chosen=chosen,
        plan_seconds=seconds,
        costs=problem.costs.name,
        optimal=optimal or found.makespan <= bound,
    )


def _columns(problem: Problem, found: Candidate) -> PlanColumns:
    layout, loads = found.layout, found.loads
    rank_offsets = offsets_of(layout.width)
    ranks = np.repeat(layout.first, layout.width) + positions(rank_offsets)
    share_offsets = offsets_of(layout.sample_degree[layout.order])
    share_first = np.repeat(layout.sample_first[layout.order], np.diff(share_offsets))
    unit_offsets = offsets_of(np.diff(problem.unit_offsets)[layout.order])
    unit_first = np.repeat(problem.unit_offsets[layout.order], np.diff(unit_offsets))
    slowest = loads.parts[loads.starts + loads.slowest]
    fixed = np.full((len(slowest), 1), problem.constants.fixed, np.int64)
    if problem.lockstep:
        queue_offsets, queue = queues_of_waves(
            rank_offsets, ranks, layout.wave, len(found.waves), problem.limits.ranks
        )
    else:
        queue_offsets, queue = queues_in_order(rank_offsets, ranks, problem.limits.ranks)
    return PlanColumns(
        rank_offsets=rank_offsets,
        ranks=ranks,
        tokens=loads.tokens,
        encoder_tokens=loads.encoder_tokens,
        sample_offsets=layout.offsets,
        sample_rows=layout.order,
        share_offsets=share_offsets,
        share_ranks=share_first + positions(share_offsets),
        unit_offsets=unit_offsets,
        unit_ranks=layout.unit_rank[unit_first + positions(unit_offsets)],
        ticks=loads.ticks,
        starts=found.starts,
        parts=np.concatenate((slowest, fixed), axis=1),
        recompute=np.zeros(len(loads.ticks), np.int64),
        queue_offsets=queue_offsets,
        queue=queue,
        waves=np.column_stack((offsets_of(found.waves.sum(axis=1))[:-1], found.waves)),
    )


def assemble(
    samples: SampleTable,
    *,
    microbatches: Sequence[GivenMicroBatch],
    step: int,
    cluster: Cluster,
    costs: Costs,
    config: PlannerConfig,
    waves: Sequence[int] | None = None,
    encoders: Sequence[Sequence[int]] | None = None,
) -> StepPlan:
    """Make a plan of given microbatches: place encoder units by cost, price, simulate, bound.

    Args:
        samples: The step's samples.
        microbatches: In global order.
        step: Number of the step.
        cluster: The ranks.
        costs: What work costs.
        config: Capacities and `sync`.
        waves: Under sync "microbatch", the wave of each microbatch, ascending from 0; None puts
            each into the first wave in which its ranks are free, after its predecessors.
        encoders: For each sample's row, the rank of each of its encoder units; None places units
            on their microbatch's ranks, dearest first, where least is to do.

    Returns:
        The plan, marked "dynamic", without a homogeneous candidate (degree 0).

    Raises:
        PlanError: The microbatches are not a valid plan; all that is wrong is named.
    """
    problem = make_problem(samples, step=step, cluster=cluster, costs=costs, config=config)
    layout = _given_layout(problem, microbatches, waves)
    if encoders is not None:
        flat = [rank for ranks in encoders for rank in ranks]
        if [len(ranks) for ranks in encoders] != np.diff(problem.unit_offsets).tolist():
            raise PlanError(
                "`encoders` does not name one rank for each encoder unit of each sample"
            )
        layout = layout._replace(unit_rank=np.array(flat, np.int64))
    else:
        full = place_in_microbatches(
            layout,
            problem.jobs.tokens,
            problem.jobs.reach,
            problem.unit_offsets,
            problem.unit_tokens,
            config.encoder_capacity,
            problem.lockstep,
            problem.constants,
        )
        if full >= 0:
            raise PlanError(
                f"the encoder units of microbatch {full} do not fit its {layout.width[full]} "
                f"ranks x encoder_capacity {config.encoder_capacity:,}; give it more ranks"
            )
    found = price(problem, layout)
    plan = to_plan(
        problem,
        found,
        bound=problem.bound(),
        homogeneous=(0, 0),
        chosen="dynamic",
        seconds=0.0,
    )
    validate(plan, costs)
    return plan


def _given_layout(
    problem: Problem, microbatches: Sequence[GivenMicroBatch], waves: Sequence[int] | None
) -> Layout:
    n = len(problem.samples)
    first, degree = np.zeros(n, np.int64), np.ones(n, np.int64)
    offsets, order = [0], []
    for number, (ranks, given) in enumerate(microbatches):
        for row, own in given:
            _check_given(problem, number, ranks, row, own)
            first[row], degree[row] = own[0], len(own)
            order.append(row)
        offsets.append(len(order))
    if sorted(order) != list(range(n)):
        raise PlanError(
            f"the microbatches hold rows {sorted(order)[:20]}...; expected each of the {n} samples "
            f"once"
        )
    if waves is None:
        waves = _first_free(microbatches) if problem.lockstep else [0] * len(microbatches)
    if len(waves) != len(microbatches) or list(waves) != sorted(waves):
        raise PlanError(f"waves are {list(waves)}; expected one a microbatch, ascending")
    return Layout(
        first=np.array([ranks[0] for ranks, _ in microbatches], np.int64),
        width=np.array([len(ranks) for ranks, _ in microbatches], np.int64),
        wave=np.array(waves, np.int64),
        offsets=np.array(offsets, np.int64),
        order=np.array(order, np.int64),
        sample_first=first,
        sample_degree=degree,
        unit_rank=np.zeros(len(problem.unit_tokens), np.int64),
    )


def _check_given(
    problem: Problem, number: int, ranks: tuple[int, ...], row: int, own: tuple[int, ...]
) -> None:
    """Only what arrays cannot express; `validate` judges the rest."""
    if not 0 <= row < len(problem.samples):
        raise PlanError(f"microbatch {number} has row {row}; there are {len(problem.samples)}")
    for what, those in (("microbatch", ranks), (f"sample {problem.samples.ids[row]!r}", own)):
        if not those or those != tuple(range(those[0], those[0] + len(those))):
            raise PlanError(
                f"microbatch {number}: ranks {list(those)} of the {what} are not consecutive and "
                f"ascending"
            )
    if (
        own[0] < ranks[0]
        or own[-1] > ranks[-1]
        or ranks[0] < 0
        or ranks[-1] >= problem.limits.ranks
    ):
        raise PlanError(
            f"microbatch {number}: ranks {list(own)} of sample {problem.samples.ids[row]!r} are "
            f"not all among {list(ranks)} and 0..{problem.limits.ranks - 1}"
        )


def _first_free(microbatches: Sequence[GivenMicroBatch]) -> list[int]:
    """The wave of each microbatch: as early as its ranks and the global order allow."""
    free: dict[int, int] = {}
    waves: list[int] = []
    for ranks, _ in microbatches:
        wave = max((free.get(rank, 0) for rank in ranks), default=0)
        wave = max(wave, waves[-1] if waves else 0)
        waves.append(wave)
        free.update(dict.fromkeys(ranks, wave + 1))
    return waves
