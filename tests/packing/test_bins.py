from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynapar.costs import coefficients, load_costs
from dynapar.packing.bins import place_units, settle_one
from dynapar.packing.moldable import dealt_tokens, shared
from dynapar.packing.ticks import (
    Layout,
    cut_tokens,
    latency_ticks,
    microbatch_ticks,
    sample_ticks,
    unit_columns,
)


@given(
    st.lists(st.integers(1, 50), max_size=12),
    st.lists(st.integers(0, 200), min_size=1, max_size=5),
)
def test_units_always_find_the_room_that_is_promised(sizes: list[int], load: list[int]) -> None:
    tokens, width = np.array(sizes, np.int64), len(load)
    room = int(dealt_tokens(sum(sizes), max(sizes, default=0), len(sizes), width))
    position = np.zeros(len(sizes), np.int64)
    before = np.array(load, np.int64)
    after = before.copy()
    assert place_units(np.arange(len(sizes)), tokens, tokens, after, room, position)
    held = np.bincount(position, weights=tokens, minlength=width)
    assert held.max(initial=0) <= room
    assert (after - before).tolist() == held.astype(int).tolist()


def test_units_go_in_order_to_the_lightest_rank() -> None:
    tokens, load = np.array([5, 9, 7, 3]), np.array([4, 0, 0])
    position = np.zeros(4, np.int64)
    assert place_units(np.array([1, 2, 0, 3]), tokens, tokens, load, 100, position)
    # 9 to rank 1, 7 to rank 2, 5 to rank 0 (4), 3 to rank 2 (7).
    assert position.tolist() == [1, 2, 0, 2]


COSTS = coefficients(load_costs(None), ranks_per_node=8)


def one_microbatch(tokens: list[int], units: list[list[int]], width: int) -> Layout:
    n = len(tokens)
    return Layout(
        first=np.array([3], np.int64),
        width=np.array([width], np.int64),
        wave=np.zeros(1, np.int64),
        offsets=np.array([0, n], np.int64),
        order=np.arange(n),
        sample_first=np.zeros(n, np.int64),
        sample_degree=np.ones(n, np.int64),
        unit_rank=np.zeros(sum(map(len, units)), np.int64),
    )


@given(st.data())
def test_what_settling_says_is_what_the_microbatch_takes(data: st.DataObject) -> None:
    samples = data.draw(
        st.lists(
            st.tuples(st.integers(1, 9000), st.lists(st.integers(1, 3000), max_size=3)),
            min_size=1,
            max_size=9,
        )
    )
    tokens, units = [size for size, _ in samples], [own for _, own in samples]
    width, apart = data.draw(st.integers(1, 6)), data.draw(st.booleans())
    layout = one_microbatch(tokens, units, width)
    columns = np.array(tokens, np.int64)
    reach = columns.astype(np.float64)
    offsets = np.cumsum([0, *map(len, units)], dtype=np.int64)
    sizes = np.array([size for own in units for size in own], np.int64)
    order, llm, encoder = settle_one(
        layout, 0, layout.order.copy(), columns, reach, offsets, sizes,
        unit_columns(sizes, COSTS), 12_000, 9000, apart, True, COSTS,
    )  # fmt: skip
    room = sum(cut_tokens(size, width, 0) for size in tokens)
    if llm < 0:
        assert room > 12_000 or sum(map(sum, units)) > 9000
        return
    assert sorted(order.tolist(), key=lambda i: -tokens[i]) == order.tolist()
    loads = microbatch_ticks(layout, columns, reach, offsets, sizes, COSTS)
    own = loads.parts[:, :3].sum(axis=1)
    assert loads.tokens.max() <= 12_000
    assert loads.encoder_tokens.max() <= 9000
    if apart:
        assert (llm, encoder) == (own.max(), loads.parts[:, 3].max())
    else:
        assert (llm, encoder) == (int(loads.ticks[0]) - COSTS.fixed, 0)
    assert set(layout.sample_degree.tolist()) <= {1, width}


def test_a_long_sample_is_shared_and_short_ones_stay_whole() -> None:
    tokens = [16_000, *[500] * 16]
    layout = one_microbatch(tokens, [[]] * 17, 8)
    none = np.zeros(0, np.int64)
    _, llm, _ = settle_one(
        layout, 0, layout.order.copy(), np.array(tokens), np.array(tokens, np.float64),
        np.zeros(18, np.int64), none, none, 16_384, 16_384, True, True, COSTS,
    )  # fmt: skip
    assert layout.sample_degree.tolist() == [8] + [1] * 16
    assert sorted((layout.sample_first[1:] - 3).tolist()) == sorted([*range(8)] * 2)
    alone, whole = (sum(sample_ticks(n, d, COSTS)) for n, d in ((16_000, 8), (500, 1)))
    assert llm == alone + 2 * whole + COSTS.linear_rank + latency_ticks(8, COSTS)


def test_no_room_is_said() -> None:
    tokens = np.array([6, 6, 6])
    assert not place_units(
        np.arange(3), tokens, tokens, np.zeros(2, np.int64), 11, np.zeros(3, np.int64)
    )


@given(st.integers(1, 3000), st.integers(1, 40))
def test_no_rank_holds_more_than_the_share(tokens: int, degree: int) -> None:
    fullest = max(cut_tokens(tokens, degree, j) for j in range(degree))
    share = int(shared(tokens, degree))
    assert fullest <= share
    if tokens % degree == 0:
        assert fullest == share
