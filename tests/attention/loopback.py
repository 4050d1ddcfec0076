"""All positions of a ring in one process, each in a thread: degrees beyond the number of cores."""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from dynapar.attention.exchange import Message

T = TypeVar("T")
Queues = dict[tuple[int, int], "queue.Queue[Tensor]"]


@dataclass
class LoopbackPending:
    queues: Queues
    rank: int
    receives: Sequence[Message]

    def wait(self) -> None:
        for peer, x in self.receives:
            sent = self.queues[peer, self.rank].get(timeout=20)
            assert sent.shape == x.shape
            x.copy_(sent)
        self.receives = ()


@dataclass
class LoopbackTransport:
    rank: int
    queues: Queues
    sent: int = 0
    """Bytes."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, operation: str
    ) -> LoopbackPending:
        for peer, x in sends:
            assert x.numel(), operation
            self.sent += x.nbytes
            self.queues[self.rank, peer].put(x.clone())
        return LoopbackPending(self.queues, self.rank, receives)


def run_loopback(degree: int, fn: Callable[[LoopbackTransport], T]) -> list[T]:
    """Call `fn` for every rank at once; the results by rank, or the first error."""
    # Made before the threads start: two of them making the same queue would lose a message.
    queues: Queues = {pair: queue.Queue() for pair in itertools.permutations(range(degree), 2)}
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def call(rank: int) -> None:
        try:
            results[rank] = fn(LoopbackTransport(rank, queues))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors.values():
        if not isinstance(error, queue.Empty):
            raise error
    assert not errors, f"ranks {sorted(errors)} waited for messages that never came"
    assert all(q.empty() for q in queues.values()), "messages were sent that nobody received"
    return [results[rank] for rank in range(degree)]
