"""Work per rank is within 3 % of an even share under every mask, at the tokens of zigzag."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynapar.attention.bands import Bands, causal, chunked, full, prefix, spans, window
from dynapar.attention.evenly import chunk_work, cut_evenly
from dynapar.attention.plan import plan_attention
from dynapar.attention.shards import cut, cuts, index
from dynapar.attention.trees import tree
from tests.attention.test_bands import seen
from tests.attention.test_tiles import masks

Draw = np.random.Generator


def answers(length: int, rng: Draw) -> Bands:
    """Several answers to one prompt."""
    prompt = max(int(length * rng.uniform(0.05, 0.6)), 1)
    count = int(rng.integers(3, 9))
    ends = np.linspace(prompt, length, count + 1).astype(int)
    return tree([prompt, *np.diff(ends).tolist()], [-1] + [0] * count)


def turns(length: int, rng: Draw) -> Bands:
    """A conversation that was continued from earlier turns."""
    ends = np.sort(rng.choice(np.arange(1, length), size=7, replace=False)).tolist()
    parents, path = [-1], [0]
    for node in range(1, 8):
        path = [*path[: int(rng.integers(1, len(path) + 1))], node]
        parents.append(path[-2])
    return tree(np.diff([0, *ends, length]).tolist(), parents)


def pictures(length: int, rng: Draw, width: int | None = None) -> Bands:
    starts = range(int(rng.integers(0, 200)), length - 256, 700)
    return spans(length, [(start, start + 256) for start in starts], width=width)


MASKS: dict[str, Callable[[int, Draw], Bands]] = {
    "causal": lambda n, rng: causal(n),
    "full": lambda n, rng: full(n),
    "window": lambda n, rng: window(n, width=1024),
    "long chunks": lambda n, rng: chunked(n, width=8192),
    "short chunks": lambda n, rng: chunked(n, width=1000),
    "prefix": lambda n, rng: prefix(n, tokens=int(n * rng.random())),
    "pictures": pictures,
    "pictures in a window": lambda n, rng: pictures(n, rng, 1024),
    "answers": answers,
    "turns": turns,
}


def log_normal(rng: Draw, count: int = 24) -> list[int]:
    drawn = rng.lognormal(np.log(4000), 1.2, count)
    return [int(length) for length in np.clip(drawn, 16, 65_536)]


@pytest.mark.parametrize("degree", [2, 3, 5, 8])
@pytest.mark.parametrize("mask", MASKS)
def test_work_is_within_3_percent_on_log_normal_packs(mask: str, degree: int) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        lengths = log_normal(rng)
        bands = [MASKS[mask](length, rng) for length in lengths]
        even = cut_evenly(lengths, degree=degree, masks=[bands])
        plan = plan_attention(lengths, degree=degree, bands=bands, spans=even)
        assert max(plan.work) * degree <= 1.03 * sum(plan.work)
        assert plan.tokens == tuple(cut(lengths, degree=degree).tokens.tolist())


@pytest.mark.parametrize("mask", ["window", "long chunks", "short chunks", "pictures in a window"])
def test_packs_are_cut_no_finer_than_needed(mask: str) -> None:
    """What one sequence lacks another makes up for: chunks stay those of zigzag, but for a few."""
    rng = np.random.default_rng(0)
    lengths = log_normal(rng)
    bands = [MASKS[mask](length, rng) for length in lengths]
    even = cut_evenly(lengths, degree=4, masks=[bands])
    assert len(even.start) <= 1.1 * len(cut(lengths, degree=4).start)


def test_zigzag_alone_would_miss_that() -> None:
    rng = np.random.default_rng(0)
    lengths = log_normal(rng)
    bands = [answers(length, rng) for length in lengths]
    plan = plan_attention(lengths, degree=8, bands=bands)
    assert max(plan.work) * 8 > 1.1 * sum(plan.work)


def test_every_class_of_a_model_is_even_under_the_one_cut() -> None:
    rng = np.random.default_rng(1)
    lengths = log_normal(rng)
    classes = [[causal(n) for n in lengths], [chunked(n, width=8192) for n in lengths]]
    even = cut_evenly(lengths, degree=4, masks=classes)
    for bands in classes:
        work = plan_attention(lengths, degree=4, bands=bands, spans=even).work
        assert max(work) * 4 <= 1.03 * sum(work)


def test_causal_packs_are_cut_zigzag() -> None:
    lengths = [5000, 31, 777]
    even = cut_evenly(lengths, degree=4, masks=[[causal(n) for n in lengths]])
    want = cut(lengths, degree=4)
    assert all(np.array_equal(getattr(even, f), getattr(want, f)) for f in want.__slots__)


def test_a_single_long_tree_is_cut_finer() -> None:
    """Nothing else in the pack can make up for it."""
    bands = [tree([3000, 9000, 5000, 4000], [-1, 0, 0, 2])]
    zigzag = plan_attention([21_000], degree=4, bands=bands)
    even = cut_evenly([21_000], degree=4, masks=[bands])
    plan = plan_attention([21_000], degree=4, bands=bands, spans=even)
    assert max(zigzag.work) * 4 > 1.05 * sum(zigzag.work)
    assert max(plan.work) * 4 <= 1.03 * sum(plan.work)


@given(st.data(), st.integers(1, 6))
def test_every_token_is_held_once_and_counts_are_those_of_zigzag(
    data: st.DataObject, degree: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    bands = [data.draw(masks(length)) for length in lengths]
    some = st.permutations(range(degree)).flatmap(
        lambda p: st.integers(1, degree).map(lambda n: p[:n])
    )
    positions = data.draw(st.none() | st.tuples(*[some for _ in lengths]))
    made = cut_evenly(lengths, degree=degree, masks=[bands], positions=positions)
    held = [index(made, lengths, position) for position in range(degree)]
    assert sorted(np.concatenate(held).tolist()) == list(range(sum(lengths)))
    assert all((np.diff(rows) > 0).all() for rows in held)
    assert (made.tokens == cut(lengths, degree=degree, positions=positions).tokens).all()
    for position, sequence in zip(made.position, made.sequence, strict=True):
        assert positions is None or position in positions[sequence]


@given(st.data(), st.integers(1, 40), st.integers(1, 7))
def test_chunk_work_counts_the_pairs_of_each_chunk(
    data: st.DataObject, length: int, chunks: int
) -> None:
    both = [data.draw(masks(length)) for _ in range(2)]
    at = cuts(length, chunks)
    got: NDArray[np.int64] = chunk_work(both, at)
    for column, mask in enumerate(both):
        pairs = seen(length, mask).sum(1)
        assert got[:, column].tolist() == [pairs[a:b].sum() for a, b in pairwise(at)]
