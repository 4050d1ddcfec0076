"""What a user may say about planning."""

from __future__ import annotations

from dataclasses import dataclass

from dynapar.errors import ConfigError
from dynapar.memory.limits import MemoryLimits
from dynapar.plan import Sync
from dynapar.rings import Degrees, RingRules, Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """How steps are planned."""

    capacity: int
    """LLM tokens that one rank may hold in one microbatch."""
    encoder_capacity: int
    """Encoder tokens that one rank may encode in one microbatch."""
    sync: Sync = "step"
    """Where ranks meet: "step" (DDP) or "microbatch" (fully sharded parameters)."""
    gate: float = 0.0
    """The homogeneous plan is taken unless the dynamic one is shorter by more than this share."""
    noise: float = 0.05
    """How far a microbatch's time strays: the sigma of its logarithm; a rank's strays by two fifths
    of that. Among layouts that are hardly longer the one of the least expected makespan is taken;
    0: the shortest one."""
    max_degree: int | None = None
    """Ranks of the largest ring; None for all of the cluster's."""
    degrees: Degrees = "any"
    """Degrees that samples may have: "any" of the cluster's, or the powers of two among them."""
    windows: Windows = "any"
    """Where a ring of d ranks may start: "any" rank (half node, if it spans nodes), or "aligned"
    at multiples of d."""
    peer_budget: int | None = 64
    """Distinct other ranks that a rank may meet in a whole run: rings stay in pods of that many
    ranks and one (see `dynapar.rings`); None for all."""
    equal_counts: bool = False
    """Every rank runs equally many microbatches, none of them a dummy, and all samples of a
    microbatch have its width as their degree, as runtimes need that switch context parallelism
    themselves."""
    memory: MemoryLimits | None = None
    """A budget of bytes with the policies that microbatches may recompute by; their capacities then
    replace `capacity` and `encoder_capacity`."""

    def __post_init__(self) -> None:
        for name in ("capacity", "encoder_capacity"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"PlannerConfig.{name} is {value}; expected 1 or more")
        if self.sync not in ("step", "microbatch"):
            raise ConfigError(
                f"PlannerConfig.sync is {self.sync!r}; expected 'step' or 'microbatch'"
            )
        if not 0.0 <= self.gate < 1.0:
            raise ConfigError(f"PlannerConfig.gate is {self.gate}; expected 0 or more, below 1")
        if not 0.0 <= self.noise < 1.0:
            raise ConfigError(f"PlannerConfig.noise is {self.noise}; expected 0 or more, below 1")
        try:
            self.rings  # noqa: B018
        except ConfigError as error:
            raise ConfigError(f"PlannerConfig.{error}") from None

    @property
    def rings(self) -> RingRules:
        """What it says about rings."""
        return RingRules(
            degrees=self.degrees,
            windows=self.windows,
            peer_budget=self.peer_budget,
            max_degree=self.max_degree,
        )
