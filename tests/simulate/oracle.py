"""A slow event simulation of a schedule, in plain Python: ranks, a clock, and a heap of events."""

from __future__ import annotations

import heapq
from math import floor

from dynapar.simulate import Schedule


def slowed(ticks: int, factor: float) -> int:
    return floor(ticks * factor + 0.5)


def queues_of(schedule: Schedule) -> list[list[int]]:
    offsets = schedule.queue_offsets.tolist()
    queue = schedule.queue.tolist()
    return [queue[offsets[r] : offsets[r + 1]] for r in range(len(offsets) - 1)]


def row_of(schedule: Schedule, number: int, rank: int) -> list[int]:
    """Linear, attention, exchange and encoder ticks of a rank in a microbatch."""
    row = int(schedule.loads.starts[number]) + rank - int(schedule.layout.first[number])
    return [int(value) for value in schedule.loads.parts[row]]


def members_of(schedule: Schedule, number: int) -> range:
    first = int(schedule.layout.first[number])
    return range(first, first + int(schedule.layout.width[number]))


def simulate(schedule: Schedule, own: list[float], shared: list[float]) -> tuple[int, list[int]]:
    """Makespan, and the start of each microbatch."""
    if schedule.sync == "microbatch":
        return _waves(schedule, own, shared)
    queues = queues_of(schedule)
    position = [0] * len(queues)
    busy = [False] * len(queues)
    starts = [-1] * len(schedule.layout.first)
    events: list[tuple[int, int]] = []
    clock = 0
    while True:
        for number in range(len(starts)):
            members = members_of(schedule, number)
            if starts[number] < 0 and all(
                not busy[r] and position[r] < len(queues[r]) and queues[r][position[r]] == number
                for r in members
            ):
                starts[number] = clock
                lasts = 0
                for r in members:
                    factor = own[r] * shared[number]
                    parts = [*row_of(schedule, number, r), schedule.constants.fixed]
                    lasts = max(lasts, sum(slowed(part, factor) for part in parts))
                    busy[r] = True
                heapq.heappush(events, (clock + lasts, number))
        if not events:
            return clock, starts
        clock, number = heapq.heappop(events)
        for r in members_of(schedule, number):
            busy[r] = False
            position[r] += 1


def _waves(schedule: Schedule, own: list[float], shared: list[float]) -> tuple[int, list[int]]:
    queues = queues_of(schedule)
    constants = schedule.constants
    starts = [-1] * len(schedule.layout.first)
    clock = 0
    for entries in zip(*queues, strict=True):
        encoder, llm = [0], [constants.llm_floor]
        for rank, number in enumerate(entries):
            factor = own[rank] * (shared[number] if number >= 0 else 1.0)
            parts = [0, 0, 0, 0]
            if number >= 0:
                starts[number] = clock
                parts = row_of(schedule, number, rank)
                row = int(schedule.loads.starts[number]) + rank
                row -= int(schedule.layout.first[number])
                if schedule.loads.encoder_tokens[row]:
                    encoder += [constants.encoder_floor, slowed(parts[3], factor)]
            llm.append(sum(slowed(part, factor) for part in (*parts[:3], constants.fixed)))
        clock += max(encoder) + max(llm)
    return clock, starts
