"""Move rows between ranks: batches of point-to-point messages on one long-lived process group.

No group is made for a ring: any subset of the group's ranks may exchange, in any order, because the
group ran one collective at the start (`Transport.warm_up`). Nothing else may run on that group.
`pooled` does the same over groups that are made once, should a backend not bear this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[int, Tensor]
"""The peer, a rank of the group, and the buffer: contiguous, and left alone until `wait`."""


class Recorder(Protocol):
    """Is told of all communication as it is issued, for instance the order check's log."""

    def record(
        self,
        *,
        communicator: str,
        operation: str,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]],
    ) -> None:
        """A batch of messages is issued: (global rank of the peer, bytes) of each, in order."""

    def record_collective(
        self, *, communicator: str, operation: str, members: Sequence[int], size: int
    ) -> None:
        """A collective over `members` (global ranks) of `size` bytes is issued."""


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when the receives are filled (on CUDA: for work queued from now on)."""


class Exchange(Protocol):
    """What carries the messages of a ring; `Transport` is the one that runs on process groups."""

    @property
    def rank(self) -> int:
        """Of this process, in the numbering of the peers."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, operation: str
    ) -> Pending:
        """Issue a batch of messages and return at once."""


@dataclass(slots=True)
class PendingBatch:
    """Messages under way on a process group. Holds every buffer until it is let go."""

    works: list[dist.Work]
    buffers: list[Tensor]

    def wait(self) -> None:
        """Return when all messages of the batch are through; safe to call again."""
        for work in self.works:
            work.wait()
        self.works.clear()


class Transport:
    """Batched point-to-point messages on one process group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        name: str = "exchange",
        recorder: Recorder | None = None,
    ):
        """Wrap a process group that carries nothing else.

        Args:
            group: Its ranks are the peers; None is the default group or, where torch.distributed
                was not initialised, this process alone.
            name: Of the communicator, in recordings; the same on all ranks.
            recorder: Is told of each batch as it is issued.

        Raises:
            ValueError: This process is not in the group.
        """
        self.group, self.name, self.recorder = group, name, recorder
        alone = group is None and not dist.is_initialized()
        self.rank: int = 0 if alone else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                f"this process (rank {dist.get_rank()}) is not in the group of transport {name!r}; "
                "expected a member: make the group of all ranks that run dynapar"
            )
        self.members: tuple[int, ...] = (
            (0,) if alone else tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        )
        """Global ranks, by rank of the group."""

    def warm_up(self, device: torch.device | str = "cpu") -> None:
        """Run one collective on all ranks of the group, so that any subset may exchange after it.

        Args:
            device: Of the tensors to be exchanged; with NCCL, this rank's GPU, made current before.
        """
        if len(self.members) == 1:
            return
        token = torch.zeros(1, device=device)
        if self.recorder is not None:
            self.recorder.record_collective(
                communicator=self.name,
                operation="warm up",
                members=self.members,
                size=token.nbytes,
            )
        dist.all_reduce(token, group=self.group)

    def among(self, ranks: Sequence[int]) -> Transport:
        """What carries messages between these ranks alone: this transport does, for any.

        Args:
            ranks: Of the group, this process among them.
        """
        return self

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, operation: str
    ) -> PendingBatch:
        """Issue a batch of messages and return at once.

        Both ends must agree on sizes, and list several messages of one pair in the same order.
        Empty tensors are left out, so they must be empty at both ends. A rank that has no message
        issues nothing.

        Args:
            sends: (peer, contiguous tensor), read until `wait` returns.
            receives: (peer, contiguous tensor), overwritten.
            operation: What it is for, in recordings; the same at both ends.

        Raises:
            ValueError: A peer is not in the group, or is this rank.
        """
        sends = [message for message in sends if message[1].numel()]
        receives = [message for message in receives if message[1].numel()]
        for peer, _ in (*sends, *receives):
            if not 0 <= peer < len(self.members) or peer == self.rank:
                raise ValueError(
                    f"rank {self.rank} exchanges {operation!r} with peer {peer}; expected another "
                    f"rank of the {len(self.members)} of transport {self.name!r}: check the ring"
                )
        if not sends and not receives:
            return PendingBatch([], [])
        if self.recorder is not None:
            self.recorder.record(
                communicator=self.name,
                operation=operation,
                sends=[(self.members[peer], x.nbytes) for peer, x in sends],
                receives=[(self.members[peer], x.nbytes) for peer, x in receives],
            )
        ops = [
            dist.P2POp(call, x, group=self.group, group_peer=peer)
            for call, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, x in messages
        ]
        works = dist.batch_isend_irecv(ops)
        return PendingBatch(works, [x for _, x in (*sends, *receives)])
