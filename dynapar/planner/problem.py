"""One step's planning problem as arrays, and what a layout of it is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import Costs, coefficients
from dynapar.errors import EmptyStepError, PlanError
from dynapar.meta import SampleTable
from dynapar.packing.balance import lay_out
from dynapar.packing.bounds import lower_bound
from dynapar.packing.moldable import Jobs, Limits, describe, first_misfit
from dynapar.packing.runs import even_runs
from dynapar.packing.search import improve
from dynapar.packing.strip import Strip
from dynapar.packing.ticks import (
    Coefficients,
    IntArray,
    Layout,
    Loads,
    microbatch_ticks,
    queue_starts,
    wave_parts,
)
from dynapar.planner.config import PlannerConfig
from dynapar.planner.magnitudes import check_magnitudes
from dynapar.rings import allowed_degrees, narrowing, pod_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the kernels need to know of one step; every array is contiguous and writable."""

    samples: SampleTable
    step: int
    cluster: Cluster
    costs: Costs
    config: PlannerConfig
    jobs: Jobs
    order: IntArray
    """(n,) samples by work, most first; ties by row."""
    unit_offsets: IntArray
    unit_tokens: IntArray
    limits: Limits
    constants: Coefficients

    @property
    def lockstep(self) -> bool:
        """Whether ranks meet in waves."""
        return self.config.sync == "microbatch"

    def bound(self) -> int:
        """The proven lower bound of the makespan, in ticks."""
        return int(
            lower_bound(self.lockstep, self.jobs, self.unit_tokens, self.limits, self.constants)
        )


class Candidate(NamedTuple):
    """A layout that keeps within all limits, and what it is worth."""

    makespan: int
    layout: Layout
    loads: Loads
    starts: IntArray
    """(B,) start of each microbatch."""
    waves: IntArray
    """(waves, 2) encoder and LLM ticks; no rows where ranks meet once."""


def make_problem(
    samples: SampleTable, *, step: int, cluster: Cluster, costs: Costs, config: PlannerConfig
) -> Problem:
    """Check that every sample can be placed, and lay the step out as arrays.

    Raises:
        EmptyStepError: There are no samples.
        PlanError: A sample is longer than all ranks that may share it hold, an encoder unit is
            larger than a rank may encode, or one of them has no tokens or more ticks than can be
            counted; the message names it.
    """
    if not len(samples):
        raise EmptyStepError(
            f"step {step} has no samples; expected at least one. Leave the step out, or look at "
            f"what chose its samples: the source may be empty, or all of it filtered out"
        )
    degrees = allowed_degrees(cluster, config.rings)
    constants = coefficients(costs, ranks_per_node=cluster.ranks_per_node)
    limits = Limits(
        ranks=cluster.ranks,
        node=cluster.ranks_per_node,
        grain=cluster.half_node,
        degrees=np.array(degrees, np.int64),
        largest=degrees[-1],
        pod=pod_ranks(cluster, config.rings),
        aligned=config.windows == "aligned",
        capacity=config.capacity,
        encoder_capacity=config.encoder_capacity,
    )
    check_magnitudes(samples, constants, degrees[-1])
    # Copies: kernels are compiled for writable contiguous arrays alone.
    offsets = np.array(samples.unit_offsets, np.int64)
    units = np.array(samples.unit_tokens, np.int64)
    tokens = np.array(samples.llm_tokens, np.int64)
    jobs = describe(tokens, samples.reach_under(costs), offsets, units, constants)
    problem = Problem(
        samples=samples,
        step=step,
        cluster=cluster,
        costs=costs,
        config=config,
        jobs=jobs,
        order=_longest_first(jobs, constants),
        unit_offsets=offsets,
        unit_tokens=units,
        limits=limits,
        constants=constants,
    )
    _check_sizes(problem, degrees)
    return problem


