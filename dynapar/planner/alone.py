"""What a plan's samples take of one rank each: time, and room by capacities or bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynapar.costs import Costs, coefficients
from dynapar.packing.ticks import sample_columns, unit_columns
from dynapar.plan import StepPlan
from dynapar.plan.pricing import policy_costs

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Alone:
    """Each sample of a plan on one rank, under the cheapest recompute policy that holds it there.

    Without a budget of bytes there is one policy, and the plan's capacities are the room. A budget
    holds what its bytes hold, within the same capacities.

    Attributes:
        ticks: (n,) int64 alone on a rank, with the share of a microbatch's fixed time that is as
            large as the room it takes.
    """

    def __init__(self, plan: StepPlan, costs: Costs) -> None:
        table, self.memory = plan.samples, plan.memory
        self.capacity, self.encoder_capacity = plan.capacity, plan.encoder_capacity
        self.tokens: IntArray = np.array(table.llm_tokens, np.int64)
        self.encoder: IntArray = np.array(table.encoder_tokens, np.int64)
        self.policies = self.memory.policies if self.memory else ()
        self.levels = max(1, len(self.policies))
        n = len(self.tokens)
        self.level: IntArray = np.full(n, self.levels, np.int64)
        """(n,) place of the policy; `levels` where none holds it."""
        self.ticks: IntArray = np.zeros(n, np.int64)
        for level in reversed(range(self.levels)):
            holds = self.within(level, self.tokens, self.encoder)
            own = self._priced(plan, costs, level)
            # A sample that fits nowhere is priced as well: by the policy that holds most.
            at = holds if level < self.levels - 1 else np.ones(n, bool)
            self.ticks[at] = own[at]
            self.level[holds] = level

    def _priced(self, plan: StepPlan, costs: Costs, level: int) -> IntArray:
        if self.policies:
            costs = policy_costs(costs, self.policies[level].policy, self.memory)
        constants = coefficients(costs, ranks_per_node=plan.ranks_per_node)
        table = plan.samples
        units = unit_columns(np.array(table.unit_tokens, np.int64), constants)
        ends = np.concatenate(([0], np.cumsum(units)))
        encode = ends[table.unit_offsets[1:]] - ends[table.unit_offsets[:-1]]
        columns = sample_columns(self.tokens, 1, constants, reach=table.reach_under(costs))
        whole: IntArray = columns.sum(axis=1) + encode
        whole += (self._share(level) * constants.fixed).astype(np.int64)
        return whole

    def _share(self, level: int) -> npt.NDArray[np.float64]:
        """(n,) how much of the room each sample takes."""
        shares = [self.tokens / self.capacity, self.encoder / self.encoder_capacity]
        if self.memory is not None:
            shares = [
                (piece.token * self.tokens + piece.encoder_token * self.encoder)
                / (self.memory.budget - piece.fixed)
                for piece in self.policies[level].pieces
                if self.memory.budget > piece.fixed
            ]
        share: npt.NDArray[np.float64] = np.max(shares, axis=0)
        return share

    def within(self, level: int, tokens: IntArray, encoder: IntArray) -> BoolArray:
        """Which loads fit a rank under the policy of a level.

        Args:
            level: Of the policy.
            tokens: (k,) int64.
            encoder: (k,) int64.
        """
        found: BoolArray = (tokens <= self.capacity) & (encoder <= self.encoder_capacity)
        if self.memory is not None:
            found &= self.policies[level].peak(tokens, encoder) <= self.memory.budget
        return found

    def fits(self, row: int) -> bool:
        """Whether one rank holds a sample."""
        return bool(self.level[row] < self.levels)

    def bins(self, count: int) -> Bins:
        """Empty microbatches of one rank."""
        return Bins(self, count)

    def packs(self, rows: list[int]) -> list[list[int]]:
        """Samples of one rank in microbatches: first fit, most tokens first, each level apart.

        Args:
            rows: That fit.
        """
        packs: list[list[int]] = []
        ordered = sorted(rows, key=lambda row: (-int(self.tokens[row]), row))
        for level in range(self.levels):
            mine = [row for row in ordered if self.level[row] == level]
            bins, first = self.bins(len(mine)), len(packs)
            for row in mine:
                place = int(np.argmax(bins.room(row)))
                if first + place == len(packs):
                    packs.append([])
                bins.put(row, place)
                packs[first + place].append(row)
        return packs


class Bins:
    """Microbatches of one rank that are being filled.

    Attributes:
        tokens: (k,) int64 that each holds; 0 while it is empty.
    """

    def __init__(self, alone: Alone, count: int) -> None:
        self._alone = alone
        self.tokens: IntArray = np.zeros(count, np.int64)
        self._encoder: IntArray = np.zeros(count, np.int64)
        self._level: IntArray = np.zeros(count, np.int64)

    def room(self, row: int) -> BoolArray:
        """(k,) which have room for a sample, under the policy that it or what they hold needs."""
        alone = self._alone
        tokens, encoder = self.tokens + alone.tokens[row], self._encoder + alone.encoder[row]
        needed = np.maximum(self._level, alone.level[row])
        found = np.zeros(len(tokens), np.bool_)
        for level in range(int(alone.level[row]), alone.levels):
            found |= (needed == level) & alone.within(level, tokens, encoder)
        return found

    def put(self, row: int, place: int) -> None:
        """Add a sample to one of them."""
        self.tokens[place] += self._alone.tokens[row]
        self._encoder[place] += self._alone.encoder[row]
        self._level[place] = max(int(self._level[place]), int(self._alone.level[row]))
