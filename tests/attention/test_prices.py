"""The formula against itself by hand, and against the rules that its source derives from it."""

import dataclasses

import pytest

from dynapar.attention.prices import BACKWARD, Layer, Links, Price, price, staged_bytes
from dynapar.attention.select import select

FREE = Links(nodes=(0,), flops=1.0, bytes_per_s_in_node=1e30, bytes_per_s_across=1e30)
"""Computing counts alone: a FLOP a second."""
LAYER = Layer(q_heads=8, kv_heads=2, head_dim=64, itemsize=2, tokens=100, pairs=5000)


def on(links: Links, *nodes: int) -> Links:
    return dataclasses.replace(links, nodes=nodes)


def priced(layer: Layer, links: Links, name: str, share: int | None = None) -> Price:
    scheme = select(len(links.nodes), name=name, share=share)
    return price(layer, links, share=scheme.share, stages=scheme.stages)


def test_bytes_count_keys_and_values() -> None:
    assert staged_bytes(100, kv_heads=2, head_dim=64, itemsize=2) == 51_200


def test_compute_is_the_same_by_every_scheme_that_cuts_evenly() -> None:
    flops = 4 * 5000 * 8 * 64
    for name, share in (("staged", None), ("ulysses", None), ("hybrid", 2)):
        assert priced(LAYER, on(FREE, *[0] * 4), name, share).seconds == pytest.approx(
            (1 + BACKWARD) * flops
        )
    # 8 heads over 3 members: the busiest has 3 of 2.67.
    assert priced(LAYER, on(FREE, 0, 0, 0), "ulysses").seconds == pytest.approx(
        (1 + BACKWARD) * flops * 3 / (8 / 3)
    )


def test_few_rows_compute_slower_unless_a_group_joins_them() -> None:
    links = on(dataclasses.replace(FREE, half_rate_tokens=100), 0, 0)
    flops = 4 * 5000 * 8 * 64
    assert priced(LAYER, links, "staged").seconds == pytest.approx(3.5 * flops * 2)
    assert priced(LAYER, links, "ulysses").seconds == pytest.approx(3.5 * flops * 1.5)


def test_two_ranks_by_hand() -> None:
    """Slow links, free compute: 100 rows of 2 key heads of 64 numbers of 2 bytes."""
    links = Links(
        nodes=(0, 0), flops=1e30, bytes_per_s_in_node=1.0, bytes_per_s_across=1.0, latency=7.0
    )
    kv = 0.75 * 2 * 100 * 2 * 64 * 2
    staged = priced(LAYER, links, "staged")
    assert staged.bytes == 3 * kv
    assert staged.exchanges == 3
    assert staged.seconds == pytest.approx(3 * (kv + 7), rel=1e-12)
    assert staged.waiting == pytest.approx(staged.seconds)
    ulysses = priced(LAYER, links, "ulysses")
    # Half of the heads: 4 of q and 1 of k and v. In, out and lse; q, k, v, out, grad and lse; back.
    numbers = (4 + 2) + 4 + (3 * 4 + 2) + (4 + 2)
    assert ulysses.bytes == 100 * (numbers * 64 * 2 + 2 * 4 * 4)
    assert ulysses.exchanges == 4
    assert ulysses.seconds == pytest.approx(ulysses.bytes + 4 * 7, rel=1e-12)


def test_gradients_that_are_yet_to_be_added_travel_wide() -> None:
    """1 key head for 2 members: its gradients have 4 bytes a number."""
    links = on(FREE, 0, 0)
    layer = dataclasses.replace(LAYER, kv_heads=1)
    numbers = (4 + 2) + 4 + (3 * 4 + 2) + 4
    expected = 100 * (numbers * 64 * 2 + 2 * 64 * 4 + 2 * 4 * 4)
    assert priced(layer, links, "ulysses").bytes == expected


def test_forward_bytes_compare_as_the_source_says() -> None:
    """staged / ulysses forward = c * d * Hk / (Hq + Hk), and backward twice forward by both."""
    links = on(FREE, *[0] * 4)
    layer = dataclasses.replace(LAYER, q_heads=32, kv_heads=8, head_dim=1 << 20, needed=0.75)
    ratio = priced(layer, links, "staged").bytes / priced(layer, links, "ulysses").bytes
    assert ratio == pytest.approx(0.75 * 4 * 8 / (32 + 8), rel=1e-5)


@pytest.mark.parametrize(("rate", "hidden"), [(2e11, 1250), (5e10, 5000)])
def test_staged_exchange_is_hidden_from_some_rows_on(rate: float, hidden: int) -> None:
    """n >= Hk * e * F / (Hq * B): all but the last gradients then travel while others compute."""
    links = Links(nodes=(0,) * 8, flops=5e14, bytes_per_s_in_node=rate, bytes_per_s_across=rate)
    waits = []
    for tokens in (hidden * 0.9, hidden * 1.1):
        layer = dataclasses.replace(
            LAYER, q_heads=32, kv_heads=8, head_dim=128, tokens=tokens, pairs=tokens * tokens * 4,
            needed=1.0,
        )  # fmt: skip
        last = 2 * tokens * 8 * 128 * 2 / rate
        waits.append((priced(layer, links, "staged").waiting - last) / last)
    # Forward and all windows of backward but two that carry less; the rows take 1 / 0.9 of compute.
    assert waits[0] > 0.1
    assert waits[1] == pytest.approx(0.0, abs=1e-9)


def test_links_across_nodes_count_where_they_are_used() -> None:
    links = Links(nodes=(0, 0, 1, 1), flops=1e30, bytes_per_s_in_node=1e3, bytes_per_s_across=1.0)
    kv = 0.75 * 2 * 100 * 2 * 64 * 2
    # Some rank reaches across in each of 3 rounds.
    assert priced(LAYER, links, "staged").seconds == pytest.approx(3 * 3 * kv)
    # Groups inside nodes: 2 rows' worth of 1 key head, once, and trades a thousand times as fast.
    assert priced(LAYER, links, "hybrid", 2).seconds == pytest.approx(3 * kv, rel=0.01)
    crossed = dataclasses.replace(links, nodes=(0, 1, 0, 1))
    assert priced(LAYER, crossed, "hybrid", 2).seconds > 1.5 * 3 * kv


def test_nodes_of_other_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="has nodes of 2 positions for a scheme of 4; expected on"):
        price(LAYER, on(FREE, 0, 0), share=4, stages=())
