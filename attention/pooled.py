"""Move rows between ranks over process groups that are made once, one for each of some windows.

The fallback for a backend on which a batch of messages between some ranks of a large group does not
get through: here the ranks of a ring have a group of their own, or the smallest there is that holds
them. A window is a run of consecutive ranks; the peer budget bounds which there may be, so the
groups can be made at the start, warmed up and used by every ring until the end. Each costs device
memory on its ranks: where many windows are possible, make few of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .exchange import Message, PendingBatch, Recorder, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A run of ranks and, where this process is one of them, what carries their messages."""

    ranks: range
    transport: Transport | None


class PooledTransport:
    """Batched point-to-point messages, each on the group of the smallest window with both ends."""

    def __init__(self, windows: Sequence[Window]):
        """Use these windows; `make_pool` makes them.

        Args:
            windows: By size, then first rank; the same on all ranks.
        """
        self.windows = tuple(windows)
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self._narrowed: dict[tuple[int, int], PooledTransport] = {}

    def warm_up(self, device: torch.device | str = "cpu") -> None:
        """Run one collective on each group, in the same order on all ranks.

        Args:
            device: Of the tensors to be exchanged; with NCCL, this rank's GPU, made current before.
        """
        for window in self.windows:
            if window.transport is not None:
                window.transport.warm_up(device)

    def among(self, ranks: Sequence[int]) -> PooledTransport:
        """What carries messages between these ranks alone, all of them on one group.

        Args:
            ranks: Any, this process among them.

        Raises:
            ValueError: No window holds them all.
        """
        ends = min(ranks), max(ranks)
        if ends not in self._narrowed:
            alone = ends[0] == ends[1]
            self._narrowed[ends] = PooledTransport(() if alone else [self._smallest(*ends)])
        return self._narrowed[ends]

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, operation: str
    ) -> PendingBatch:
        """Issue a batch of messages on each group that some need, and return at once.

        As `Transport.exchange`. Groups are taken in one order on all ranks, so that batches of one
        exchange never wait for each other in a circle.

        Args:
            sends: (peer, contiguous tensor), read until `wait` returns.
            receives: (peer, contiguous tensor), overwritten.
            operation: What it is for, in recordings; the same at both ends.

        Raises:
            ValueError: A peer shares no window with this rank, or is this rank.
        """
        batches: dict[int, tuple[list[Message], list[Message]]] = {}
        for way, messages in enumerate((sends, receives)):
            for peer, x in messages:
                if x.numel():
                    window = self._smallest(*sorted((peer, self.rank)))
                    place = self.windows.index(window)
                    batch = batches.setdefault(place, ([], []))
                    batch[way].append((peer - window.ranks.start, x))
        pending = PendingBatch([], [])
        for place in sorted(batches):
            transport = self.windows[place].transport
            assert transport is not None
            issued = transport.exchange(*batches[place], operation=operation)
            pending.works += issued.works
            pending.buffers += issued.buffers
        return pending

    def _smallest(self, first: int, last: int) -> Window:
        """The first window that holds two ranks."""
        for window in self.windows:
            if window.transport is not None and first in window.ranks and last in window.ranks:
                return window
        raise ValueError(
            f"rank {self.rank} exchanges with ranks {first} to {last}, which no window of the pool "
            f"holds together (there are {[str(w.ranks) for w in self.windows]}); expected one that "
            "does: make the pool of all windows that rings may be"
        )


RingTransport = Transport | PooledTransport
"""What carries the messages of all rings; `among` gives a ring's."""


def make_pool(
    windows: Iterable[tuple[int, int]],
    *,
    name: str = "exchange",
    recorder: Recorder | None = None,
    timeout: timedelta | None = None,
) -> PooledTransport:
    """Make a process group for each window. All ranks call it, with the same arguments.

    Args:
        windows: First rank and number of ranks of each, for instance what
            `dynapar.rings.windows` gives. A window of one rank needs no group.
        name: Of the communicators, in recordings; a window's ranks are added to it.
        recorder: Is told of each batch as it is issued.
        timeout: Of waiting on the groups; None is torch's.

    Raises:
        ValueError: A window has ranks that do not exist.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    made = []
    for count, first in sorted({(count, first) for first, count in windows if count != 1}):
        if count < 1 or first < 0 or first + count > world:
            raise ValueError(
                f"a window has {count} ranks from {first}; expected 1 or more of 0 to {world - 1}: "
                "make the pool for the cluster that runs"
            )
        ranks = range(first, first + count)
        # Never with use_local_synchronization: it hangs where ranks are in unlike many groups.
        group = dist.new_group(list(ranks), timeout=timeout)
        transport = None
        if rank in ranks:
            label = f"{name} {first}-{first + count - 1}"
            transport = Transport(group, name=label, recorder=recorder)
        made.append(Window(ranks=ranks, transport=transport))
    return PooledTransport(made)
