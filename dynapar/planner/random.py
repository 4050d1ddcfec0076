"""Random valid plans: what the executor must survive, whatever a planner may one day choose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import Costs
from dynapar.meta import SampleTable
from dynapar.packing.moldable import fits
from dynapar.packing.ticks import cut_tokens
from dynapar.plan import StepPlan
from dynapar.planner.build import GivenMicroBatch, GivenSample, assemble, to_plan
from dynapar.planner.config import PlannerConfig
from dynapar.planner.equal import Block, equal_candidates, filled, in_waves
from dynapar.planner.problem import Problem, make_problem
from dynapar.planner.recompute import plan_within
from dynapar.rings import first_ranks

Window = tuple[int, int]
"""First rank and width."""


def random_plan(
    samples: SampleTable,
    *,
    seed: int,
    step: int,
    cluster: Cluster,
    costs: Costs,
    config: PlannerConfig,
) -> StepPlan:
    """A valid plan that no objective shaped.

    All degrees allowed are mixed, queues are of unequal length and sometimes empty, a short sample
    may stay whole on one rank of a ring's microbatch (or be shared by some of its ranks), and
    encoder units are on random ranks of it. With `equal_counts` only the samples of a wave are
    random; if no random waves keep all ranks busy, the plan is that of `plan_step`. Equal arguments
    give equal plans.

    Raises:
        PlanError: A sample cannot be placed at all, or as `plan_step` with `equal_counts`.
    """
    if config.memory is not None:
        plan = partial(random_plan, seed=seed)
        return plan_within(
            plan, None, samples, step=step, cluster=cluster, costs=costs, config=config
        )
    problem = make_problem(samples, step=step, cluster=cluster, costs=costs, config=config)
    rng = np.random.default_rng([seed, step])
    degrees = problem.limits.degrees.tolist()
    if config.equal_counts:
        return _equal(problem, _Deal(in_waves(problem), rng, degrees=degrees))
    deal = _Deal(problem, rng, degrees=degrees)
    deal.run()
    return assemble(
        samples,
        microbatches=deal.microbatches,
        step=step,
        cluster=cluster,
        costs=costs,
        config=config,
        waves=deal.waves if problem.lockstep else None,
        encoders=deal.encoders,
    )


def _equal(problem: Problem, deal: _Deal) -> StepPlan:
    deal.run()
    waves: list[list[Block]] = [[] for _ in range(max(deal.waves, default=-1) + 1)]
    for wave, (ranks, given) in zip(deal.waves, deal.microbatches, strict=True):
        waves[wave].append(Block(ranks[0], len(ranks), [row for row, _ in given]))
    found, bound = filled(problem, waves), problem.bound()
    if found is None:
        found = equal_candidates(problem, bound)[0]
    return to_plan(problem, found, bound=bound, homogeneous=(0, 0), chosen="dynamic", seconds=0.0)


class _Deal:
    """Deals shuffled samples to microbatches on random windows."""

    def __init__(
        self, problem: Problem, rng: np.random.Generator, *, degrees: Sequence[int]
    ) -> None:
        self.problem = problem
        self.rng = rng
        self.degrees = degrees
        self.microbatches: list[GivenMicroBatch] = []
        self.waves: list[int] = []
        self.encoders: list[tuple[int, ...]] = [()] * len(problem.samples)
        self.left = rng.permutation(len(problem.samples)).tolist()
        limits = problem.limits
        # Now and then some ranks get nothing at all.
        self.idle = int(rng.integers(limits.ranks)) if rng.random() < 0.25 else -1

    def run(self) -> None:
        free: set[int] = set()
        wave, fresh = -1, True
        while self.left:
            if not self.problem.lockstep or not free:
                free = set(range(self.problem.limits.ranks)) - {self.idle}
                fresh = True
            if self._open(free):
                wave += fresh
                fresh = False
                self.waves.append(wave)
            else:
                free = set()  # the next sample needs a window that this wave does not have
                self.idle = -1

    def _windows(self, width: int, inside: set[int]) -> list[Window]:
        firsts = first_ranks(self.problem.cluster, width, self.problem.config.rings)
        return [(f, width) for f in firsts if inside.issuperset(range(f, f + width))]

    def _fitting(self, row: int) -> list[int]:
        jobs, limits = self.problem.jobs, self.problem.limits
        return [d for d in self.degrees if fits(jobs, row, d, limits)]

    def _open(self, free: set[int]) -> bool:
        """Open a microbatch for the next sample and let others in; False: it has no window."""
        degrees = self._fitting(self.left[0])
        windows = [window for width in degrees for window in self._windows(width, free)]
        if not windows:
            return False
        widths = sorted({width for _, width in windows})
        width = int(self.rng.choice(widths))
        same = [window for window in windows if window[1] == width]
        first, width = same[int(self.rng.integers(len(same)))]
        members = tuple(range(first, first + width))
        free.difference_update(members)
        tokens, encoded = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
        given: list[GivenSample] = []
        for _ in range(int(self.rng.integers(1, 2 * width + 3))):
            if not self.left:
                break
            ranks = members if not given else self._own(members)
            placed = self._try(self.left[0], ranks, members, tokens, encoded)
            if not placed and given:
                break
            if not placed:
                raise AssertionError("a sample that fits alone found no room alone")
            given.append((self.left.pop(0), ranks))
        self.microbatches.append((members, given))
        return True

    def _own(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of one more sample: often one alone, often all, at times some of them."""
        kind = self.rng.random()
        if kind < 0.4:
            return (int(self.rng.choice(members)),)
        if kind < 0.8:
            return members
        inside = [d for d in self.degrees if d <= len(members)]
        windows = self._windows(int(self.rng.choice(inside)), set(members))
        first, width = windows[int(self.rng.integers(len(windows)))]
        return tuple(range(first, first + width))

    def _try(
        self,
        row: int,
        ranks: tuple[int, ...],
        members: tuple[int, ...],
        tokens: dict[int, int],
        encoded: dict[int, int],
    ) -> bool:
        """Add a sample where it keeps within the capacities; False where it would not."""
        problem = self.problem
        size = int(problem.jobs.tokens[row])
        cut = [cut_tokens(size, len(ranks), position) for position in range(len(ranks))]
        limit = problem.limits.capacity
        if any(tokens[r] + t > limit for r, t in zip(ranks, cut, strict=True)):
            return False
        units = problem.unit_tokens[problem.unit_offsets[row] : problem.unit_offsets[row + 1]]
        placed: list[int] = []
        after = dict(encoded)
        for unit in units.tolist():
            room = [r for r in members if after[r] + unit <= problem.limits.encoder_capacity]
            if not room:
                return False
            # Random, but not so that an uneven deal shuts out what an even one would hold.
            least = min(after[r] for r in room)
            even = [r for r in room if after[r] <= least + unit] if after[room[0]] else room
            rank = int(self.rng.choice(even))
            placed.append(rank)
            after[rank] += unit
        encoded.update(after)
        for rank, share in zip(ranks, cut, strict=True):
            tokens[rank] += share
        self.encoders[row] = tuple(placed)
        return True
