"""Run a schedule by its events: when each microbatch starts and ends, and where ranks wait.

Ranks take the microbatches of their queues one by one. Under sync "step" a microbatch starts when
it is the next one of all its ranks, and holds all of them until its slowest has ended. Under sync
"microbatch" all ranks pass each wave together: they wait for each other after its encoder part and
after its LLM part, each of which lasts at least as long as its traffic.

Nothing here looks at a predicted time or at the global order, so a plan's makespan is met without
noise or one of the two is wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.errors import PlanError
from dynapar.packing._jit import kernel
from dynapar.packing.ticks import IntArray
from dynapar.simulate.schedule import DUMMY, Schedule

FloatArray = npt.NDArray[np.float64]

LLM, ENCODER, EXCHANGE, FIXED, INSIDE, BEFORE, AFTER = range(7)
"""Entries of `Timeline.spent`."""


class Timeline(NamedTuple):
    """What a replay saw. Times are ticks from the step's start."""

    makespan: int
    """End of the last microbatch or wave; the closing pass follows."""
    starts: IntArray
    """(B,) when each microbatch starts."""
    ends: IntArray
    """(B,) when it ends."""
    spent: IntArray
    """(7,) rank-ticks, adding up to ranks x makespan: LLM compute, encoder, exchange, fixed; then
    waiting for slower ranks of the same microbatch (in waves: in the LLM part), waiting for a
    ring's other ranks before it starts (in waves: in the encoder part), and after the own queue."""
    waves: IntArray
    """(waves, 2) encoder and LLM ticks of each wave; no rows under sync "step"."""
    traffic_waves: int
    """Waves whose LLM part lasts as long as its traffic, not as its slowest rank."""


def replay(
    schedule: Schedule,
    *,
    rank_factors: FloatArray | None = None,
    microbatch_factors: FloatArray | None = None,
) -> Timeline:
    """Replay one step.

    Args:
        schedule: The step.
        rank_factors: (R,) float64, how much longer each rank takes for all it does; None: 1.
        microbatch_factors: (B,) float64, how much longer each microbatch takes on all its ranks;
            None: 1. Traffic is not slowed by either.

    Raises:
        PlanError: The queues contradict each other, so that ranks would wait for ever.
    """
    layout, loads, constants = schedule.layout, schedule.loads, schedule.constants
    count = len(layout.first)
    own = np.ones(schedule.ranks) if rank_factors is None else rank_factors
    shared = np.ones(count) if microbatch_factors is None else microbatch_factors
    if schedule.sync == "step":
        done, makespan, starts, ends, spent = _replay_queues(
            layout.first, layout.width, loads.starts, loads.parts, constants.fixed,
            schedule.queue_offsets, schedule.queue, own, shared,
        )  # fmt: skip
        if (done == 0).any():
            stuck = np.flatnonzero(done == 0)
            raise PlanError(
                f"microbatches {stuck[:10].tolist()} never start: the queues of their ranks put "
                f"them in different orders. Let every queue follow one global order"
            )
        return Timeline(int(makespan), starts, ends, spent, np.zeros((0, 2), np.int64), 0)
    lengths = np.diff(schedule.queue_offsets)
    if (lengths != lengths[0]).any():
        raise PlanError(
            f"queues have from {lengths.min()} to {lengths.max()} waves; under sync 'microbatch' "
            f"all must have as many: fill them up with dummies"
        )
    waves, spent, starts, ends, traffic = _replay_waves(
        layout.first, loads.starts, loads.parts, loads.encoder_tokens, constants.fixed,
        constants.encoder_floor, constants.llm_floor,
        schedule.queue.reshape(schedule.ranks, -1), count, own, shared,
    )  # fmt: skip
    return Timeline(int(waves.sum()), starts, ends, spent, waves, int(traffic))


@kernel
def _slowed(ticks: int, factor: float) -> int:
    return int(np.floor(ticks * factor + 0.5))