def _check_sizes(problem: Problem, degrees: tuple[int, ...]) -> None:
    config, jobs, largest = problem.config, problem.jobs, degrees[-1]
    for i in np.flatnonzero(jobs.unit_size > config.encoder_capacity).tolist():
        raise PlanError(
            f"sample {problem.samples.ids[i]!r} has an encoder unit of {jobs.unit_size[i]:,} "
            f"encoder tokens; encoder_capacity is {config.encoder_capacity:,}. Raise "
            f"encoder_capacity, or leave the sample out"
        )
    i = int(first_misfit(jobs, problem.limits))
    if i < 0:
        return
    name = problem.samples.ids[i]
    ranks = f"{largest} ranks" if largest > 1 else "1 rank"
    remedy = "add ranks"
    if largest < problem.cluster.ranks:
        ranks += f" ({narrowing(problem.cluster, config.rings)})"
        remedy = "allow more ranks a sample"
    tokens, most = int(jobs.tokens[i]), largest * config.capacity
    if tokens > most:
        raise PlanError(
            f"sample {name!r} has {tokens:,} tokens; {ranks} x capacity "
            f"{config.capacity:,} hold {most:,}. Raise capacity, {remedy}, or leave the "
            f"sample out"
        )
    encoded = int(jobs.encoder_tokens[i])
    raise PlanError(
        f"sample {name!r} has {tokens:,} tokens and {encoded:,} encoder tokens in "
        f"{jobs.units[i]} units, which no degree up to {largest} deals out within capacity "
        f"{config.capacity:,} and encoder_capacity {config.encoder_capacity:,}. Raise them, "
        f"{remedy}, or leave the sample out"
    )


def price(problem: Problem, layout: Layout) -> Candidate:
    """Simulate a layout: its loads, starts, waves and makespan."""
    loads = microbatch_ticks(
        layout,
        problem.jobs.tokens,
        problem.jobs.reach,
        problem.unit_offsets,
        problem.unit_tokens,
        problem.constants,
    )
    if not problem.lockstep:
        starts, makespan = queue_starts(layout, loads.ticks, problem.limits.ranks)
        return Candidate(int(makespan), layout, loads, starts, np.zeros((0, 2), np.int64))
    count = int(layout.wave[-1]) + 1 if len(layout.wave) else 0
    waves = wave_parts(layout, loads, count, problem.constants)
    ends = np.cumsum(waves.sum(axis=1))
    begins = np.concatenate((np.zeros(1, np.int64), ends))
    return Candidate(int(begins[-1]), layout, loads, begins[layout.wave], waves)


def candidate(
    problem: Problem, strip: Strip, *, waves: int, block: int | None = None, mixed: bool = True
) -> Candidate | None:
    """Lay a finished strip out and price it; None where it does not keep within the capacities."""
    done, layout = arrange(problem, strip, waves=waves, block=block, mixed=mixed)
    return price(problem, layout) if done else None


def arrange(
    problem: Problem, strip: Strip, *, waves: int, block: int | None = None, mixed: bool = True
) -> tuple[bool, Layout]:
    """Lay a finished strip out; the flag says whether it keeps within the capacities.

    Args:
        problem: The step.
        strip: The strip.
        waves: Its waves; 0 where microbatches stack.
        block: Ranks of what is sorted into waves; None for a node.
        mixed: Whether samples may stay whole on one rank of a ring.
    """
    return lay_out(
        strip,
        waves,
        block or problem.limits.node,
        mixed,
        problem.jobs,
        problem.unit_offsets,
        problem.unit_tokens,
        problem.limits,
        problem.constants,
    )


def polish(problem: Problem, strip: Strip, *, rounds: int, goal: int = 0) -> None:
    """Improve a strip until its last machine ends by `goal`, or within 0.2 % of the mean end."""
    count = int(strip.counts[1])
    widths = strip.machine_width[:count]
    mean = int((strip.machine_end[:count] * widths).sum()) // max(1, int(widths.sum()))
    goal = max(goal, mean + mean // 500)
    improve(strip, problem.order, rounds, goal, problem.jobs, problem.limits, problem.constants)


def steadied(problem: Problem, found: Candidate) -> Candidate:
    """A layout whose ranks' runs of microbatches are evened out, which ends no later.

    Args:
        problem: The step.
        found: Any layout of it; one in waves is left as it is.
    """
    if problem.lockstep or len(found.layout.first) <= 1:
        return found
    layout = Layout(*(column.copy() for column in found.layout))
    changed = even_runs(
        layout, found.loads.ticks, problem.jobs, problem.unit_offsets, problem.unit_tokens,
        problem.limits, problem.constants,
    )  # fmt: skip
    return price(problem, layout) if changed else found


def better(one: Candidate | None, other: Candidate | None) -> Candidate | None:
    """The shorter of two; the first of equals."""
    if one is None or (other is not None and other.makespan < one.makespan):
        return other
    return one


def _longest_first(jobs: Jobs, constants: Coefficients) -> IntArray:
    share = constants.attention_pair * jobs.reach
    work = jobs.tokens * (constants.linear_token + share) + jobs.encoder_ticks
    return np.argsort(-work, kind="stable").astype(np.int64)
