"""What a schedule takes when microbatches and ranks are not as fast as predicted.

Factors are log-normal with mean 1, so noise alone makes no work longer on average; what it costs is
that ranks wait for whoever is slow just then. Draws are seeded by (seed, step, draw) alone: a
rank is slow in the same draw under every scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynapar.errors import ConfigError
from dynapar.simulate.replay import FloatArray, replay
from dynapar.simulate.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far times stray, and how often it is drawn."""

    microbatch: float = 0.05
    """Sigma of the logarithm of each microbatch's factor."""
    rank: float = 0.02
    """Sigma of the logarithm of each rank's factor in a step."""
    draws: int = 64
    seed: int = 0
    slow: tuple[tuple[int, float], ...] = ()
    """(rank, factor): ranks that always take longer."""

    def __post_init__(self) -> None:
        for name in ("microbatch", "rank"):
            if not 0.0 <= (value := getattr(self, name)) < 2.0:
                raise ConfigError(f"Noise.{name} is {value}; expected a sigma from 0 to below 2")
        if self.draws < 1 or self.seed < 0:
            raise ConfigError(
                f"Noise has {self.draws} draws and seed {self.seed}; expected 1 or more draws and "
                f"a seed of 0 or more"
            )
        for rank, factor in self.slow:
            if rank < 0 or not 0.0 < factor < float("inf"):
                raise ConfigError(
                    f"slow rank {rank} has factor {factor}; expected a rank of 0 or more and a "
                    f"factor above 0"
                )


def slow_factors(ranks: int, slow: tuple[tuple[int, float], ...]) -> FloatArray:
    """(ranks,) how much longer each rank always takes.

    Raises:
        ConfigError: A slow rank is not one of `ranks`.
    """
    factors = np.ones(ranks)
    for rank, factor in slow:
        if rank >= ranks:
            raise ConfigError(f"slow rank {rank} is not there: ranks are 0..{ranks - 1}")
        factors[rank] *= factor
    return factors


def draw_factors(
    schedule: Schedule, noise: Noise, *, step: int, draw: int
) -> tuple[FloatArray, FloatArray]:
    """The factors of one draw.

    Args:
        schedule: R ranks and B microbatches.
        noise: The sigmas and the seed.
        step: Number of the step.
        draw: Number of the draw.

    Returns:
        (R,) factors of the ranks, slow ones included, and (B,) factors of the microbatches.
    """
    rng = np.random.default_rng([noise.seed, step, draw])
    ranks = _lognormal(rng.standard_normal(schedule.ranks), noise.rank)
    microbatches = _lognormal(rng.standard_normal(len(schedule.layout.first)), noise.microbatch)
    return ranks * slow_factors(schedule.ranks, noise.slow), microbatches


def _lognormal(normal: FloatArray, sigma: float) -> FloatArray:
    return np.exp(sigma * normal - 0.5 * sigma * sigma)


def expected_makespan(schedule: Schedule, noise: Noise, *, step: int) -> float:
    """Mean makespan, in ticks, over all draws.

    Args:
        schedule: The step.
        noise: The sigmas, the draws and the seed.
        step: Number of the step.

    Raises:
        ConfigError: A slow rank is not there.
    """
    total = 0
    for draw in range(noise.draws):
        own, shared = draw_factors(schedule, noise, step=step, draw=draw)
        total += replay(schedule, rank_factors=own, microbatch_factors=shared).makespan
    return total / noise.draws
