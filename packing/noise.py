"""How long a layout takes when microbatches and ranks are not as fast as predicted.

Factors are log-normal with mean 1, one a microbatch and one a rank, as in `dynapar.simulate.noise`.
Layouts of one step are compared under the same draws: a rank strays alike in all of them. Each
microbatch and each rank meets one value of every stratum (latin hypercube), so that 64 draws tell
layouts apart which plain ones would not.
"""

from __future__ import annotations

from math import exp
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ._jit import inlined, kernel
from .ticks import Coefficients, FloatArray, IntArray, Layout, Loads

DRAWS = 64
"""A power of two."""
FINER = 16
"""Values of each stratum."""
RANKS, MICROBATCHES = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
"""Seeds of the two kinds of factors."""


class Stray(NamedTuple):
    """The values that factors take, ascending, `DRAWS * FINER` of each."""

    rank: FloatArray
    microbatch: FloatArray


def stray(rank: float, microbatch: float) -> Stray:
    """The values of log-normal factors of mean 1.

    Rounded to a millionth, so that machines whose logarithms differ in the last bit agree.

    Args:
        rank: Sigma of the logarithm of a rank's factor.
        microbatch: Sigma of the logarithm of a microbatch's factor.
    """
    count = DRAWS * FINER
    normal = [NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)]

    def values(sigma: float) -> FloatArray:
        raw = [exp(sigma * z) for z in normal]
        scale = count / sum(raw)
        return np.array([round(value * scale, 6) for value in raw])

    return Stray(values(rank), values(microbatch))


@kernel
def _mixed(number: int, seed: int) -> int:
    """A hash of 62 bits: splitmix64's finalizer."""
    z = np.uint64(number) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))) >> np.uint64(2))


@kernel
def _hashes(count: int, seed: int) -> IntArray:
    out = np.empty(count, np.int64)
    for k in range(count):
        out[k] = _mixed(k, seed)
    return out


@inlined
def _factor(own: int, draw: int, values: FloatArray) -> float:
    """One draw of what has this hash: strata in an order of its own, any value of the stratum."""
    stratum = ((2 * (own & 31) + 1) * draw + (own >> 5)) & (DRAWS - 1)
    inner = (own >> (16 + 4 * (draw & 7))) & (FINER - 1)
    return float(values[stratum * FINER + inner])


@kernel
def expected_ticks(
    layout: Layout, loads: Loads, waves: int, ranks: int, noise: Stray, costs: Coefficients
) -> int:
    """Mean makespan over `DRAWS` draws.

    Args:
        layout: Microbatches in global order.
        loads: What `microbatch_ticks` says of it.
        waves: Its waves; 0 where ranks meet once.
        ranks: Of the cluster.
        noise: The values of the factors.
        costs: The coefficients.
    """
    count = layout.first.shape[0]
    own, shared = np.empty(ranks), np.empty(count)
    first, width, wave, rows = layout.first, layout.width, layout.wave, loads.starts
    parts, encoded = loads.parts, loads.encoder_tokens
    llm = np.empty(parts.shape[0])
    for row in range(parts.shape[0]):
        llm[row] = parts[row, 0] + parts[row, 1] + parts[row, 2] + costs.fixed
    rank_hash, hashes = _hashes(ranks, RANKS), _hashes(count, MICROBATCHES)
    free = np.empty(ranks)
    total = 0.0
    for draw in range(DRAWS):
        for rank in range(ranks):
            own[rank] = _factor(rank_hash[rank], draw, noise.rank)
        for b in range(count):
            shared[b] = _factor(hashes[b], draw, noise.microbatch)
        if waves == 0:
            free[:] = 0.0
            makespan = 0.0
            for b in range(count):
                start, lasts = 0.0, 0.0
                base = rows[b] - first[b]
                for rank in range(first[b], first[b] + width[b]):
                    start = max(start, free[rank])
                    lasts = max(lasts, (llm[base + rank] + parts[base + rank, 3]) * own[rank])
                end = start + lasts * shared[b]
                free[first[b] : first[b] + width[b]] = end
                makespan = max(makespan, end)
            total += makespan
            continue
        slowest = own.max()
        b = 0
        for v in range(waves):
            encoder, longest, encodes = (
                0.0,
                max(costs.fixed * slowest, float(costs.llm_floor)),
                False,
            )
            while b < count and wave[b] == v:
                base = rows[b] - first[b]
                for rank in range(first[b], first[b] + width[b]):
                    factor = own[rank] * shared[b]
                    encoder = max(encoder, parts[base + rank, 3] * factor)
                    longest = max(longest, llm[base + rank] * factor)
                    encodes = encodes or encoded[base + rank] > 0
                b += 1
            total += longest + (max(encoder, float(costs.encoder_floor)) if encodes else 0.0)
    return int(total / DRAWS + 0.5)
