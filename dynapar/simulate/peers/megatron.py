"""Megatron Core's `BalancedCPScheduler`, run as it is in the installed megatron-core.

What it decides is kept; how that is read, and where it is given the benefit of the doubt:

- It sees LLM tokens alone, as in use: Megatron's hybrid context parallelism takes no media. Its
  own estimate of work, tokens^2 / degree, is not replaced. Encoder units are then placed by our
  own placement (`judge`), which it does not have.
- Of its process group it asks the size alone, so a stand-in of that size takes the group's place.
  `max_seq_len_per_rank` is the capacity.
- Each sample is a forward and backward of its own, as its executor runs them: it packs nothing, so
  each is a microbatch here and pays what every microbatch pays.
- Its executor puts a barrier of all ranks behind each of its groups. Under sync "step" that
  barrier costs nothing here (which favours it); under "microbatch" the k-th samples of all ranks
  within a group form a wave.
- Megatron has process groups for aligned blocks of 2, 4, ... ranks (below half of all ranks, or
  half) and for all ranks. A sample on other ranks would run with the wrong ones or hang: a failure.
- It refuses fully sharded parameters, so its makespan under sync "microbatch" is hypothetical.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace

from dynapar.simulate.peers.request import (
    PeerError,
    PeerMissingError,
    Piece,
    Plan,
    Planner,
    Request,
)

DISTRIBUTION, VERSION = "megatron-core", "0.16.1"
"""What is installed, and the version whose executor the notes above describe."""
MODULE = "megatron.core.pipeline_parallel.hybrid_cp_schedule"


def load() -> Planner:
    """Import the scheduler.

    Raises:
        PeerMissingError: megatron-core is not installed, or has no such scheduler.
    """
    try:
        module = import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] != "megatron":
            raise PeerMissingError(
                f"megatron-core needs {error.name}, which is not installed; pip install "
                f"{error.name}"
            ) from None
        raise PeerMissingError(
            f"megatron-core is not installed; pip install --no-deps {DISTRIBUTION}=={VERSION}"
        ) from None
    if not hasattr(module, "BalancedCPScheduler"):
        raise PeerMissingError(
            f"the installed megatron-core has no BalancedCPScheduler; pip install --no-deps "
            f"{DISTRIBUTION}=={VERSION}"
        )
    scheduler_class = module.BalancedCPScheduler

    def planner(request: Request) -> Plan:
        group = SimpleNamespace(size=lambda: request.ranks)
        scheduler = scheduler_class(request.capacity, group)
        pairs = list(enumerate(request.tokens.tolist()))
        _, groups = scheduler.get_groups_and_subsamples(pairs, None)
        return pieces(groups, request.ranks)

    return planner


def pieces(groups: Sequence[Sequence[Sequence[int]]], ranks: int) -> Plan:
    """Read what the scheduler returns.

    Args:
        groups: For each of its groups, for each rank, the samples that it runs, in order.
        ranks: Of the cluster.

    Raises:
        PeerError: A sample stands at different places in its ranks' lists, or is on ranks for
            which Megatron has no process group.
    """
    plan: Plan = []
    wave = 0
    for group in groups:
        holders: dict[int, list[int]] = {}
        places: dict[int, set[int]] = {}
        for rank, rows in enumerate(group):
            for place, row in enumerate(rows):
                holders.setdefault(row, []).append(rank)
                places.setdefault(row, set()).add(place)
        found = []
        for row, members in holders.items():
            if len(places[row]) > 1:
                raise PeerError(
                    f"sample {row} is at places {sorted(places[row])} of the lists of ranks "
                    f"{members}, which would wait for each other for ever"
                )
            _check_group(row, members, ranks)
            found.append(Piece(wave + min(places[row]), tuple(members), (row,)))
        plan += sorted(found)
        wave += max(map(len, group), default=0)
    return plan


def _check_group(row: int, members: Sequence[int], ranks: int) -> None:
    """Raise unless Megatron has a process group of exactly these ranks."""
    size, first = len(members), members[0]
    block = list(members) == list(range(first, first + size))
    largest = 1 << max(0, ranks.bit_length() - 2)
    power = size & (size - 1) == 0 and size <= largest
    if size in (1, ranks) or (block and power and first % size == 0):
        return
    raise PeerError(
        f"sample {row} is on ranks {members}, for which Megatron has no process group: those are "
        f"aligned blocks of 2, 4, ... {largest} ranks, and all {ranks}"
    )
