from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynapar.packing.bins import place_units
from dynapar.packing.moldable import dealt_tokens, shared
from dynapar.packing.ticks import cut_tokens


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


def test_units_go_dearest_first_to_the_lightest_rank() -> None:
    tokens, load = np.array([5, 9, 7, 3]), np.array([4, 0, 0])
    position = np.zeros(4, np.int64)
    assert place_units(np.arange(4), tokens, tokens, load, 100, position)
    # 9 to rank 1, 7 to rank 2, 5 to rank 0 (4), 3 to rank 2 (7).
    assert position.tolist() == [0, 1, 2, 2]


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
