"""Which samples of the source a rank loads for its part of a plan, and with which media."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from dynapar.plan import StepPlan


class Piece(NamedTuple):
    """A sample of the source: what the plan's sample is, or one member of it where it is a tree."""

    place: int
    """In the step, as drawn from the source."""
    units: frozenset[int]
    """Encoder units of the sample that the rank encodes."""


def pieces_of(plan: StepPlan, rank: int, drawn: Sequence[str]) -> dict[int, tuple[Piece, ...]]:
    """What a rank's microbatches hold, by row of the plan; of a tree all members, in order.

    The units of a tree's prefix are those of its first member.

    Args:
        plan: Of the step.
        rank: The rank.
        drawn: Ids of the step's samples, as drawn; read only where the plan has trees, whose rows
            are fewer.
    """
    trees = plan.samples.trees
    place_of = {} if trees is None else {name: place for place, name in enumerate(drawn)}
    found: dict[int, tuple[Piece, ...]] = {}
    for microbatch in plan.of_rank(rank):
        for placement in microbatch.placements:
            row = placement.sample
            units = frozenset(
                unit for unit, encoder in enumerate(placement.encoders) if encoder == rank
            )
            if trees is None:
                found[row] = (Piece(row, units),)
            elif not trees.prefix_ids[row]:
                found[row] = (Piece(place_of[plan.samples.ids[row]], units),)
            else:
                own = trees.members(row)
                places = [place_of[name] for name in trees.member_ids[own]]
                shares = member_units(
                    units, int(trees.prefix_units[row]), trees.member_units[own].tolist()
                )
                found[row] = tuple(map(Piece, places, shares))
    return found


def member_units(
    units: frozenset[int], shared: int, branches: Sequence[int]
) -> Iterator[frozenset[int]]:
    """For each member the units that are its own, as it numbers them.

    Args:
        units: Of the tree: first the prefix's, then those of each branch.
        shared: Units of the prefix, which the first member is given.
        branches: Units of each branch.
    """
    ends = list(accumulate(branches, initial=shared))
    for member, begin in enumerate(ends[:-1]):
        own = {unit - begin + shared for unit in units if begin <= unit < ends[member + 1]}
        yield frozenset(own | {unit for unit in units if unit < shared and member == 0})
