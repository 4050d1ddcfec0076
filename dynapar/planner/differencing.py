"""Layouts of one degree, balanced by largest differencing.

The longest-first rule of `homogeneous` is uneven by what its last samples bring, which shows where
all samples are alike or a rank has few of them. Here samples are dealt to rings by largest
differencing first, and to microbatches after that.
"""

from __future__ import annotations

import numpy as np

from dynapar.packing.deal import first_fit, gather, lay_out_rings
from dynapar.packing.differencing import largest_differencing
from dynapar.packing.ticks import IntArray, Layout, sample_columns
from dynapar.planner.problem import Candidate, Problem, better, price
from dynapar.rings import first_ranks

MORE_WAVES = 4
"""Waves tried beyond the fewest that hold all tokens."""


def by_differencing(problem: Problem, degree: int, *, rival: int | None = None) -> Candidate | None:
    """Deal samples to the rings of a degree; in waves, to the rings of all waves.

    Args:
        problem: The step, with at least one sample.
        degree: One at which every sample fits.
        rival: Numbers of waves that cannot end before this are left out; None: none is.

    Returns:
        The layout, every sample at `degree`; None where no deal to waves fits.
    """
    jobs, limits, costs = problem.jobs, problem.limits, problem.constants
    columns = sample_columns(jobs.tokens, degree, costs, reach=jobs.reach).sum(axis=1)
    weights = columns + jobs.encoder_ticks // degree
    rings = len(rings_of(problem, degree))
    if not problem.lockstep:
        offsets, rows = gather(largest_differencing(weights, rings), problem.order, rings)
        parts, rows, ring = first_fit(offsets, rows, degree, jobs, limits)
        return _priced(problem, degree, parts, rows, ring)
    least = max(1, -(-int(jobs.tokens.sum()) // (limits.ranks * limits.capacity)))
    best: Candidate | None = None
    for waves in range(least, least + MORE_WAVES):
        length = costs.fixed + costs.linear_rank + int(weights.sum()) // (rings * waves)
        if rival is not None and waves * max(length, costs.llm_floor) >= rival:
            break
        # Parts are waited for apart: it may be better to even out the LLM's alone.
        for load in (weights, columns) if len(problem.unit_tokens) else (weights,):
            bins = waves * rings
            offsets, rows = gather(largest_differencing(load, bins), problem.order, bins)
            if len(first_fit(offsets, rows, degree, jobs, limits)[2]) == len(offsets) - 1:
                best = better(best, in_waves(problem, degree, offsets, rows))
    return best


def in_waves(problem: Problem, degree: int, offsets: IntArray, rows: IntArray) -> Candidate | None:
    """Deal microbatches to waves, the longest together; None where one exceeds a capacity.

    Args:
        problem: The step, under sync "microbatch".
        degree: Of every sample.
        offsets: (m + 1,) where each microbatch's samples begin.
        rows: (n,) the samples.
    """
    return _priced(problem, degree, offsets, rows, np.zeros(len(offsets) - 1, np.int64))


def _priced(
    problem: Problem, degree: int, offsets: IntArray, rows: IntArray, ring: IntArray
) -> Candidate | None:
    done, layout = lay_out_rings(
        offsets, rows, ring, np.array(rings_of(problem, degree), np.int64), degree,
        problem.lockstep, problem.jobs, problem.unit_offsets, problem.unit_tokens,
        problem.limits, problem.constants,
    )  # fmt: skip
    return price(problem, layout) if done else None


def rings_of(problem: Problem, degree: int) -> list[int]:
    """First ranks of the rings of a degree."""
    firsts: list[int] = []
    for first in first_ranks(problem.cluster, degree, problem.config.rings):
        if not firsts or first >= firsts[-1] + degree:
            firsts.append(first)
    return firsts


def microbatch_rows(layout: Layout) -> list[list[int]]:
    """The samples of each microbatch."""
    offsets = layout.offsets.tolist()
    order = layout.order.tolist()
    return [order[offsets[b] : offsets[b + 1]] for b in range(len(offsets) - 1)]
