"""Reduce a step to what its time depends on: loads on ranks, and the order of every rank's queue.

Whatever decided a step (a plan, a static layout, padded batches) becomes a `Schedule`, so that all
of them are replayed and counted by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapar.costs import TICKS_PER_SECOND, Costs, coefficients
from dynapar.packing.ticks import Coefficients, IntArray, Layout, Loads
from dynapar.plan import StepPlan, Sync
from dynapar.plan.columns import DUMMY as DUMMY
from dynapar.plan.pricing import price_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step of R ranks; B microbatches whose rank rows lie one after another, S in all."""

    sync: Sync
    layout: Layout
    """Ranks and waves of the microbatches."""
    loads: Loads
    """What each rank of each microbatch has to do."""
    constants: Coefficients
    queue_offsets: IntArray
    """(R + 1,) rank r runs `queue[queue_offsets[r]:queue_offsets[r + 1]]`."""
    queue: IntArray
    """(entries,) microbatches, or DUMMY."""
    closing: int
    """Ticks of the closing pass and the optimizer."""
    tokens: int
    """LLM tokens of the samples."""
    computed_tokens: int
    """LLM tokens that run, padding included."""

    @property
    def ranks(self) -> int:
        """Ranks of the step."""
        return len(self.queue_offsets) - 1

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees of the samples, ascending."""
        used = self.layout.sample_degree[self.layout.order]
        return tuple(int(degree) for degree in np.unique(used))


def from_plan(plan: StepPlan, costs: Costs) -> Schedule:
    """The schedule of a valid plan, its queues as they stand in it.

    Args:
        plan: The plan.
        costs: What work costs; as a rule those that the plan was made with.
    """
    constants = coefficients(costs, ranks_per_node=plan.ranks_per_node)
    layout, table = plan.layout(), plan.samples
    loads = price_layout(
        layout,
        table,
        costs,
        ranks_per_node=plan.ranks_per_node,
        recompute=plan.columns.recompute,
        memory=plan.memory,
    )
    tokens = int(table.llm_tokens.sum())
    return Schedule(
        sync=plan.sync,
        layout=layout,
        loads=loads,
        constants=constants,
        queue_offsets=plan.columns.queue_offsets,
        queue=plan.columns.queue,
        closing=closing_ticks(costs, plan.sync),
        tokens=tokens,
        computed_tokens=tokens,
    )


def from_layout(
    layout: Layout,
    loads: Loads,
    *,
    sync: Sync,
    ranks: int,
    costs: Costs,
    constants: Coefficients,
    tokens: int,
    computed_tokens: int,
) -> Schedule:
    """The schedule of a priced layout: each rank runs its microbatches in global order.

    Args:
        layout: Microbatches in global order; under sync "microbatch" ascending in their waves.
        loads: Their price.
        sync: Where ranks meet.
        ranks: Of the cluster.
        costs: The cost file, for the closing pass.
        constants: Its coefficients.
        tokens: LLM tokens of the samples.
        computed_tokens: The same with padding.
    """
    count = len(layout.first)
    number = np.repeat(np.arange(count), layout.width)
    rank = np.arange(len(number)) - np.repeat(loads.starts - layout.first, layout.width)
    if sync == "microbatch":
        waves = int(layout.wave.max(initial=-1)) + 1
        queue: npt.NDArray[np.int64] = np.full((ranks, waves), DUMMY, np.int64)
        queue[rank, layout.wave[number]] = number
        offsets = np.arange(ranks + 1, dtype=np.int64) * waves
        queue = queue.ravel()
    else:
        order = np.argsort(rank, kind="stable")
        queue = number[order].astype(np.int64)
        counts = np.bincount(rank, minlength=ranks)
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Schedule(
        sync=sync,
        layout=layout,
        loads=loads,
        constants=constants,
        queue_offsets=offsets,
        queue=queue,
        closing=closing_ticks(costs, sync),
        tokens=tokens,
        computed_tokens=computed_tokens,
    )


def closing_ticks(costs: Costs, sync: Sync) -> int:
    """Ticks of the closing pass and the optimizer: not part of any makespan."""
    seconds = costs.step.closing_step if sync == "step" else costs.step.closing_microbatch
    return int(seconds * TICKS_PER_SECOND + 0.5)
