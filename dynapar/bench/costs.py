"""Measure what a model's work costs on one CPU thread of this machine, and write a cost file.

A quick set: some dozens of microbatches of the configuration's own samples are timed on one rank
(CPU time, forward and backward, the better of two), then a few on a ring of two. Coefficients of
0 or more are fitted to the relative error. `calibrate` will do it for every device and term.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from dynapar.catalog import ModelShape, load_model_shape
from dynapar.costs import (
    AttentionCosts,
    Costs,
    EncoderCosts,
    ExchangeCosts,
    FixedCosts,
    LinearCosts,
)
from dynapar.data.samples import LoadedSample
from dynapar.meta import SampleTable
from dynapar.plan import MicroBatch, Parts, Placement
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.layout import ShardLayout, lay_out
from dynapar.runtime.microbatch import MicrobatchModule
from dynapar.train.config import RunConfig
from dynapar.train.setup import autocast_dtype, join_ranks, load_model
from dynapar.verify.batches import Batches
from dynapar.verify.spawn import run_on_ranks

SINGLES, PACKS, RINGS, TIMES = 16, 12, 3, 2

Values = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A microbatch to be timed."""

    rows: tuple[int, ...]
    """Of the index."""
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What both ranks get."""

    config: RunConfig
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Costs, and how well they describe what they were fitted to."""

    costs: Costs
    blocks: int
    median_error: float
    """Of |predicted / measured - 1|, blocks of one rank."""
    worst_error: float


def measure_costs(config: RunConfig, *, name: str) -> Fit:
    """Time the configuration's model on its samples.

    Args:
        config: Of the run; `costs` is not read.
        name: Of the costs.

    Raises:
        DynaparError: The configuration, its data or its model cannot be used.
    """
    batches = Batches(config)
    blocks = choose_blocks(
        batches.table,
        capacity=config.planner.capacity,
        encoder_capacity=config.planner.encoder_capacity,
    )
    print(f"costs: timing {len(blocks)} microbatches", file=sys.stderr, flush=True)
    seconds = run_on_ranks(
        time_blocks,
        Job(config=config, blocks=blocks),
        ranks=2,
        timeout=timedelta(seconds=config.timeout_seconds),
    )
    shape = load_model_shape(str(config.model))
    return fit_costs(shape, batches.table, blocks, np.max(seconds, axis=0), name)


