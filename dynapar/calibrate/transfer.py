"""Time what moves bytes: the copies of "offload", and messages between two ranks.

Both are wall clock: nothing of either can be seen in the CPU time of the training thread.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dynapar.attention.pooled import RingTransport
from dynapar.runtime.recompute import from_host, to_host

HOST_BYTES = 16 << 20
"""Of a copy: the input of a layer of some thousand tokens."""
REPEATS = 15


class Message(NamedTuple):
    """Messages of one size, sent and received at once by two ranks, as in a ring."""

    size: int
    """Bytes, one way."""
    seconds: float
    """Median of `REPEATS`."""


def host_rate(device: torch.device) -> float:
    """Bytes a second, one way, of the copies that "offload" makes: to the host and back.

    Args:
        device: Of the run; on a CPU the copy is one within its memory.
    """
    kept = torch.ones(HOST_BYTES // 4, device=device)
    seconds = []
    for _ in range(REPEATS + 1):
        _finish(device)
        began = time.perf_counter()
        from_host(to_host(kept), device)
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return 2 * HOST_BYTES / float(np.median(seconds[1:]))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def message_times(
    transport: RingTransport, device: torch.device, *, sizes: tuple[int, ...]
) -> tuple[Message, ...]:
    """Messages between ranks 0 and 1; a collective call of all ranks, empty on all others.

    Args:
        transport: Of the rings.
        device: Of the buffers.
        sizes: Bytes.
    """
    found = []
    for size in sizes if transport.rank < 2 <= dist.get_world_size() else ():
        sent = torch.ones(size, dtype=torch.uint8, device=device)
        received, peer = torch.empty_like(sent), 1 - transport.rank
        ready = torch.ones(1, dtype=torch.uint8, device=device), torch.empty_like(sent[:1])
        seconds = []
        for _ in range(REPEATS + 1):
            # So that neither counts how much later the other one comes.
            transport.exchange([(peer, ready[0])], [(peer, ready[1])], operation="ready").wait()
            _finish(device)
            began = time.perf_counter()
            transport.exchange([(peer, sent)], [(peer, received)], operation="timed").wait()
            _finish(device)
            seconds.append(time.perf_counter() - began)
        found.append(Message(size, float(np.median(seconds[1:]))))
    return tuple(found)