@kernel
def _replay_queues(
    first: IntArray,
    width: IntArray,
    rows: IntArray,
    parts: IntArray,
    fixed: int,
    offsets: IntArray,
    queue: IntArray,
    own: FloatArray,
    shared: FloatArray,
) -> tuple[IntArray, int, IntArray, IntArray, IntArray]:
    """Whether each microbatch ran, makespan, starts, ends, rank-ticks spent."""
    count, ranks = first.shape[0], offsets.shape[0] - 1
    starts, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    done = np.zeros(count, np.int64)
    spent = np.zeros(7, np.int64)
    at_head = np.zeros(count, np.int64)
    ready = np.empty(count, np.int64)
    waiting = 0
    free = np.zeros(ranks, np.int64)
    head = offsets[:-1].copy()
    for rank in range(ranks):
        if head[rank] < offsets[rank + 1]:
            b = queue[head[rank]]
            at_head[b] += 1
            if at_head[b] == width[b]:
                ready[waiting] = b
                waiting += 1
    while waiting > 0:
        waiting -= 1
        b = ready[waiting]
        start, lasts = 0, 0
        for position in range(width[b]):
            rank = first[b] + position
            start = max(start, free[rank])
            factor = own[rank] * shared[b]
            whole = _slowed(fixed, factor)
            for part in range(4):
                whole += _slowed(parts[rows[b] + position, part], factor)
            lasts = max(lasts, whole)
        starts[b], ends[b], done[b] = start, start + lasts, 1
        for position in range(width[b]):
            rank = first[b] + position
            row = parts[rows[b] + position]
            factor = own[rank] * shared[b]
            linear, attention = _slowed(row[0], factor), _slowed(row[1], factor)
            exchange, encoder = _slowed(row[2], factor), _slowed(row[3], factor)
            always = _slowed(fixed, factor)
            spent[0] += linear + attention
            spent[1] += encoder
            spent[2] += exchange
            spent[3] += always
            spent[4] += lasts - linear - attention - exchange - encoder - always
            spent[5] += start - free[rank]
            free[rank] = start + lasts
            head[rank] += 1
            if head[rank] < offsets[rank + 1]:
                c = queue[head[rank]]
                at_head[c] += 1
                if at_head[c] == width[c]:
                    ready[waiting] = c
                    waiting += 1
    makespan = 0
    for rank in range(ranks):
        makespan = max(makespan, free[rank])
    for rank in range(ranks):
        spent[6] += makespan - free[rank]
    return done, makespan, starts, ends, spent


@kernel
def _replay_waves(
    first: IntArray,
    rows: IntArray,
    parts: IntArray,
    encoder_tokens: IntArray,
    fixed: int,
    encoder_floor: int,
    llm_floor: int,
    queues: IntArray,
    count: int,
    own: FloatArray,
    shared: FloatArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray, int]:
    """Encoder and LLM ticks of each wave, rank-ticks spent, starts, ends, waves of traffic."""
    ranks, amount = queues.shape
    waves = np.zeros((amount, 2), np.int64)
    spent = np.zeros(7, np.int64)
    starts, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    clock, traffic = 0, 0
    for v in range(amount):
        encoder_part, llm_part = 0, 0
        encodes = False
        busy_encoder, busy_llm = 0, 0
        for rank in range(ranks):
            b = queues[rank, v]
            factor = own[rank] * (shared[b] if b != DUMMY else 1.0)
            always = _slowed(fixed, factor)
            whole = always
            spent[3] += always
            if b != DUMMY:
                row = rows[b] + rank - first[b]
                linear, attention = _slowed(parts[row, 0], factor), _slowed(parts[row, 1], factor)
                exchange, encoder = _slowed(parts[row, 2], factor), _slowed(parts[row, 3], factor)
                spent[0] += linear + attention
                spent[1] += encoder
                spent[2] += exchange
                whole += linear + attention + exchange
                encoder_part = max(encoder_part, encoder)
                encodes = encodes or encoder_tokens[row] > 0
                busy_encoder += encoder
            llm_part = max(llm_part, whole)
            busy_llm += whole
        if encodes:
            encoder_part = max(encoder_part, encoder_floor)
        if llm_part < llm_floor:
            llm_part = llm_floor
            traffic += 1
        for rank in range(ranks):
            b = queues[rank, v]
            if b != DUMMY:
                starts[b], ends[b] = clock, clock + encoder_part + llm_part
        waves[v, 0], waves[v, 1] = encoder_part, llm_part
        spent[5] += ranks * encoder_part - busy_encoder
        spent[4] += ranks * llm_part - busy_llm
        clock += encoder_part + llm_part
    return waves, spent, starts, ends, traffic
