"""Heads over groups, against counting them one by one."""

import math

from hypothesis import given
from hypothesis import strategies as st

from dynapar.attention.heads import Heads, kv_is_shared, share_heads


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 30))
def test_heads_are_shared_evenly_and_whole(kv_heads: int, each: int, members: int) -> None:
    shares = share_heads(kv_heads * each, kv_heads, members)
    assert len(shares) == members
    held = [list(range(*share.q)) for share in shares]
    assert [head for heads in held for head in heads] == list(range(kv_heads * each))
    assert max(map(len, held)) == math.ceil(kv_heads * each / members)
    for heads, share in zip(held, shares, strict=True):
        read = [head // each for head in heads]
        assert list(range(*share.kv)) == sorted(set(read))
        assert (share.q_heads, share.kv_heads) == (len(heads), len(set(read)))
        given_to_kernel = [
            kv
            for kv, count in zip(
                range(*share.kv), share.repeats or (1,) * share.kv_heads, strict=True
            )
            for _ in range(count)
        ]
        # As kernels read them: equally many query heads for each.
        if heads:
            alike = len(heads) // len(given_to_kernel)
            assert read == [kv for kv in given_to_kernel for _ in range(alike)]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12))
def test_shared_key_heads_are_known(kv_heads: int, each: int, members: int) -> None:
    shares = share_heads(kv_heads * each, kv_heads, members)
    read = [kv for share in shares for kv in range(*share.kv)]
    assert kv_is_shared(shares) == (len(read) != len(set(read)))


def test_key_heads_are_cut_only_where_the_busiest_member_gains() -> None:
    whole = [share.q for share in share_heads(8, 2, 2)]
    assert whole == [(0, 4), (4, 8)]
    # 6 heads is the least for the busiest of 6; cuts by 2 leave each key/value head in 2 parts.
    assert [share.q[0] for share in share_heads(32, 8, 6)] == [0, 4, 10, 16, 20, 26]
    assert share_heads(12, 4, 3)[0] == Heads(q=(0, 4), kv=(0, 2), repeats=(3, 1))


def test_more_members_than_heads_leave_some_without() -> None:
    shares = share_heads(2, 1, 5)
    assert [share.q_heads for share in shares] == [0, 0, 1, 0, 1]
    assert [share.kv for share in shares] == [(0, 0), (0, 0), (0, 1), (0, 0), (0, 1)]
