"""Which runs of ranks may work together, whatever the samples are.

A *window* is a run of consecutive ranks: inside one node at any rank, or, where it is longer than a
node, whole half nodes. Rules narrow that down, for runtimes that know only some windows, and so
that no rank meets more than `peer_budget` others in a whole run.

**Peers.** Under given rules the windows do not depend on a step's samples. The peers of a rank are
the ranks of all windows that hold it; such windows overlap in that rank, so their union is a run of
ranks too, from the first start to the last end. `allowed_degrees` goes through the degrees in
ascending order, stretches each rank's run by the windows of the next degree, and stops before the
first degree at which some rank's run has more than `peer_budget` + 1 ranks. Every plan uses windows
of the degrees that are left alone, so no rank ever meets more than its run: `peer_budget` others.

Inside a node of g ranks, windows that start anywhere give a rank at most min(2d - 1, g) - 1 peers
up to degree d; runs of up to k of a cluster's h half nodes of r ranks, min(2k - 1, h) * r - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from dynapar.cluster import Cluster
from dynapar.errors import ConfigError

Degrees = Literal["any", "pow2"]
Windows = Literal["any", "aligned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRules:
    """What narrows the windows down."""

    degrees: Degrees = "any"
    """"pow2": powers of two alone."""
    windows: Windows = "any"
    """"aligned": a window of d ranks starts at a multiple of d, in its node or, where it is longer
    than a node, in the cluster."""
    peer_budget: int | None = 64
    """Distinct other ranks that a rank may meet in a whole run; None for all."""
    max_degree: int | None = None
    """Ranks of the largest window; None for all."""

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("degrees", self.degrees, get_args(Degrees)),
            ("windows", self.windows, get_args(Windows)),
        ):
            if value not in kinds:
                raise ConfigError(f"{name} is {value!r}; expected {kinds[0]!r} or {kinds[1]!r}")
        for name, least, amount in (
            ("peer_budget", 0, self.peer_budget),
            ("max_degree", 1, self.max_degree),
        ):
            if amount is not None and amount < least:
                raise ConfigError(f"{name} is {amount}; expected {least} or more, or none")


def first_ranks(cluster: Cluster, degree: int, windows: Windows) -> range | tuple[int, ...]:
    """The first ranks of all windows of a degree, ascending.

    Args:
        cluster: The ranks.
        degree: One of `cluster.degrees()`.
        windows: Whether they start anywhere or at multiples of the degree.

    >>> first_ranks(Cluster(nodes=2, ranks_per_node=4), 3, "aligned")
    (0, 4)
    """
    node = cluster.ranks_per_node
    if degree > node:
        step = degree if windows == "aligned" else cluster.half_node
        return range(0, cluster.ranks - degree + 1, step)
    step = degree if windows == "aligned" else 1
    return tuple(
        first
        for begin in range(0, cluster.ranks, node)
        for first in range(begin, begin + node - degree + 1, step)
    )


@lru_cache(maxsize=64)
def allowed_degrees(cluster: Cluster, rules: RingRules) -> tuple[int, ...]:
    """The degrees that the cluster and the rules allow, ascending from 1.

    >>> allowed_degrees(Cluster(nodes=8, ranks_per_node=8), RingRules(degrees="pow2"))
    (1, 2, 4, 8, 16, 32, 64)
    """
    degrees = cluster.degrees(rules.max_degree)
    if rules.degrees == "pow2":
        degrees = tuple(d for d in degrees if d & (d - 1) == 0)
    if rules.peer_budget is None or rules.peer_budget >= cluster.ranks - 1:
        return degrees
    begin, end = np.arange(cluster.ranks), np.arange(1, cluster.ranks + 1)
    for place, degree in enumerate(degrees):
        _stretch(begin, end, degree, np.array(first_ranks(cluster, degree, rules.windows)))
        if int((end - begin).max()) > rules.peer_budget + 1:
            return degrees[:place]
    return degrees


def narrowing(cluster: Cluster, rules: RingRules) -> str:
    """What of the rules keeps the largest degree below the cluster's, for messages.

    >>> narrowing(Cluster(nodes=1, ranks_per_node=6), RingRules(degrees="pow2"))
    "degrees 'pow2'"
    """
    reasons = []
    if rules.max_degree is not None and rules.max_degree < cluster.ranks:
        reasons.append(f"max_degree {rules.max_degree}")
    if rules.degrees == "pow2":
        reasons.append(f"degrees {rules.degrees!r}")
    if rules.peer_budget is not None and rules.peer_budget < cluster.ranks - 1:
        reasons.append(f"peer_budget {rules.peer_budget}")
    return ", ".join(reasons)


def _stretch(
    begin: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
    degree: int,
    first: npt.NDArray[np.int64],
) -> None:
    """Stretch each rank's run, `begin` to `end`, by the windows of a degree that hold the rank."""
    ranks = np.arange(len(begin))
    earliest = np.searchsorted(first, ranks - degree, side="right")
    latest = np.searchsorted(first, ranks, side="right") - 1
    held = np.flatnonzero(earliest <= latest)
    np.minimum.at(begin, held, first[earliest[held]])
    np.maximum.at(end, held, first[latest[held]] + degree)
