"""Find communication that gloo forgives and NCCL does not: record what ranks issue, then replay it.

NCCL runs the operations of a communicator in the order in which a rank issued them, and operations
of several communicators of one rank may block each other. `replay` takes the strictest reading: a
rank runs all its operations one after the other, whatever their communicator. A batch of
point-to-point messages is at work until all its messages are through; a message passes only while
both ends are at work on it. A cycle of ranks that wait for each other is an error, even where gloo
got through.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynapar.errors import CheckFailedError, SourceError


class OrderError(CheckFailedError):
    """The recorded operations would not get through under NCCL's rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one rank issued at once: a batch of messages, or its part of a collective."""

    communicator: str
    operation: str
    """What it was for, such as "attention rows" or "all_reduce"."""
    sends: tuple[tuple[int, int], ...] = ()
    """(peer rank, bytes) of each message, in order."""
    receives: tuple[tuple[int, int], ...] = ()
    """(peer rank, bytes) of each message, in order."""
    members: tuple[int, ...] = ()
    """All ranks of a collective; empty for messages."""
    size: int = 0
    """Bytes of a collective, equal on all its members."""


@dataclass(slots=True)
class OrderLog:
    """The operations of one rank in the order in which it issued them."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    cut: bool = False
    """Whether it ends in the middle: its file was cut off, and what came after is not known."""

    def record(
        self,
        *,
        communicator: str,
        operation: str,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]],
    ) -> None:
        """Note a batch of messages; called where it is issued, before waiting for it.

        Args:
            communicator: Name of the process group, the same on all ranks.
            operation: What it is for.
            sends: (peer rank, bytes) of each message.
            receives: (peer rank, bytes) of each message.
        """
        if sends or receives:
            self.operations.append(
                Operation(
                    communicator=communicator,
                    operation=operation,
                    sends=tuple(sends),
                    receives=tuple(receives),
                )
            )

    def record_collective(
        self, *, communicator: str, operation: str, members: Sequence[int], size: int
    ) -> None:
        """Note this rank's part of a collective over `members`, of `size` bytes."""
        self.operations.append(
            Operation(
                communicator=communicator, operation=operation, members=tuple(members), size=size
            )
        )

    def save(self, path: Path) -> None:
        """Write the log as JSON lines, the rank first."""
        rows = [
            [op.communicator, op.operation, op.sends, op.receives, op.members, op.size]
            for op in self.operations
        ]
        lines = [json.dumps({"version": 1, "rank": self.rank}), *map(json.dumps, rows)]
        temporary = path.with_suffix(".new")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> OrderLog:
        """Read what `save` wrote; of a file that was cut off, its whole lines.

        Raises:
            SourceError: The file is not an order log, or was cut off in its first line.
        """
        number = 1
        try:
            *whole, last = path.read_text("utf-8").split("\n")
            if not whole:
                raise SourceError(
                    f"{path} is {'cut off in its first line' if last else 'empty'}; expected an "
                    "order log. The run died while it wrote it: run it again with order_steps "
                    "above 0"
                )
            log = cls(rank=int(json.loads(whole[0])["rank"]), cut=last != "")
            for line in whole[1:]:
                number += 1
                communicator, operation, sends, receives, members, size = json.loads(line)
                log.operations.append(
                    Operation(
                        communicator=communicator,
                        operation=operation,
                        sends=tuple((peer, count) for peer, count in sends),
                        receives=tuple((peer, count) for peer, count in receives),
                        members=tuple(members),
                        size=size,
                    )
                )
        except SourceError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"{path} is not an order log (line {number}: {error!r}); expected what a run with "
                "order_steps above 0 writes"
            ) from None
        return log


Message = tuple[str, int, int, int]
"""A message between two ranks: communicator, sender, receiver, and its number between them."""


@dataclass(slots=True)
class _Queue:
    """One rank's operations, each with the keys of what it waits for, and how far it has come."""

    rank: int
    operations: list[Operation]
    keys: list[frozenset[Message]]
    at: int = 0

    def head(self) -> Operation | None:
        return self.operations[self.at] if self.at < len(self.operations) else None


def _number(log: OrderLog, sizes: dict[Message, list[tuple[int, int]]]) -> _Queue:
    """Give every message its number between its two ranks, and collect the sizes at both ends."""
    counters: dict[tuple[str, int, int], int] = defaultdict(int)
    keys: list[frozenset[Message]] = []
    for op in log.operations:
        mine: list[Message] = []
        if op.members:
            # A collective is a message of the whole group: its number among the group's.
            where = (op.communicator, -1, -1)
            mine.append((*where, counters[where]))
            counters[where] += 1
        for sending, messages in ((True, op.sends), (False, op.receives)):
            for peer, size in messages:
                pair = (log.rank, peer) if sending else (peer, log.rank)
                where = (op.communicator, *pair)
                key = (*where, counters[where])
                counters[where] += 1
                sizes[key].append((log.rank, size))
                mine.append(key)
        keys.append(frozenset(mine))
    return _Queue(log.rank, log.operations, keys)


