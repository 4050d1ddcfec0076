from __future__ import annotations

import pytest

from dynapar.cluster import Cluster
from dynapar.errors import ConfigError


def test_degrees_are_every_integer_in_a_node_then_half_nodes() -> None:
    assert Cluster(nodes=3, ranks_per_node=4).degrees() == (1, 2, 3, 4, 6, 8, 10, 12)
    assert Cluster(nodes=3, ranks_per_node=3).degrees() == (1, 2, 3, 6, 9)
    assert Cluster(nodes=2, ranks_per_node=1).degrees() == (1, 2)
    assert Cluster(nodes=3, ranks_per_node=4).degrees(7) == (1, 2, 3, 4, 6)


@pytest.mark.parametrize("text", ["8", "8x", "x8", "8x8x8", "axb", "-1x4", ""])
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected NODESxRANKS, for example 1x4"):
        Cluster.parse(text)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks_per_node is 0; expected 1 or more"):
        Cluster.parse("1x0")


def test_text_is_read_back() -> None:
    assert str(Cluster.parse(" 2X4 ")) == "2x4"