def choose_blocks(table: SampleTable, *, capacity: int, encoder_capacity: int) -> tuple[Block, ...]:
    """Single samples of all sizes, packs of several, and the largest ones on a ring of two.

    Args:
        table: All samples.
        capacity: LLM tokens of a rank.
        encoder_capacity: Encoder tokens of a rank.
    """
    encoder = table.encoder_tokens
    fits = np.flatnonzero((table.llm_tokens <= capacity) & (encoder <= encoder_capacity))
    order = fits[np.argsort(table.llm_tokens[fits], kind="stable")]
    plain = order[encoder[order] == 0]
    media = order[encoder[order] > 0]
    singles = {
        int(group[place])
        for group in (plain, media)
        if len(group)
        for place in np.linspace(0, len(group) - 1, SINGLES // 2).astype(np.int64)
    }
    blocks = [Block(rows=(row,), degree=1) for row in sorted(singles)]
    shuffled = iter(np.random.default_rng(0).permutation(np.tile(fits, PACKS)).tolist())
    for number in range(PACKS):
        rows: list[int] = []
        limit = capacity * (number % 3 + 1) // 3
        for row in shuffled:
            tokens = int(table.llm_tokens[[*rows, row]].sum())
            if rows and (tokens > limit or int(encoder[[*rows, row]].sum()) > encoder_capacity):
                break
            if row not in rows:
                rows.append(row)
        if rows:
            blocks.append(Block(rows=tuple(rows), degree=1))
    blocks += [Block(rows=(int(row),), degree=2) for row in plain[-RINGS:]]
    return tuple(blocks)


def time_blocks(rank: int, job: Job) -> tuple[float, ...]:
    """CPU seconds of this thread for each block; 0 for those of which this rank has no part.

    Args:
        rank: 0 or 1.
        job: The same on both.
    """
    config = job.config
    timeout = timedelta(seconds=config.timeout_seconds)
    ranks = join_ranks(timeout=timeout, device=torch.device("cpu"))
    model = load_model(
        config.model, seed=config.seed, precision=config.precision, recompute=config.recompute
    )
    adapter = Adapter(model)
    module = MicrobatchModule(
        adapter,
        transport=ranks.transport,
        loss_chunk=config.loss_chunk,
        autocast=autocast_dtype(config.precision),
    )
    batches = Batches(config)
    seconds = []
    for block in job.blocks:
        if rank >= block.degree:
            seconds.append(0.0)
            continue
        samples = {place: batches.whole(row) for place, row in enumerate(block.rows)}
        shard = lay_out(
            _microbatch(samples, block.degree),
            samples,
            rank=rank,
            masks=adapter.masks,
            bands=adapter.bands,
        )
        seconds.append(min(_time(module, shard) for _ in range(TIMES)))
    dist.barrier()
    return tuple(seconds)


def _microbatch(samples: dict[int, LoadedSample], degree: int) -> MicroBatch:
    """All samples at one degree, everything encoded on rank 0; not priced."""
    ranks = tuple(range(degree))
    return MicroBatch(
        ranks=ranks,
        placements=tuple(
            Placement(row, ranks, (0,) * sum(item.units for item in sample.media))
            for row, sample in samples.items()
        ),
        tokens_per_rank=(0,) * degree,
        encoder_tokens_per_rank=(0,) * degree,
        ticks=0,
        start=0,
        parts=Parts(0, 0, 0, 0, 0),
    )


def _time(module: MicrobatchModule, shard: ShardLayout) -> float:
    began = time.thread_time()
    loss = module(shard)
    if loss.requires_grad:
        loss.backward()
    return time.thread_time() - began


def fit_costs(
    shape: ModelShape, table: SampleTable, blocks: Sequence[Block], seconds: Values, name: str
) -> Fit:
    """Coefficients of 0 or more that describe the measured blocks best.

    Args:
        shape: Of the model: its layers and widths give the coefficients the form of a cost file.
        table: All samples.
        blocks: What was timed.
        seconds: (blocks,) float64, of the slowest rank.
        name: Of the costs.
    """
    features = np.array([_features(table, block) for block in blocks])
    alone = np.array([block.degree == 1 for block in blocks])
    found = non_negative_fit(features[alone], seconds[alone])
    errors = np.abs(features[alone] @ found / seconds[alone] - 1)
    hops = (seconds - features @ found)[~alone]
    latency = max(float(np.median(hops)), 0.0) if len(hops) else 0.0
    return Fit(
        costs=_costs(shape, found, latency, name),
        blocks=len(blocks),
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
    )


def _features(table: SampleTable, block: Block) -> list[float]:
    """What each coefficient is multiplied by: fixed, linear, attention, encoder, its square."""
    rows = np.array(block.rows, np.int64)
    tokens = table.llm_tokens[rows].astype(np.float64)
    units = np.concatenate([table.units(row) for row in block.rows]).astype(np.float64)
    return [
        1.0,
        tokens.sum() / block.degree,
        np.square(tokens).sum() / block.degree,
        units.sum(),
        np.square(units).sum(),
    ]


def non_negative_fit(features: Values, seconds: Values) -> Values:
    """The coefficients of 0 or more with the least sum of squared relative errors.

    Tries every subset of the columns, so it is exact; meant for a handful of them.

    Args:
        features: (n, k) float64.
        seconds: (n,) float64, above 0.

    Returns:
        (k,) float64.
    """
    k = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    scaled = features / seconds[:, None] / scale
    best, least = np.zeros(k), float(len(seconds))
    for size in range(1, k + 1):
        for columns in map(list, itertools.combinations(range(k), size)):
            part = np.linalg.lstsq(scaled[:, columns], np.ones(len(seconds)), rcond=None)[0]
            error = float(np.square(scaled[:, columns] @ part - 1).sum())
            if part.min() >= 0 and error < least:
                best, least = np.zeros(k), error
                best[columns] = part
    coefficients: Values = best / scale
    return coefficients


def _costs(shape: ModelShape, found: Values, latency: float, name: str) -> Costs:
    """The coefficients in the form of a cost file, whose terms are FLOPs over rates."""
    fixed, linear, attention, encoder, square = (float(value) for value in found)
    text, vision = shape.text, shape.vision
    width = text.heads * text.head_width
    per_layer = 2 * text.width * (width + text.kv_heads * text.head_width)
    parameters = float(
        text.layers * (per_layer + 3 * text.width * text.mlp_width) + text.width * text.vocabulary
    )
    unit_flops = 14.0 * vision.layers * vision.width / max(square, 1e-15)
    return Costs(
        name=name,
        measured=True,
        linear=LinearCosts(parameters=parameters, flops=6.0 * parameters / max(linear, 1e-12)),
        attention=AttentionCosts(
            layers=text.layers,
            hidden=width,
            flops=7.0 * text.layers * width / max(attention, 1e-15),
        ),
        exchange=ExchangeCosts(layers=text.layers, latency=latency / text.layers),
        encoder=EncoderCosts(
            parameters=encoder * unit_flops / 6.0,
            layers=vision.layers,
            hidden=vision.width,
            flops=unit_flops,
        ),
        fixed=FixedCosts(microbatch=fixed),
    )
