import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.attention.shards import LAYOUTS, Layout, cut, cut_tokens, index

layouts = st.sampled_from(LAYOUTS)


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], int, list[list[int]] | None]:
    """Lengths, a degree, and the positions of each sequence."""
    degree = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 40), max_size=6))
    if draw(st.booleans()):
        return lengths, degree, None
    everyone = list(range(degree))
    some = st.permutations(everyone).flatmap(lambda p: st.integers(1, degree).map(lambda n: p[:n]))
    return lengths, degree, [draw(some) for _ in lengths]


@given(packs(), layouts)
def test_every_token_is_held_once_in_order(
    pack: tuple[list[int], int, list[list[int]] | None], layout: Layout
) -> None:
    lengths, degree, positions = pack
    spans = cut(lengths, degree=degree, positions=positions, layout=layout)
    held = [index(spans, lengths, position) for position in range(degree)]
    assert sorted(np.concatenate(held).tolist()) == list(range(sum(lengths)))
    for position, rows in enumerate(held):
        assert (np.diff(rows) > 0).all()
        assert len(rows) == spans.tokens[position]


@given(packs(), layouts)
def test_a_position_that_does_not_share_a_sequence_holds_none_of_it(
    pack: tuple[list[int], int, list[list[int]] | None], layout: Layout
) -> None:
    lengths, degree, positions = pack
    spans = cut(lengths, degree=degree, positions=positions, layout=layout)
    shared = positions or [list(range(degree))] * len(lengths)
    for position, sequence in zip(spans.position, spans.sequence, strict=True):
        assert position in shared[sequence]


@given(st.lists(st.integers(1, 500), max_size=8), st.integers(1, 16), layouts)
def test_cut_tokens_is_what_cut_gives(lengths: list[int], degree: int, layout: Layout) -> None:
    tokens = cut_tokens(lengths, degree, layout)
    assert tokens.shape == (len(lengths), degree)
    assert (tokens.sum(0) == cut(lengths, degree=degree, layout=layout).tokens).all()


@given(st.integers(1, 4000), st.integers(1, 16), layouts)
def test_shards_of_a_sequence_are_even(length: int, degree: int, layout: Layout) -> None:
    tokens = cut_tokens(length, degree, layout)
    assert tokens.max() - tokens.min() <= 2
    assert tokens.sum() == length


def test_zigzag_is_per_sequence() -> None:
    spans = cut([8, 8], degree=2)
    assert index(spans, [8, 8], 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert index(spans, [8, 8], 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def test_zigzag_of_an_odd_length_on_three() -> None:
    spans = cut([10], degree=3)
    assert [index(spans, [10], p).tolist() for p in range(3)] == [
        [0, 8, 9],
        [1, 2, 6, 7],
        [3, 4, 5],
    ]


def test_contiguous_and_positions_in_their_own_order() -> None:
    spans = cut([5, 4], degree=3, positions=[[2, 0], [1]], layout="contiguous")
    assert [index(spans, [5, 4], p).tolist() for p in range(3)] == [
        [2, 3, 4],
        [5, 6, 7, 8],
        [0, 1],
    ]


def test_short_sequences_leave_a_position_empty() -> None:
    assert cut([1, 2, 3], degree=4).tokens.tolist() == [3, 0, 2, 1]


@pytest.mark.parametrize(
    ("lengths", "degree", "positions", "layout", "message"),
    [
        ([3, 0], 2, None, "zigzag", r"lengths\[1\] is 0; expected 1 or more: leave empty"),
        ([3], 0, None, "zigzag", "degree is 0; expected 1 or more: count the ranks"),
        ([3], 2, None, "striped", r"layout is 'striped'; expected one of \['zigzag', 'contig"),
        ([3], 2, [[0], [1]], "zigzag", "positions has 2 entries for 1 sequences; expected one"),
        ([3], 2, [[0, 2]], "zigzag", r"positions\[0\] is \[0, 2\]; expected one or more different"),
        ([3], 2, [[1, 1]], "zigzag", r"positions\[0\] is \[1, 1\]; expected one or more different"),
        ([3], 2, [[]], "zigzag", r"positions\[0\] is \[\]; expected one or more different"),
    ],
)
def test_impossible_cuts_are_named(
    lengths: list[int],
    degree: int,
    positions: list[list[int]] | None,
    layout: Layout,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        cut(lengths, degree=degree, positions=positions, layout=layout)
