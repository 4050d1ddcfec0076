"""Windows and peers against a count of every window of every cluster."""

from __future__ import annotations

import pytest

from dynapar.cluster import Cluster
from dynapar.errors import ConfigError
from dynapar.rings import (
    Degrees,
    RingRules,
    Windows,
    allowed_degrees,
    first_ranks,
    narrowing,
    pod_ranks,
    windows,
)

CLUSTERS = ("1x1", "1x7", "1x8", "2x3", "5x3", "3x4", "4x6", "2x8", "5x8", "8x8", "40x2", "20x8")


def windows_of(cluster: Cluster, degree: int, windows: Windows, pod: int = 0) -> list[range]:
    """All windows of a degree, by the words of their definition; pod 0: there are none."""
    node, ranks = cluster.ranks_per_node, cluster.ranks
    half = node // 2 if node % 2 == 0 else node
    found = []
    for first in range(ranks - degree + 1):
        last = first + degree - 1
        inside = first // node == last // node
        if degree <= node and not inside:
            continue
        if degree > node and (first % half or degree % half):
            continue
        if pod and first // pod != last // pod:
            continue
        offset = first % node if degree <= node else first
        if windows == "aligned" and offset % degree:
            continue
        found.append(range(first, first + degree))
    return found


def most_peers(cluster: Cluster, degrees: tuple[int, ...], windows: Windows, pod: int = 0) -> int:
    """The most other ranks that any rank shares any window with."""
    met: list[set[int]] = [set() for _ in range(cluster.ranks)]
    for degree in degrees:
        for window in windows_of(cluster, degree, windows, pod):
            for rank in window:
                met[rank] |= set(window) - {rank}
    return max(map(len, met))


@pytest.mark.parametrize("budget", [None, 3, 9, 17, 64])
@pytest.mark.parametrize("windows", ["any", "aligned"])
@pytest.mark.parametrize("text", CLUSTERS)
def test_windows_are_those_of_the_definition(
    text: str, windows: Windows, budget: int | None
) -> None:
    cluster = Cluster.parse(text)
    rules = RingRules(windows=windows, peer_budget=budget)
    pod = pod_ranks(cluster, rules)
    assert pod % cluster.ranks_per_node == 0
    for degree in allowed_degrees(cluster, rules):
        expected = [window.start for window in windows_of(cluster, degree, windows, pod)]
        assert list(first_ranks(cluster, degree, rules)) == expected
        assert expected  # a degree without a window would be of no use


@pytest.mark.parametrize("windows", ["any", "aligned"])
@pytest.mark.parametrize("kind", ["any", "pow2"])
@pytest.mark.parametrize("text", CLUSTERS)
def test_no_rank_meets_more_than_the_budget(text: str, kind: Degrees, windows: Windows) -> None:
    cluster = Cluster.parse(text)
    node = cluster.ranks_per_node
    for budget in (0, 1, 2, 3, 6, 7, 9, 14, 23, 31, 40, 63, 64):
        rules = RingRules(degrees=kind, windows=windows, peer_budget=budget)
        free = RingRules(degrees=kind, windows=windows, peer_budget=None)
        degrees, ladder = allowed_degrees(cluster, rules), allowed_degrees(cluster, free)
        pod = pod_ranks(cluster, rules)
        assert degrees == ladder[: len(degrees)]
        assert degrees[0] == 1
        assert most_peers(cluster, degrees, windows, pod) <= budget
        if len(degrees) == len(ladder):
            continue
        # No more is given up than must be: a node's worth of pod, or the next degree in a node.
        if budget >= node - 1:
            assert pod + node - 1 > budget
        else:
            assert most_peers(cluster, ladder[: len(degrees) + 1], windows, node) > budget


@pytest.mark.parametrize("text", ["4x6", "8x8", "20x8", "5x3"])
def test_the_formulas_of_the_text(text: str) -> None:
    cluster = Cluster.parse(text)
    halves, half, node = (
        cluster.ranks // cluster.half_node, cluster.half_node, cluster.ranks_per_node,
    )  # fmt: skip
    for degree in cluster.degrees():
        degrees = tuple(d for d in cluster.degrees() if d <= degree)
        expected = min(2 * degree - 1, node) - 1
        if degree > node:  # without pods
            expected = min(2 * (degree // half) - 1, halves) * half - 1
        assert most_peers(cluster, degrees, "any") == expected


def test_default_budget_of_a_large_cluster() -> None:
    """Pods of 8 nodes: 63 other ranks."""
    cluster = Cluster(nodes=128, ranks_per_node=8)
    assert pod_ranks(cluster, RingRules()) == 64
    assert allowed_degrees(cluster, RingRules()) == (*range(1, 9), *range(12, 65, 4))
    assert first_ranks(cluster, 60, RingRules())[:3] == (0, 4, 64)
    assert pod_ranks(Cluster(nodes=10, ranks_per_node=6), RingRules()) == 60
    assert pod_ranks(Cluster(nodes=11, ranks_per_node=6), RingRules()) == 60


def test_powers_of_two_and_the_largest_degree() -> None:
    cluster = Cluster(nodes=3, ranks_per_node=6)
    assert allowed_degrees(cluster, RingRules(degrees="pow2")) == (1, 2, 4)
    assert allowed_degrees(cluster, RingRules(max_degree=9)) == (1, 2, 3, 4, 5, 6, 9)


def test_what_narrows() -> None:
    cluster = Cluster(nodes=20, ranks_per_node=8)
    rules = RingRules(degrees="pow2", max_degree=100)
    assert narrowing(cluster, rules) == "max_degree 100, degrees 'pow2', peer_budget 64"
    assert narrowing(Cluster(nodes=1, ranks_per_node=8), RingRules(max_degree=8)) == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"degrees": "even"}, "degrees is 'even'; expected 'any' or 'pow2'"),
        ({"windows": "odd"}, "windows is 'odd'; expected 'any' or 'aligned'"),
        ({"peer_budget": -1}, "peer_budget is -1; expected 0 or more, or none"),
        ({"max_degree": 0}, "max_degree is 0; expected 1 or more, or none"),
    ],
)
def test_values_out_of_range(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        RingRules(**values)  # type: ignore[arg-type]
    assert str(error.value) == message


@pytest.mark.parametrize("name", CLUSTERS[:10])
def test_all_windows_are_those_of_all_degrees(name: str) -> None:
    cluster, rules = Cluster.parse(name), RingRules(peer_budget=8)
    found = windows(cluster, rules)
    degrees = allowed_degrees(cluster, rules)
    assert {d for _, d in found} == set(degrees) - {1}
    for degree in degrees[1:]:
        mine = [range(first, first + d) for first, d in found if d == degree]
        pod = pod_ranks(cluster, rules)
        assert mine == windows_of(cluster, degree, "any", pod=pod)
    assert list(found) == sorted(found, key=lambda window: window[::-1])
