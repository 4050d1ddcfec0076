"""Which runs of ranks may work together, whatever the samples are.

A *window* is a run of consecutive ranks: inside one node at any rank, or, where it is longer than a
node, whole half nodes. Rules narrow that down, for runtimes that know only some windows, and so
that no rank meets more than `peer_budget` others in a whole run.

**Peers.** Under given rules the windows do not depend on a step's samples, so the peers of a rank
in a whole run are among the ranks of all windows that hold it. A budget of at least a node's other
ranks cuts the cluster into *pods*: as many whole nodes as budget + 1 ranks hold, the last pod maybe
fewer. A window lies in one pod (one node is inside one pod anyway), so a rank meets the other ranks
of its pod at most: `peer_budget` or fewer. Inside its pod all is allowed: with a budget of b no
window can have more than b + 1 ranks, and the pods' are as long as whole nodes allow. Were windows
to start at every half node of the cluster instead, runs of up to k half nodes of r ranks would give
a rank (2k - 1) * r - 1 peers: windows half as long for the same budget.

A smaller budget leaves windows inside nodes alone, up to a degree. The windows that hold a rank
overlap in it, so their union is a run too, from the first start to the last end; degrees are
allowed, in ascending order, until some rank's run has more than budget + 1 ranks. Where windows
start anywhere in a node of g ranks, those of up to d ranks give it min(2d - 1, g) - 1 peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

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


def pod_ranks(cluster: Cluster, rules: RingRules) -> int:
    """Ranks of a pod; all of the cluster's where the budget does not cut it.

    >>> pod_ranks(Cluster(nodes=128, ranks_per_node=8), RingRules(peer_budget=64))
    64
    """
    budget, node = rules.peer_budget, cluster.ranks_per_node
    if budget is None or budget >= cluster.ranks - 1:
        return cluster.ranks
    return max(1, (budget + 1) // node) * node


def first_ranks(cluster: Cluster, degree: int, rules: RingRules) -> tuple[int, ...]:
    """The first ranks of all windows of a degree, ascending.

    Args:
        cluster: The ranks.
        degree: One of `allowed_degrees`.
        rules: Where windows may start, and the peer budget.

    >>> first_ranks(Cluster(nodes=2, ranks_per_node=4), 3, RingRules(windows="aligned"))
    (0, 4)
    """
    node = cluster.ranks_per_node
    if degree <= node:
        step = degree if rules.windows == "aligned" else 1
        return tuple(
            first
            for begin in range(0, cluster.ranks, node)
            for first in range(begin, begin + node - degree + 1, step)
        )
    step = degree if rules.windows == "aligned" else cluster.half_node
    pod = pod_ranks(cluster, rules)
    firsts = range(0, cluster.ranks - degree + 1, step)
    return tuple(first for first in firsts if first % pod + degree <= pod)


def windows(cluster: Cluster, rules: RingRules) -> tuple[tuple[int, int], ...]:
    """(first rank, ranks) of every window of two ranks or more, by ranks, then first.

    >>> windows(Cluster(nodes=1, ranks_per_node=3), RingRules(windows="aligned"))
    ((0, 2), (0, 3))
    """
    degrees = allowed_degrees(cluster, rules)
    return tuple((first, d) for d in degrees if d > 1 for first in first_ranks(cluster, d, rules))


@lru_cache(maxsize=64)
def allowed_degrees(cluster: Cluster, rules: RingRules) -> tuple[int, ...]:
    """The degrees that the cluster and the rules allow, ascending from 1.

    >>> allowed_degrees(Cluster(nodes=8, ranks_per_node=8), RingRules(degrees="pow2"))
    (1, 2, 4, 8, 16, 32, 64)
    """
    degrees = cluster.degrees(rules.max_degree)
    if rules.degrees == "pow2":
        degrees = tuple(d for d in degrees if d & (d - 1) == 0)
    node, budget = cluster.ranks_per_node, rules.peer_budget
    if budget is not None and budget < node - 1:
        return _inside_node(tuple(d for d in degrees if d <= node), node, rules.windows, budget)
    return tuple(d for d in degrees if d <= pod_ranks(cluster, rules))


def _inside_node(
    degrees: tuple[int, ...], node: int, windows: Windows, budget: int
) -> tuple[int, ...]:
    """The first of the degrees: those whose windows in a node keep to the budget together."""
    begin, end = list(range(node)), list(range(1, node + 1))
    for place, degree in enumerate(degrees):
        step = degree if windows == "aligned" else 1
        for first in range(0, node - degree + 1, step):
            for rank in range(first, first + degree):
                begin[rank] = min(begin[rank], first)
                end[rank] = max(end[rank], first + degree)
        if max(b - a for a, b in zip(begin, end, strict=True)) > budget + 1:
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
