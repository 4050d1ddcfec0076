"""All positions of a ring in one process, each in a thread, or one of them alone.

For degrees beyond the number of cores or GPUs. Threads must not meet in autograd: for CUDA it has
one thread a device, in which positions would wait for each other for ever. So positions call the
attention's forward and backward themselves.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from dynapar.attention.exchange import Message

Result = TypeVar("Result")
Queues = dict[tuple[int, int], "queue.Queue[Tensor]"]

PATIENCE = 20.0
"""Seconds after which a message is not waited for any longer."""


@dataclass
class LoopbackPending:
    """Messages that other threads put in queues."""

    queues: Queues
    rank: int
    receives: Sequence[Message]

    def wait(self) -> None:
        """Fill the receives."""
        for peer, x in self.receives:
            sent = self.queues[peer, self.rank].get(timeout=PATIENCE)
            assert sent.shape == x.shape, f"{peer} sent {sent.shape} to {self.rank}, not {x.shape}"
            x.copy_(sent)
        self.receives = ()


@dataclass
class LoopbackTransport:
    """Carries the messages of one thread."""

    rank: int
    queues: Queues
    sent: int = 0
    """Bytes."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, operation: str
    ) -> LoopbackPending:
        """Hand over copies of what is sent, as a network would."""
        for peer, x in sends:
            assert x.numel(), operation
            self.sent += x.nbytes
            self.queues[self.rank, peer].put(x.clone())
        return LoopbackPending(self.queues, self.rank, receives)


def run_loopback(degree: int, fn: Callable[[LoopbackTransport], Result]) -> list[Result]:
    """Call `fn` for every rank at once; the results by rank, or the first error.

    Raises:
        AssertionError: Messages were waited for that never came, or sent and never received.
    """
    # Made before the threads start: two of them making the same queue would lose a message.
    queues: Queues = {pair: queue.Queue() for pair in itertools.permutations(range(degree), 2)}
    results: dict[int, Result] = {}
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


@dataclass
class ReadyTransport:
    """Messages that have arrived already, whatever is in them: one position, timed alone."""

    rank: int
    buffers: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, operation: str
    ) -> ReadyTransport:
        """Fill the receives, at the price of a copy."""
        for _, x in receives:
            key = x.dtype, tuple(x.shape)
            if key not in self.buffers:
                # Messages of bytes hold numbers of several dtypes: 0 is one in all of them.
                floating = x.is_floating_point()
                self.buffers[key] = torch.randn_like(x) if floating else torch.zeros_like(x)
            x.copy_(self.buffers[key])
        return self

    def wait(self) -> None:
        """Nothing is under way."""
