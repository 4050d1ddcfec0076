"""dynapar in the place of verl's length balancing and of the scheduler of its dynamic groups.

The functions here take the same arguments as those of `verl.utils.seqlen_balancing` and
`verl.utils.dynamic_cp_scheduler` and give the same kinds of results. They need neither torch nor
verl; tensors may be passed where verl passes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, SupportsFloat, TypeVar

import numpy as np

from dynapar.costs import Costs, coefficients, target_reach
from dynapar.errors import CostsError, PlanError
from dynapar.integrations.lengths import model_costs
from dynapar.integrations.megatron import HIDDEN, LAYERS
from dynapar.integrations.megatron import DefaultDynamicCPScheduler as DefaultDynamicCPScheduler
from dynapar.packing.differencing import largest_differencing
from dynapar.packing.ticks import IntArray

SCALE = 1 << 52
"""What the sum of all workloads becomes: whole numbers are then sums without rounding."""
ROUNDS = 4
"""Rounds of local search, times the partitions."""
LOOK = 256
"""Partitions, emptiest first, that are looked at in a round."""


class Lengths(Protocol):
    """Numbers that can be computed with all at once, or one by one: a tensor, an array, an int."""

    def __mul__(self, other: Self | int, /) -> Self:
        """Their product."""
        ...

    def __add__(self, other: Self, /) -> Self:
        """Their sum."""
        ...


L = TypeVar("L", bound=Lengths)


def get_megatron_dynamic_cp_scheduler_cls() -> type[DefaultDynamicCPScheduler]:
    """The class that verl's adapter is to schedule with: dynapar's."""
    return DefaultDynamicCPScheduler


def calculate_workload(seqlen_list: L, *, costs: Costs | None = None) -> L:
    """The work of sequences, relative to each other.

    Args:
        seqlen_list: Lengths, in tokens: a tensor or an array.
        costs: What work costs; None for a 7B model, to which verl's own constants belong.

    Returns:
        Work of the linear layers and of attention, of the same shape and kind.

    Raises:
        CostsError: The costs know no attention, so that there is no square to add.
    """
    used = model_costs(hidden=HIDDEN, layers=LAYERS) if costs is None else costs
    work = coefficients(used, ranks_per_node=1)
    if not work.attention_pair:
        raise CostsError(
            f"costs {used.name!r} have no attention; expected some, which the workload is counted "
            f"in: balance the lengths themselves"
        )
    # Lengths say nothing of targets: each token is taken for one. Whole, so that integers stay
    # integers.
    token = work.linear_token / work.attention_pair + target_reach(used)
    ratio = int(token + work.attention_half + 0.5)
    return seqlen_list * ratio + seqlen_list * seqlen_list


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[SupportsFloat], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Deal workloads to partitions so that the fullest is as empty as can be.

    By largest differencing, then by swaps and moves from the fullest partition while that lowers
    the fuller of the two.

    Args:
        seqlen_list: Work (or tokens) of each item, 0 or more; a list or a tensor.
        k_partitions: How many partitions, 1 or more.
        equal_size: Whether all partitions have the same number of items.

    Returns:
        For each partition the indices of its items, ascending; none is empty.

    Raises:
        PlanError: There are fewer items than partitions, they cannot be dealt in equal numbers, or
            a workload is negative or not finite.
    """
    count = len(seqlen_list)
    if not 1 <= k_partitions <= count:
        raise PlanError(
            f"k_partitions is {k_partitions}; expected 1 to {count}, the number of items, since no "
            f"partition may be empty"
        )
    if equal_size and count % k_partitions:
        raise PlanError(
            f"{count} items cannot be dealt to {k_partitions} partitions of equal size; expected a "
            f"multiple of {k_partitions}: change the batch size, or pass equal_size=False"
        )
    weights = _whole([float(value) for value in seqlen_list])
    if equal_size:
        bins = _equal_differencing(weights, k_partitions)
    else:
        bins = largest_differencing(weights, k_partitions)
    members = [np.flatnonzero(bins == place).tolist() for place in range(k_partitions)]
    _refill(weights, members)
    _improve(weights, members, moves=not equal_size)
    return [sorted(rows) for rows in members]


def _whole(values: Sequence[float]) -> IntArray:
    for place, value in enumerate(values):
        if not 0 <= value < float("inf"):
            raise PlanError(f"seqlen_list[{place}] is {value}; expected a finite number, 0 or more")
    total = sum(values)
    if total < SCALE and all(value.is_integer() for value in values):
        return np.array(values, np.int64)
    return np.array([int(value / total * SCALE) for value in values], np.int64)


def _equal_differencing(weights: IntArray, bins: int) -> IntArray:
    """Largest differencing of sets of `bins` like weights, which keeps all bins of one size."""
    order = np.argsort(weights, kind="stable").reshape(-1, bins)
    # Each set is a row of bins: their sums, fullest first, and the weights in each.
    sets = [(weights[rows][::-1], rows[::-1].reshape(bins, 1)) for rows in order]
    spread = [int(sums[0] - sums[-1]) for sums, _ in sets]
    while len(sets) > 1:
        one = int(np.argmax(spread))
        sums, rows = sets.pop(one)
        spread.pop(one)
        other = int(np.argmax(spread))
        more, others = sets.pop(other)
        spread.pop(other)
        sums, rows = sums + more[::-1], np.hstack((rows, others[::-1]))
        ranking = np.argsort(-sums, kind="stable")
        sets.append((sums[ranking], rows[ranking]))
        spread.append(int(sums.max() - sums.min()))
    out = np.empty(len(weights), np.int64)
    for place, rows in enumerate(sets[0][1]):
        out[rows] = place
    return out


def _refill(weights: IntArray, members: list[list[int]]) -> None:
    """Give each empty partition the least item of the one that has most items."""
    for rows in members:
        if not rows:
            donor = max(members, key=len)
            least = min(donor, key=lambda row: (int(weights[row]), row))
            donor.remove(least)
            rows.append(least)


def _improve(weights: IntArray, members: list[list[int]], *, moves: bool) -> None:
    """Swap (or move) an item of the fullest partition, as long as that lowers it."""
    sums = np.array([int(weights[rows].sum()) for rows in members], np.int64)
    for _ in range(ROUNDS * len(members)):
        full = int(np.argmax(sums))
        best, change = 0, None
        for other in np.argsort(sums, kind="stable")[:LOOK].tolist():
            room = int(sums[full] - sums[other])
            if other == full or room <= best:
                break
            gives = weights[members[full]]
            takes = weights[members[other]]
            if moves and len(members[full]) > 1:
                takes = np.append(takes, 0)
            less = gives[:, None] - takes[None, :]
            # The fuller of the two falls by the least of what leaves and of the room that stays.
            gain = np.minimum(less, room - less)
            place = int(np.argmax(gain))
            if gain.flat[place] > best:
                best, change = int(gain.flat[place]), (other, *divmod(place, len(takes)))
        if change is None:
            return
        other, give, take = change
        row = members[full].pop(give)
        back = members[other].pop(take) if take < len(members[other]) else None
        members[other].append(row)
        if back is not None:
            members[full].append(back)
        moved = int(weights[row]) - (0 if back is None else int(weights[back]))
        sums[full] -= moved
        sums[other] += moved
