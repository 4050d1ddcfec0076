"""How many ranks there are, and which of them share a node."""

from __future__ import annotations

from dataclasses import dataclass

from dynapar.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks 0 .. ranks - 1; node k holds those from k * ranks_per_node on."""

    nodes: int
    """Nodes, 1 or more."""
    ranks_per_node: int
    """Ranks of each node, 1 or more."""

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)):
            if value < 1:
                raise ConfigError(f"Cluster.{name} is {value}; expected 1 or more")

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def half_node(self) -> int:
        """Ranks in half a node, or in a whole one where that is odd: the grain of wide rings."""
        whole = self.ranks_per_node
        return whole // 2 if whole % 2 == 0 else whole

    def degrees(self, largest: int | None = None) -> tuple[int, ...]:
        """The degrees that the cluster allows, ascending, up to `largest` (None: all).

        >>> Cluster(nodes=2, ranks_per_node=4).degrees()
        (1, 2, 3, 4, 6, 8)
        """
        limit = self.ranks if largest is None else min(largest, self.ranks)
        inside = range(1, min(self.ranks_per_node, limit) + 1)
        wide = range(self.ranks_per_node + self.half_node, limit + 1, self.half_node)
        return (*inside, *wide)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read NODES x RANKS_PER_NODE.

        Args:
            text: For example "8x8".

        Raises:
            ConfigError: `text` is not two positive integers with an x between them.

        >>> Cluster.parse("8x4").ranks
        32
        """
        nodes, _, ranks = text.strip().lower().partition("x")
        if not (nodes.isdecimal() and ranks.isdecimal()):
            raise ConfigError(f"cluster is {text!r}; expected NODESxRANKS, for example 1x4")
        return cls(nodes=int(nodes), ranks_per_node=int(ranks))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"
