"""Tiles and launches hold exactly the pairs of the mask, whatever the shards."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynapar.attention.bands import UNLIMITED, Band, Bands, causal, full, prefix, spans, window
from dynapar.attention.calls import Call, blocks, visible
from dynapar.attention.kernels import KERNELS
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.attention.shards import LAYOUTS
from dynapar.attention.tiles import Tile, fuse, moved_rows
from tests.attention.oracle import dense_mask

Counts = NDArray[np.int64]


@st.composite
def grids(draw: st.DrawFn, length: int) -> Bands:
    """Four rectangles, each cut by diagonals of its own."""
    bound = st.integers(-length, length)
    row, column = draw(st.integers(0, length)), draw(st.integers(0, length))
    bands = []
    for q0, q1 in ((0, row), (row, length)):
        for k0, k1 in ((0, column), (column, length)):
            lo, hi = draw(st.just(-UNLIMITED) | bound), draw(st.just(UNLIMITED) | bound)
            bands.append(Band(q0, q1, k0, k1, lo, hi))
    return tuple(bands)


@st.composite
def masks(draw: st.DrawFn, length: int) -> Bands:
    kind = draw(st.sampled_from(["causal", "full", "window", "prefix", "spans", "grid"]))
    if kind == "grid":
        return draw(grids(length))
    if kind == "window":
        return window(length, width=draw(st.integers(1, length + 1)))
    if kind == "prefix":
        return prefix(length, tokens=draw(st.integers(0, length)))
    if kind == "spans":
        start, stop = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
        width = draw(st.none() | st.integers(1, length))
        beyond = draw(st.booleans())
        return spans(length, [(start, stop)], width=width, beyond_width=beyond)
    return causal(length) if kind == "causal" else full(length)


@st.composite
def plans(draw: st.DrawFn) -> tuple[AttentionPlan, list[Bands]]:
    degree = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    bands = [draw(masks(n)) for n in lengths]
    some = st.lists(st.integers(0, degree - 1), min_size=1, max_size=degree, unique=True)
    positions = draw(st.none() | st.tuples(*[some for _ in lengths]))
    layout = draw(st.sampled_from(LAYOUTS))
    plan = plan_attention(lengths, degree=degree, bands=bands, positions=positions, layout=layout)
    return plan, bands


def rows_of(rows: slice | torch.Tensor) -> NDArray[np.int64]:
    if isinstance(rows, slice):
        return np.arange(rows.start, rows.stop)
    return rows.numpy()


def add_call(counts: Counts, call: Call, queries: Counts, keys: Counts) -> None:
    """Count the pairs of a call; `queries` and `keys` are the packed positions of its rows."""
    q, k = queries[rows_of(call.q_rows)], keys[rows_of(call.k_rows)]
    assert len(set(q.tolist())) == len(q), "segments of a call share a query row"
    at_q = at_k = 0
    for nq, nk in zip(call.queries, call.keys, strict=True):
        one = Call(
            q_rows=slice(0, nq),
            k_rows=slice(0, nk),
            queries=(nq,),
            keys=(nk,),
            left=call.left,
            right=call.right,
        )
        seen = visible(one, torch.device("cpu")).numpy()
        assert seen.any(0).all()
        assert seen.any(1).all()
        counts[np.ix_(q[at_q : at_q + nq], k[at_k : at_k + nk])] += seen
        at_q, at_k = at_q + nq, at_k + nk
    assert (at_q, at_k) == (len(q), len(k))


def fetched_positions(plan: AttentionPlan, position: int, source: int) -> Counts:
    """Packed positions of the rows that `position` has of `source`."""
    held = plan.index(source)
    if source == position:
        return held
    return held[rows_of(plan.prepare(source).send[position])]


@given(plans())
def test_rows_moved_by_all_are_those_that_each_fetches(
    planned: tuple[AttentionPlan, list[Bands]],
) -> None:
    plan, _ = planned
    assert moved_rows(plan.table) == sum(plan.fetched(p) for p in range(plan.degree))


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@given(plans())
def test_launches_hold_each_visible_pair_once(
    kernel: str, planned: tuple[AttentionPlan, list[Bands]]
) -> None:
    plan, bands = planned
    want = dense_mask(plan.lengths, bands).numpy()
    counts = np.zeros(want.shape, dtype=np.int64)
    for position in range(plan.degree):
        local = plan.prepare(position)
        touched: set[int] = set()
        order = [(position - t) % plan.degree for t in range(plan.degree)]
        calls = local.calls(KERNELS[kernel], torch.device("cpu"), order)
        for source in order:
            keys = fetched_positions(plan, position, source)
            assert source == position or len(keys) == local.fetch[source]
            for call in calls[source]:
                add_call(counts, call, plan.index(position), keys)
                rows = set(rows_of(call.q_rows).tolist())
                assert call.first == rows.isdisjoint(touched)
                touched |= rows
    assert (counts == want).all()
    assert plan.work == tuple(int(want[plan.index(p)].sum()) for p in range(plan.degree))


@given(plans())
def test_both_ends_of_a_message_agree(planned: tuple[AttentionPlan, list[Bands]]) -> None:
    plan, bands = planned
    mask = dense_mask(plan.lengths, bands).numpy()
    for position in range(plan.degree):
        assert plan.fetched(position) == sum(plan.prepare(position).fetch)
        for source in range(plan.degree):
            fetched = plan.prepare(position).fetch[source]
            assert fetched == plan.prepare(source).send_rows[position]
            if source != position:
                needed = mask[np.ix_(plan.index(position), plan.index(source))].any(0)
                assert fetched == needed.sum(), "a row is fetched that no query sees"


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_a_zigzag_causal_sequence_is_one_tile_for_each_source(degree: int) -> None:
    plan = plan_attention([1001], degree=degree, bands=[causal(1001)])
    for position in range(degree):
        local = plan.prepare(position)
        assert [len(tiles) for tiles in local.tiles] == [1] * degree
        assert local.tiles[position][0].window == (-1, 0)
        assert all(tile[0].full for s, tile in enumerate(local.tiles) if s != position)


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_zigzag_evens_out_causal_work_and_fetches_three_quarters(degree: int) -> None:
    lengths = [4001, 777, 12000]
    plan = plan_attention(lengths, degree=degree, bands=[causal(n) for n in lengths])
    even = sum(plan.work) / degree
    assert max(plan.work) < 1.005 * even
    forwarded = (degree - 1) / degree * sum(lengths)
    fetched = [plan.fetched(p) for p in range(degree)]
    assert sum(fetched) / degree < 0.76 * forwarded


def test_fuse_leaves_tiles_alone_that_only_touch() -> None:
    apart = [Tile(0, 4, 0, 4, 0, 3), Tile(4, 4, 4, 4, 0, 3)]
    assert fuse(apart) == apart
    window_pair = [Tile(0, 4, 0, 4, 0, 1), Tile(4, 4, 0, 4, -3, 1)]
    assert fuse(window_pair) == window_pair


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.data())
def test_blocks_hold_the_pairs_of_the_tile(
    queries: int, keys: int, rows: int, data: st.DataObject
) -> None:
    # Any lo and hi that leave each row and column a pair.
    lo = data.draw(st.integers(1 - keys, min(0, queries - keys)))
    hi = data.draw(st.integers(max(0, queries - keys), queries - 1))
    whole = np.zeros((queries, keys), dtype=np.int64)
    i, j = np.arange(queries)[:, None], np.arange(keys)[None]
    want = (i - j >= lo) & (i - j <= hi)
    for part in blocks(Tile(0, queries, 0, keys, lo, hi), rows):
        assert part.queries <= rows
        i, j = np.arange(part.queries)[:, None], np.arange(part.keys)[None]
        block = (i - j >= part.lo) & (i - j <= part.hi)
        whole[part.query : part.query + part.queries, part.key : part.key + part.keys] += block
    assert (whole == want).all()
