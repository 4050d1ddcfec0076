"""Turn a budget of bytes, as a command or a run's file gives it, into what fits on a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.console import Cell
from dynapar.costs import Costs
from dynapar.errors import ConfigError
from dynapar.memory import (
    CAPACITY_NEEDS,
    SHARDINGS,
    MemoryLimits,
    MemoryModel,
    Sharding,
    memory_limits,
    parse_bytes,
    parse_policies,
    shown,
)
from dynapar.plan import Sync
from dynapar.plan.pricing import policy_costs
from dynapar.rings import RingRules

CAPACITY, ENCODER_CAPACITY = 16_384, 65_536
"""LLM tokens and encoder tokens of a rank, where a command needs neither them nor a budget."""
RECOMPUTE = "none,selective,full"
"""Policies where none are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRequest:
    """A device's memory, and how the model is trained in it."""

    memory: str
    """Bytes of a rank's device, such as "80GB"."""
    recompute: str | None = None
    """Policies that microbatches may have, with commas between; None: `RECOMPUTE`."""
    sharding: str | None = None
    """One of `SHARDINGS`; None: "ddp" where ranks meet once a step, else "full"."""

    def model(
        self, name: str | None, *, cluster: Cluster, sync: Sync, rings: RingRules
    ) -> MemoryModel:
        """The model in this memory, trained in bfloat16.

        Args:
            name: A model's folder, or the name of a preset.
            cluster: Over whose ranks states are cut.
            sync: Where ranks meet.
            rings: How many others a rank may meet.

        Raises:
            ConfigError: There is no model, or the sharding is unknown or does not fit `sync`.
            ModelError: The model is unknown.
        """
        if name is None:
            raise ConfigError(
                f"memory is {self.memory!r} and no model is given; expected one, whose bytes fill "
                "it. Name it by --model, or give --capacity and --encoder-capacity"
            )
        usual = "ddp" if sync == "step" else "full"
        sharding = usual if self.sharding is None else self.sharding
        if sharding not in SHARDINGS:
            raise ConfigError(f"sharding is {sharding!r}; expected one of {', '.join(SHARDINGS)}")
        if (sharding == "full") != (sync == "microbatch"):
            raise ConfigError(
                f"sharding is {sharding!r} with sync {sync!r}; expected full with microbatch, and "
                "another with step: ranks of a fully sharded model meet in every microbatch"
            )
        others = cluster.ranks - 1
        budget = rings.peer_budget
        return MemoryModel(
            shape=load_model_shape(name),
            sharding=_sharding(sharding),
            ranks=cluster.ranks,
            peers=others if budget is None else min(others, budget),
        )

    def limits(
        self,
        name: str | None,
        *,
        cluster: Cluster,
        sync: Sync,
        rings: RingRules,
        capacity: int | None = None,
        encoder_capacity: int | None = None,
    ) -> MemoryLimits:
        """What fits under each policy.

        Args:
            name: As in `model`.
            cluster: As in `model`.
            sync: As in `model`.
            rings: As in `model`.
            capacity: Must be None: it follows.
            encoder_capacity: Encoder tokens of a rank; None: they follow, too.

        Raises:
            ConfigError: As `model`; a capacity is given; or nothing fits, with the bytes.
        """
        if capacity is not None:
            raise ConfigError(
                f"capacity {capacity:,} and memory {self.memory!r} are both given; expected one, "
                "since capacity follows from memory: leave one out"
            )
        return memory_limits(
            self.model(name, cluster=cluster, sync=sync, rings=rings),
            memory=parse_bytes(self.memory),
            policies=parse_policies(self.recompute or RECOMPUTE),
            encoder_capacity=encoder_capacity,
        )


def _sharding(name: str) -> Sharding:
    return next(sharding for sharding in SHARDINGS if sharding == name)


def limits_rows(limits: MemoryLimits) -> Iterator[dict[str, Cell]]:
    """One row a policy: what a rank may hold, and the bytes that it then needs."""
    for each in limits.policies:
        piece = max(each.pieces, key=lambda p: p.fixed + p.token * each.capacity)
        yield {
            "recompute": each.policy,
            "capacity": each.capacity,
            "encoder capacity": each.encoder_capacity,
            "fixed": shown(piece.fixed),
            "a token": shown(piece.token),
            "an encoder token": shown(piece.encoder_token),
            "budget": shown(limits.budget),
        }


class Room(NamedTuple):
    """What a rank may hold, and the budget that it follows from."""

    capacity: int
    encoder_capacity: int
    memory: MemoryLimits | None

    def priced(self, costs: Costs) -> Costs:
        """The costs under the only policy of the budget; without one as they are."""
        if self.memory is None:
            return costs
        return policy_costs(costs, self.memory.policies[0].policy, self.memory)


def room_of(
    budget: BudgetRequest | None,
    model: str | None,
    *,
    cluster: Cluster,
    sync: Sync,
    rings: RingRules,
    capacity: int | None,
    encoder_capacity: int | None,
) -> Room:
    """Capacities that are given, or that follow from memory.

    Args:
        budget: None where capacities are given.
        model: As in `BudgetRequest.model`.
        cluster: As in `BudgetRequest.model`.
        sync: As in `BudgetRequest.model`.
        rings: As in `BudgetRequest.model`.
        capacity: LLM tokens of a rank; None with a budget.
        encoder_capacity: Encoder tokens of a rank; may be None with a budget.

    Raises:
        ConfigError: Neither capacities nor a budget, or both; or as `BudgetRequest.limits`.
    """
    if budget is None:
        if capacity is None or encoder_capacity is None:
            raise ConfigError(f"there is no capacity: {CAPACITY_NEEDS}")
        return Room(capacity, encoder_capacity, None)
    limits = budget.limits(
        model,
        cluster=cluster,
        sync=sync,
        rings=rings,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
    )
    return Room(limits.capacity, limits.encoder_capacity, limits)


def room_under_one(
    budget: BudgetRequest | None,
    model: str | None,
    *,
    cluster: Cluster,
    sync: Sync,
    rings: RingRules,
    capacity: int | None,
    encoder_capacity: int | None,
) -> Room:
    """The same under one policy, "full" where none is named, and with usual capacities.

    Raises:
        ConfigError: Several policies are named; or as `room_of`.
    """
    if budget is None:
        capacity, encoder_capacity = capacity or CAPACITY, encoder_capacity or ENCODER_CAPACITY
    elif budget.recompute is None:
        budget = replace(budget, recompute="full")
    elif len(parse_policies(budget.recompute)) > 1:
        raise ConfigError(
            f"recompute is {budget.recompute!r}; expected one policy, under which all is compared "
            "alike. Give one, such as --recompute full"
        )
    return room_of(
        budget,
        model,
        cluster=cluster,
        sync=sync,
        rings=rings,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
    )
