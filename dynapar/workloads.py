"""Named workloads: global batches drawn from published length tables, for benchmarks and plans.

The tables and their sources are in `workload_tables/`. A draw is a pure function of (name,
samples, seed, longest): nothing else enters.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynapar.errors import SourceError
from dynapar.meta import IMAGE, VIDEO, SampleTable

WORKLOADS = ("wikipedia", "longdoc", "docs", "lognormal", "sft", "burst", "video", "flat")
"""What `draw` knows."""

TILE_TOKENS, TILE_LLM_TOKENS = 1025, 256
"""Of an image tile in `docs`: encoder tokens, LLM tokens."""
FRAME_TOKENS, FRAME_LLM_TOKENS = 784, 196
"""Of a video frame in `video`: encoder tokens, LLM tokens."""
CLIP_TEXT_TOKENS = 64
"""Text tokens of a clip in `video`."""
CLIP_FRAMES, FRAMES_A_RANK, TOKENS_A_RANK = 600, 82, 16_384
"""A clip has at most CLIP_FRAMES frames, and what FRAMES_A_RANK on each TOKENS_A_RANK allow."""
SHORTEST, CAP, WIKIPEDIA_CAP, SHORT = 16, 131_072, 262_144, 16_384
"""Bounds of lengths, in tokens; `burst` has nothing between SHORT and its one of CAP."""

IntArray = npt.NDArray[np.int64]


class _Draw:
    """One seeded generator and the tables."""

    def __init__(self, name: str, samples: int, seed: int) -> None:
        self.rng = np.random.default_rng([seed, sum(map(ord, name))])
        self.n = samples

    def table(self, name: str, count: int, cap: int) -> IntArray:
        """(count,) lengths by inverse CDF."""
        values = _table(name)
        drawn = np.interp(self.rng.random(count), values["p"], values["tokens"])
        return np.minimum(drawn.astype(np.int64), cap)

    def lognormal(self, median: float, sigma: float) -> npt.NDArray[np.float64]:
        return self.rng.lognormal(math.log(median), sigma, self.n)

    def documents(self) -> IntArray:
        """(n, 2) image tiles and LLM tokens, half of each kind."""
        one = np.array(_table("docvqa")["rows"], np.int64)
        other = np.array(_table("ai2d")["rows"], np.int64)
        pick = self.rng.random(self.n) < 0.5
        left = one[self.rng.integers(len(one), size=self.n)]
        right = other[self.rng.integers(len(other), size=self.n)]
        return np.where(pick[:, None], left, right)


@cache
def _table(name: str) -> dict[str, list[float]]:
    path = Path(__file__).parent / "workload_tables" / f"{name}.json"
    values: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    return values


def draw(name: str, samples: int, *, seed: int, longest: int) -> SampleTable:
    """Draw a global batch.

    Args:
        name: One of `WORKLOADS`.
        samples: How many, 1 or more.
        seed: 0 or more.
        longest: Lengths are clipped to this: the ranks of the cluster times their capacity.

    Raises:
        SourceError: There is no such workload.
    """
    if name not in WORKLOADS:
        raise SourceError(f"workload {name!r} is unknown; expected one of {', '.join(WORKLOADS)}")
    source = _Draw(name, samples, seed)
    none = np.zeros(samples, np.int64)
    if name == "docs":
        documents = source.documents()
        return _media(documents[:, 1], documents[:, 0], none + TILE_TOKENS, none, longest)
    if name == "video":
        return _video(source, longest)
    if name == "wikipedia":
        tokens = source.table("wikipedia", samples, WIKIPEDIA_CAP)
    elif name == "longdoc":
        tokens = source.table("longdoc", samples, CAP)
    elif name == "lognormal":
        tokens = np.minimum(source.lognormal(2000, 1.3).astype(np.int64), CAP)
    elif name == "sft":
        tokens = _sft(source)
    elif name == "burst":
        tokens = _burst(source)
    else:
        tokens = source.rng.integers(900, 1101, samples)
    return _media(tokens, none, none, none, longest)


def _sft(source: _Draw) -> IntArray:
    def by_mean(mean: float, sigma: float) -> npt.NDArray[np.float64]:
        return source.rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, source.n)

    long = source.rng.random(source.n) < 0.0011
    mixed = np.where(long, by_mean(37_000, 0.6), by_mean(1000, 0.8))
    return np.minimum(mixed.astype(np.int64), CAP)


def _burst(source: _Draw) -> IntArray:
    tokens = source.table("longdoc", source.n, CAP)
    while (above := tokens > SHORT).any():
        tokens[above] = source.table("longdoc", int(above.sum()), CAP)
    tokens[source.rng.permutation(source.n)[: max(1, source.n // 128)]] = CAP
    return tokens


def _video(source: _Draw, longest: int) -> SampleTable:
    kind = source.rng.random(source.n)
    text = np.minimum(source.lognormal(800, 1.3).astype(np.int64), 8192)
    documents = source.documents()
    most = min(CLIP_FRAMES, longest // TOKENS_A_RANK * FRAMES_A_RANK)
    frames = np.clip(source.lognormal(12, 1.0), 1, max(1, most)).astype(np.int64)
    is_text, is_video = kind < 0.4, kind >= 0.8
    clips = frames * FRAME_LLM_TOKENS + CLIP_TEXT_TOKENS
    tokens = np.where(is_text, text, np.where(is_video, clips, documents[:, 1]))
    units = np.where(is_text, 0, np.where(is_video, frames, documents[:, 0]))
    size = np.where(is_video, FRAME_TOKENS, TILE_TOKENS)
    return _media(tokens, units, size, is_video.astype(np.int64), longest)


def _media(
    tokens: IntArray, units: IntArray, size: IntArray, video: IntArray, longest: int
) -> SampleTable:
    tokens = np.clip(tokens, SHORTEST, longest).astype(np.int64)
    placeholders = units * np.where(video == 1, FRAME_LLM_TOKENS, TILE_LLM_TOKENS)
    text = np.clip(tokens - placeholders, 0, None)
    modality = np.where(units == 0, 0, np.where(video == 1, VIDEO, IMAGE))
    return SampleTable(
        ids=tuple(f"s{row}" for row in range(len(tokens))),
        llm_tokens=tokens,
        text_tokens=text,
        label_tokens=np.clip(text - 1, 0, None),
        modalities=modality.astype(np.uint8),
        unit_offsets=np.concatenate([[0], np.cumsum(units)]).astype(np.int64),
        unit_tokens=np.repeat(size, units).astype(np.int64),
    )