def replay(logs: Iterable[OrderLog]) -> None:
    """Run the logs of all ranks under NCCL's rule.

    What waits for a rank whose log was cut off may have got through, and is no error.

    Args:
        logs: One log a rank, of the same stretch of a run.

    Raises:
        OrderError: Two ends of a message differ in size, a message or collective lacks an end, the
            members of a collective disagree, or ranks wait for each other in a cycle.
    """
    sizes: dict[Message, list[tuple[int, int]]] = defaultdict(list)
    logs = list(logs)
    queues = {log.rank: _number(log, sizes) for log in logs}
    cut = {log.rank for log in logs if log.cut}
    for (communicator, sender, receiver, number), ends in sizes.items():
        where = f"message {number} from rank {sender} to rank {receiver} on {communicator!r}"
        if len(ends) != 2:
            if cut & {sender, receiver} - {ends[0][0]}:
                continue
            raise OrderError(f"{where} was issued by rank {ends[0][0]} alone; expected both ends")
        if ends[0][1] != ends[1][1]:
            raise OrderError(
                f"{where} has {ends[0][1]} bytes on rank {ends[0][0]} "
                f"and {ends[1][1]} on rank {ends[1][0]}; expected the same"
            )
    done: set[Message] = set()
    ready = list(queues)
    while ready:
        rank = ready.pop()
        queue = queues[rank]
        moved = _advance(queue, queues, done)
        if moved:
            ready.extend({rank, *moved})
    waits = {
        rank: _waits(queue, queues, done)
        for rank, queue in queues.items()
        if queue.head() is not None
    }
    if cut:
        _excuse(waits, {rank for rank in cut if queues[rank].head() is None})
    if waits:
        raise OrderError(_explain(waits, queues))


def _partners(op: Operation, key: Message, rank: int) -> list[int]:
    if key[1] == -1:
        return [member for member in op.members if member != rank]
    return [key[2] if key[1] == rank else key[1]]


def _advance(queue: _Queue, queues: dict[int, _Queue], done: set[Message]) -> set[int]:
    """Pass the messages of the head whose other ends are at work; the ranks that this may free."""
    op = queue.head()
    freed: set[int] = set()
    if op is None:
        return freed
    keys = queue.keys[queue.at]
    for key in keys - done:
        partners = _partners(op, key, queue.rank)
        if all(_at_work(queues.get(peer), key) for peer in partners):
            if op.members:
                _check_collective(op, queue, [queues[peer] for peer in partners])
            done.add(key)
            freed.update(partners)
    if keys <= done:
        queue.at += 1
        freed.add(queue.rank)
    return freed


def _at_work(queue: _Queue | None, key: Message) -> bool:
    return queue is not None and queue.head() is not None and key in queue.keys[queue.at]


def _check_collective(op: Operation, queue: _Queue, others: list[_Queue]) -> None:
    for other in others:
        theirs = other.head()
        if theirs is not None and theirs != op:
            raise OrderError(
                f"collective on {op.communicator!r}: rank {queue.rank} issued {op.operation} of "
                f"{op.size} bytes over ranks {list(op.members)}, rank {other.rank} "
                f"{theirs.operation} of {theirs.size} bytes over {list(theirs.members)}"
            )


def _waits(queue: _Queue, queues: dict[int, _Queue], done: set[Message]) -> list[int]:
    """The ranks that a rank at work waits for."""
    op = queue.head()
    assert op is not None
    return [
        peer
        for key in sorted(queue.keys[queue.at] - done)
        for peer in _partners(op, key, queue.rank)
        if not _at_work(queues.get(peer), key)
    ]


def _excuse(waits: dict[int, list[int]], ended: set[int]) -> None:
    """Take out, in place, the ranks that wait for nothing but ranks whose logs were cut off."""
    while True:
        excused = [rank for rank, peers in waits.items() if set(peers) <= ended]
        if not excused:
            return
        for rank in excused:
            del waits[rank]
        ended = ended | set(excused)


def _explain(waits: dict[int, list[int]], queues: dict[int, _Queue]) -> str:
    """Follow who waits for whom from the first stuck rank until a rank comes again."""
    # A rank that waits for several is followed to one that is stuck as well, if there is one.
    follows = {
        rank: next((peer for peer in peers if peer in waits), peers[0])
        for rank, peers in waits.items()
    }
    path = [next(iter(follows))]
    while path[-1] in follows and follows[path[-1]] not in path:
        path.append(follows[path[-1]])
    last = follows.get(path[-1])
    cycle = path[path.index(last) :] if last in path else path
    lines = []
    for rank in cycle:
        op = queues[rank].head()
        if op is None or rank not in follows:
            lines.append(f"rank {rank} has nothing left to run")
        else:
            lines.append(
                f"rank {rank} is at operation {queues[rank].at} ({op.operation} on "
                f"{op.communicator!r}) and waits for rank {follows[rank]}"
            )
    return "ranks wait for each other under NCCL's order: " + "; ".join(lines)
