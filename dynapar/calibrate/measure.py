"""Time blocks on real ranks, exactly as training runs and times them.

A round runs all blocks through the step executor, closing pass included, and then the optimizer;
rounds repeat, so that what drifts touches all shapes alike. On CPUs the time is CPU time of the
training thread, which neither other processes nor waiting for a peer adds to; on GPUs it is wall
clock of a microbatch whose end is awaited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dynapar.calibrate.blocks import Block
from dynapar.calibrate.transfer import Message, host_rate, message_times
from dynapar.catalog import load_model_shape
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.errors import CostsError
from dynapar.plan import MicroBatch, Parts, Placement
from dynapar.runtime.layout import ShardLayout
from dynapar.train.config import RunConfig
from dynapar.train.setup import join_ranks, load_model, make_executor, make_optimizer
from dynapar.verify.batches import Batches
from dynapar.verify.spawn import run_on_ranks

FloatArray = npt.NDArray[np.float64]

LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank gets."""

    config: RunConfig
    blocks: tuple[Block, ...]
    rounds: int
    """At most."""
    budget: float
    """Seconds of wall clock that all rounds may take; at least `LEAST_ROUNDS` are run."""


class Timings(NamedTuple):
    """What one rank measured; seconds."""

    blocks: FloatArray
    """(rounds, blocks); not a number where the rank has no part."""
    closing: FloatArray
    """(rounds,) the closing pass."""
    optimizer: FloatArray
    """(rounds,) the optimizer."""
    cuda: bool
    host_rate: float
    """Bytes a second, one way, that "offload" moves."""
    messages: tuple[Message, ...] = ()
    """Between ranks 0 and 1; of these two alone."""


