from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynapar.attention.bands import (
    UNLIMITED,
    Band,
    Bands,
    area,
    causal,
    check_bands,
    chunked,
    fa_window,
    full,
    prefix,
    spans,
    trim,
    window,
)
from tests.attention.oracle import MASKS, dense_mask

BoolArray = NDArray[np.bool_]


def seen(length: int, bands: Bands) -> NDArray[np.int64]:
    """How many bands hold each pair."""
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    counts = np.zeros((length, length), dtype=np.int64)
    for q0, q1, k0, k1, lo, hi in bands:
        counts[q0:q1, k0:k1] += ((distance >= lo) & (distance <= hi))[q0:q1, k0:k1]
    return counts


@st.composite
def any_band(draw: st.DrawFn, length: int = 24) -> Band:
    q0, q1 = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
    k0, k1 = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
    lo = draw(st.one_of(st.just(-UNLIMITED), st.integers(-length, length)))
    hi = draw(st.one_of(st.just(UNLIMITED), st.integers(-length, length)))
    return Band(q0, q1, k0, k1, lo, hi)


@given(any_band())
def test_trim_drops_exactly_the_rows_and_columns_that_see_nothing(band: Band) -> None:
    pairs = seen(24, (band,))
    kept = trim(band)
    if kept is None:
        assert not pairs.any()
        return
    inside = pairs[kept.q0 : kept.q1, kept.k0 : kept.k1]
    assert inside.any(0).all()
    assert inside.any(1).all()
    assert inside.sum() == pairs.sum()


@given(any_band())
def test_area_counts_the_visible_pairs(band: Band) -> None:
    assert area(band) == seen(24, (band,)).sum()


@given(any_band())
def test_fa_window_means_the_same_pairs(band: Band) -> None:
    kept = trim(band)
    assume(kept is not None)
    assert kept is not None
    left, right = fa_window(kept)
    assert left >= -1
    assert right >= -1
    queries, keys = kept.q1 - kept.q0, kept.k1 - kept.k0
    ahead = np.arange(keys)[None] - np.arange(queries)[:, None] - (keys - queries)
    allowed = np.ones((queries, keys), dtype=bool)
    if left != -1:
        allowed &= ahead >= -left
    if right != -1:
        allowed &= ahead <= right
    assert (allowed == (seen(24, (kept,))[kept.q0 : kept.q1, kept.k0 : kept.k1] > 0)).all()


@given(st.lists(any_band(length=12), max_size=4))
def test_check_bands_finds_every_pair_that_is_held_twice(bands: list[Band]) -> None:
    if seen(12, tuple(bands)).max() <= 1:
        check_bands(12, tuple(bands))
        return
    with pytest.raises(ValueError, match="disjoint"):
        check_bands(12, tuple(bands))


def brute(
    length: int, rule: str, *, width: int = 0, blocks: Sequence[tuple[int, int]] = ()
) -> BoolArray:
    q, k = np.arange(length)[:, None], np.arange(length)[None]
    same = np.zeros((length, length), dtype=bool)
    for start, stop in blocks:
        same |= (q >= start) & (q < stop) & (k >= start) & (k < stop)
    rules = {
        "causal": k <= q,
        "full": np.ones((length, length), dtype=bool),
        "window": (k <= q) & (q - k < width),
        "chunked": (k <= q) & (q // max(width, 1) == k // max(width, 1)),
        "spans": (k <= q) | same,
        "window and spans": (q - k < width) & ((k <= q) | same),
        "window or spans": ((k <= q) & (q - k < width)) | same,
    }
    chosen: BoolArray = rules[rule]
    return chosen


@given(st.integers(1, 20), st.integers(1, 25), st.data())
def test_constructors_mean_what_they_say(length: int, width: int, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, length), min_size=4, max_size=4)))
    blocks = [(ends[0], ends[1]), (ends[2], ends[3])]
    tokens = data.draw(st.integers(0, length))
    cases = [
        (causal(length), brute(length, "causal")),
        (full(length), brute(length, "full")),
        (window(length, width=width), brute(length, "window", width=width)),
        (chunked(length, width=width), brute(length, "chunked", width=width)),
        (prefix(length, tokens=tokens), brute(length, "spans", blocks=((0, tokens),))),
        (spans(length, blocks), brute(length, "spans", blocks=tuple(blocks))),
        (
            spans(length, blocks, width=width),
            brute(length, "window and spans", width=width, blocks=tuple(blocks)),
        ),
        (
            spans(length, blocks, width=width, beyond_width=True),
            brute(length, "window or spans", width=width, blocks=tuple(blocks)),
        ),
    ]
    for bands, want in cases:
        check_bands(length, bands)
        assert (seen(length, bands) == want).all()


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_its_rule_pair_by_pair(mask: str) -> None:
    for length in (1, 2, 3, 5, 12, 40):
        bands = MASKS[mask].bands(length)
        check_bands(length, bands)
        assert torch.equal(dense_mask([length], [bands]), MASKS[mask].dense(length))


def test_overlapping_bands_are_named_with_a_pair() -> None:
    with pytest.raises(ValueError, match=r"both hold query 3 and key 3; expected disjoint bands"):
        check_bands(9, (*causal(9), Band(3, 5, 3, 5, -UNLIMITED, 0)))


def test_checking_takes_no_longer_for_long_sequences() -> None:
    """A causal mask and what lies above its diagonal: nothing in common, at any length."""
    check_bands(10**9, prefix(10**9, tokens=10**9 - 1))


def test_a_band_outside_its_sequence_is_named() -> None:
    with pytest.raises(ValueError, match=r"q1=10.* leaves a sequence of 9 tokens; expected 0 <="):
        check_bands(9, causal(10))


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="length is 0; expected 1 or more: leave empty sequences"):
        causal(0)


def test_a_window_without_width_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 0; expected 1 or more"):
        window(5, width=0)
    with pytest.raises(ValueError, match="width is 0; expected 1 or more"):
        chunked(5, width=0)


def test_overlapping_spans_are_named() -> None:
    with pytest.raises(ValueError, match=r"span \(3, 9\) overlaps another or leaves a sequence"):
        spans(20, [(0, 4), (3, 9)])
