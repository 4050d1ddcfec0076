"""A bound of what a step within a budget of bytes takes, by the work that its bytes make necessary.

Under policy p a rank's microbatch of t tokens and m encoder tokens fits the bytes of every moment,
f + a t + e m <= budget, so that samples of T and M tokens in all need at least
(a T + e M) / (budget - f) such microbatches, whatever their layout: each sample has its *share* of
them. A microbatch costs its rank its fixed time besides its work. Under sync "microbatch" it costs
at least the least time of a wave, since its rank waits there for the weights; where bytes make
microbatches so short that waiting for weights is longer, this is what counts.

So a sample under p costs all ranks together at least its work under p and its share of the fixed
time, or its share of the least times of waves, or any mean of both; and its cheapest policy's
price, summed over samples and spread over all ranks, bounds the makespan. By which moment and which
mean a policy is priced holds for all samples under it; any choice is a bound, and the best of a few
is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.costs import coefficients
from dynapar.memory.limits import MemoryLimits, PolicyLimits
from dynapar.packing.ticks import Coefficients, unit_columns
from dynapar.plan.pricing import policy_costs
from dynapar.planner.problem import Problem

FloatArray = npt.NDArray[np.float64]

WAITS = (0.0, 0.5, 1.0)
"""How much of a price is made of the least times of waves, in place of work."""


class _Price(NamedTuple):
    """What samples cost under one policy; all (n,) rank-ticks."""

    llm: FloatArray
    """Linear work and attention at degree 1."""
    encoder: FloatArray
    shares: list[tuple[FloatArray, FloatArray]]
    """At each moment: by its tokens and by its encoder tokens."""
    costs: Coefficients

    def choices(self, lockstep: bool) -> Iterator[FloatArray]:
        """(n,) prices, each of which holds for all microbatches under the policy."""
        costs, parts = self.costs, WAITS if lockstep else (0.0,)
        for (tokens, encoder), wait, idle in itertools.product(self.shares, parts, parts):
            both = tokens + encoder
            llm = (1 - wait) * (self.llm + costs.fixed * both + costs.linear_rank * tokens)
            waves = wait * costs.llm_floor * both + idle * costs.encoder_floor * encoder
            yield llm + (1 - idle) * self.encoder + waves


def work_bound(problem: Problem, memory: MemoryLimits) -> int:
    """The bound of the module's text, in ticks.

    Half a tick for each rounding is taken off: of two terms on each rank of a sample, at most at
    its largest degree, and of each encoder unit.

    Args:
        problem: The step, under the costs of keeping everything.
        memory: The budget.
    """
    jobs, limits = problem.jobs, problem.limits
    prices = [_price(problem, memory, policy) for policy in memory.policies]
    chosen = [next(price.choices(problem.lockstep)) for price in prices]
    best = _least(chosen)
    for place, price in enumerate(prices):
        for choice in price.choices(problem.lockstep):
            found = _least([*chosen[:place], choice, *chosen[place + 1 :]])
            if found > best:
                best, chosen[place] = found, choice
    work = best - len(jobs.tokens) * limits.largest - len(problem.unit_tokens)
    return max(0, work // limits.ranks)


def _price(problem: Problem, memory: MemoryLimits, policy: PolicyLimits) -> _Price:
    own = policy_costs(problem.costs, policy.policy, memory)
    costs = coefficients(own, ranks_per_node=problem.cluster.ranks_per_node)
    tokens = problem.jobs.tokens.astype(np.float64)
    offsets, units = problem.unit_offsets, problem.unit_tokens
    ends = np.concatenate(([0], np.cumsum(units)))
    encoder_tokens = (ends[offsets[1:]] - ends[offsets[:-1]]).astype(np.float64)
    ends = np.concatenate(([0], np.cumsum(unit_columns(units, costs))))
    reach = problem.samples.reach_under(own)
    pair = costs.attention_pair * tokens * (reach + costs.attention_half)
    # No rank holds more than the widest policy's capacity, whatever the bytes would allow.
    shares = [(tokens / memory.capacity, np.zeros(len(tokens)))]
    shares += [
        (piece.token * tokens / left, piece.encoder_token * encoder_tokens / left)
        for piece in policy.pieces
        if (left := memory.budget - piece.fixed) > 0
    ]
    return _Price(
        llm=costs.linear_token * tokens + pair,
        encoder=(ends[offsets[1:]] - ends[offsets[:-1]]).astype(np.float64),
        shares=shares,
        costs=costs,
    )


def _least(prices: list[FloatArray]) -> int:
    """Of all samples, each under its cheapest policy.

    Whole ticks before they are summed: the same on every machine.
    """
    return int(np.floor(np.min(prices, axis=0)).astype(np.int64).sum())