def time_blocks(job: Job) -> list[Timings]:
    """Time a job's blocks, on two CPU ranks that are started here, on one GPU, or under torchrun.

    Returns:
        By rank.

    Raises:
        DynaparError: The configuration, its data or its model cannot be used; or a rank failed or
            died on the way.
    """
    timeout = timedelta(seconds=job.config.timeout_seconds)
    if "RANK" not in os.environ and not torch.cuda.is_available():
        try:
            return run_on_ranks(time_rank, job, ranks=2, timeout=timeout)
        except RuntimeError as error:
            raise CostsError(
                f"calibration stopped, and no costs were written: {str(error).strip()}\nMend what "
                "it names and calibrate again; a rank that was killed may have run out of memory: "
                "lower planner.capacity"
            ) from error
    join_ranks(timeout=timeout)
    mine = time_rank(dist.get_rank(), job)
    every: list[Timings] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def time_rank(rank: int, job: Job) -> Timings:
    """One rank's part of `time_blocks`; rings run on ranks 0 and 1, all else on every rank.

    All ranks are busy then, as in training: they share caches, memory and often cores, which makes
    each of them slower. Odd ranks go the other way round, so that a block meets several others.
    """
    config = job.config
    ranks = join_ranks(timeout=timedelta(seconds=config.timeout_seconds))
    model = load_model(
        config.model, seed=config.seed, precision=config.precision, device=ranks.device
    )
    executor = make_executor(model, ranks, config)
    optimizer = make_optimizer(model, config.optimizer)
    rings = [number for number, block in enumerate(job.blocks) if block.degree > 1 and rank < 2]
    alone = [number for number, block in enumerate(job.blocks) if block.degree == 1]
    own = rings + (alone[::-1] if rank % 2 else alone)
    batches = Batches(config)
    queue: list[ShardLayout] = []
    for number in own:
        samples = load_block(batches, job.blocks[number])
        micro = microbatch_of(job.blocks[number], samples, rank=rank)
        queue += executor.prepare_microbatches((micro,), samples)
    cuda = ranks.device.type == "cuda"
    rounds: list[tuple[FloatArray, float, float]] = []
    began, rounds_left = time.perf_counter(), job.rounds + 1
    while rounds_left > 0:
        result = executor.run(tuple(queue), targets=1)
        times = np.full(len(job.blocks), np.nan)
        times[own] = result.microbatch_seconds if cuda else result.microbatch_busy
        whole = result.seconds if cuda else result.busy_seconds
        spent = time.thread_time()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rounds.append((times, whole - float(np.nansum(times)), time.thread_time() - spent))
        rounds_left = _agree(min(rounds_left - 1, _left(job, began, len(rounds))))
    kept = rounds[1:]  # the first one warms up
    shape = load_model_shape(str(config.model)).text
    row = 2 * shape.kv_heads * shape.head_width * (2 if config.precision == "bfloat16" else 4)
    tokens = config.planner.capacity
    sizes = tuple(row * max(tokens // part, 1) for part in (32, 16, 8, 4, 2, 1))
    return Timings(
        blocks=np.array([times for times, _, _ in kept]),
        closing=np.array([closing for _, closing, _ in kept]),
        optimizer=np.array([step for _, _, step in kept]),
        cuda=cuda,
        host_rate=host_rate(ranks.device),
        messages=message_times(ranks.transport, ranks.device, sizes=sizes),
    )


def _left(job: Job, began: float, done: int) -> int:
    """Rounds for which there is time."""
    spent = time.perf_counter() - began
    affordable = int((job.budget - spent) / (spent / done))
    return max(affordable, LEAST_ROUNDS + 1 - done, 0)


def _agree(rounds: int) -> int:
    """Rank 0's number."""
    said = [rounds]
    dist.broadcast_object_list(said)
    return said[0]


def load_block(batches: Batches, block: Block) -> dict[int, LoadedSample]:
    """The samples of a block: the index's own, or text of its lengths."""
    if block.rows:
        return {place: batches.whole(row) for place, row in enumerate(block.rows)}
    table = batches.table
    first = int(np.argmin(table.llm_tokens))
    like = batches.whole(first)
    return {
        place: _text(length, like, count=count, place=place)
        for place, (length, count) in enumerate(
            zip(block.lengths, block.targets(table), strict=True)
        )
    }


def _text(length: int, like: LoadedSample, *, count: int, place: int) -> LoadedSample:
    """Text whose tokens are another sample's, over and over; `count` of them have targets.

    Those lie evenly, so that both ranks of a ring have as many.
    """
    words = like.input_ids[like.kinds == 0]
    ids = words.repeat(length // len(words) + 1)[:length]
    targets = torch.full_like(ids, IGNORE)
    places = torch.arange(count) * (length - 1) // max(count, 1)
    targets[places] = ids[places + 1]
    positions = torch.arange(length).expand(like.positions.shape[0], length).contiguous()
    return LoadedSample(
        id=f"text{place}",
        input_ids=ids,
        targets=targets,
        kinds=torch.zeros(length, dtype=torch.int64),
        positions=positions,
        media=(),
        units={},
    )


def microbatch_of(block: Block, samples: dict[int, LoadedSample], *, rank: int) -> MicroBatch:
    """All samples on one rank or on a ring from rank 0 on, which encodes all; not priced."""
    ranks = tuple(range(block.degree)) if block.degree > 1 else (rank,)
    return MicroBatch(
        ranks=ranks,
        placements=tuple(
            Placement(row, ranks, (ranks[0],) * sum(item.units for item in sample.media))
            for row, sample in samples.items()
        ),
        tokens_per_rank=(0,) * block.degree,
        encoder_tokens_per_rank=(0,) * block.degree,
        ticks=0,
        start=0,
        parts=Parts(0, 0, 0, 0, 0),
        recompute=block.recompute,
    )


def spread_of(times: Sequence[float] | FloatArray) -> float:
    """How far single runs of one shape stray: half of the middle two thirds, over the median.

    That is one standard deviation where times are normal.
    """
    low, middle, high = np.quantile(np.asarray(times), (1 / 6, 1 / 2, 5 / 6))
    return float((high - low) / 2 / middle)
