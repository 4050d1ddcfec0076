import dataclasses

import pytest

from dynapar.attention.prices import Layer, Links, price
from dynapar.attention.select import MARGIN, SCHEMES, Scheme, select
from dynapar.costs import load_costs

LLAMA = Layer(q_heads=32, kv_heads=8, head_dim=128, itemsize=2, tokens=16384, pairs=16384 * 32768.0)
"""8 ranks of a causal sequence of 131,072 tokens."""
NODE = Links(
    nodes=(0,) * 8,
    flops=5e14,
    bytes_per_s_in_node=2e11,
    bytes_per_s_across=5e10,
    latency=1e-5,
    half_rate_tokens=256,
)


def test_each_group_is_a_stage_by_default() -> None:
    assert select(4).stages == ((1,), (2,), (3,))
    assert select(4).name == "staged"
    assert select(12, name="hybrid", share=4).stages == ((1,), (2,))


def test_stages_spread_the_rounds() -> None:
    assert select(4, stages=1).stages == ((1, 2, 3),)
    assert select(6, stages=2).stages == ((1, 2), (3, 4, 5))
    assert select(3, stages=9).stages == ((1,), (2,))
    assert select(12, name="hybrid", share=3, stages=1).stages == ((1, 2, 3),)
    assert select(6).in_stages(2) == select(6, stages=2)


@pytest.mark.parametrize("name", ["auto", *SCHEMES[:3]])
def test_degree_1_is_local_whatever_is_asked_for(name: str) -> None:
    assert select(1, name=name) == Scheme(name="local", stages=())


def test_a_scheme_knows_its_positions() -> None:
    for degree, name, share in (
        (5, "staged", None), (5, "ulysses", None), (6, "hybrid", 2), (6, "hybrid", 3)
    ):  # fmt: skip
        scheme = select(degree, name=name, share=share)
        assert (scheme.name, scheme.degree) == (name, degree)
        assert scheme.share == {"staged": 1, "ulysses": degree}.get(name, share)


def test_what_does_not_exist_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"'ring' was asked for at degree 4: it does not exist; .*'staged'"
    ):
        select(4, name="ring")


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="'local' was asked for at degree 2: it does not fit"):
        select(2, name="local")
    with pytest.raises(ValueError, match=r"degree 6 with share 4; expected a divisor .* \[2, 3\]"):
        select(6, name="hybrid", share=4)
    with pytest.raises(ValueError, match=r"degree 7 with share None; .* \[\]: use 'ulysses'"):
        select(7, name="hybrid")
    with pytest.raises(ValueError, match=r"share is 2 for attention scheme 'ulysses'; expected No"):
        select(4, name="ulysses", share=2)
    with pytest.raises(ValueError, match=r"without share, layer and links; .* one of \[2, 4\]"):
        select(8, name="hybrid")


def test_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stages is 0; expected 1 or more: use None"):
        select(2, stages=0)


def test_a_prime_degree_has_no_hybrid_and_needs_none() -> None:
    assert select(7).name == "staged"
    assert select(7, name="ulysses").share == 7


def seconds(layer: Layer, scheme: Scheme) -> float:
    return price(layer, NODE, share=scheme.share, stages=scheme.stages).seconds


def choice(layer: Layer, links: Links) -> Scheme:
    return select(len(links.nodes), layer=layer, links=links)


def test_the_choice_is_the_cheapest() -> None:
    for tokens in (16, 512, 8192):
        layer = dataclasses.replace(LLAMA, tokens=tokens, pairs=tokens * tokens * 4.0)
        chosen = choice(layer, NODE)
        others = [
            select(8, name=name, share=share)
            for name, share in (
                ("staged", None), ("ulysses", None), ("hybrid", 2), ("hybrid", 4)
            )
        ]  # fmt: skip
        least = min(seconds(layer, other) for other in others)
        assert seconds(layer, chosen) <= least * (1 + MARGIN * (chosen.name == "staged"))
        assert seconds(layer, chosen) * (1 + MARGIN) <= seconds(layer, others[0]) or (
            chosen.name == "staged"
        )


def test_long_rows_of_few_key_heads_are_staged() -> None:
    """All messages hide behind compute, and nothing hides a trade."""
    assert choice(LLAMA, NODE).name == "staged"
    forward = price(LLAMA, NODE, share=1, stages=select(8).stages)
    assert forward.waiting < 0.02 * forward.seconds


def test_many_key_heads_and_short_rows_go_by_ulysses() -> None:
    """Each head has keys of its own: the staged exchange moves 0.375 * d as many bytes."""
    layer = dataclasses.replace(LLAMA, kv_heads=32, tokens=512, pairs=512 * 1024.0)
    assert choice(layer, NODE).name == "ulysses"


def test_rings_over_slow_links_are_hybrid_with_groups_inside_a_node() -> None:
    layer = dataclasses.replace(LLAMA, kv_heads=32, tokens=512, pairs=512 * 1024.0)
    links = dataclasses.replace(NODE, nodes=(0,) * 4 + (1,) * 4, bytes_per_s_across=5e9)
    chosen = choice(layer, links)
    assert (chosen.name, chosen.share) == ("hybrid", 4)


def test_without_figures_the_choice_is_staged() -> None:
    assert select(8).name == "staged"
    assert select(8, layer=LLAMA).name == "staged"
    assert select(8, links=NODE).name == "staged"


def test_hybrid_without_a_share_takes_the_cheapest() -> None:
    chosen = select(8, name="hybrid", layer=LLAMA, links=NODE)
    other = select(8, name="hybrid", share=6 - chosen.share)
    assert seconds(LLAMA, chosen) <= seconds(LLAMA, other)


@pytest.mark.parametrize(
    ("nodes", "tokens", "expected"),
    [
        ((0, 0), 16, ("staged", 1)),
        ((0,) * 4, 200, ("ulysses", 4)),
        ((0,) * 4, 240, ("staged", 1)),
        ((0,) * 8, 150, ("ulysses", 8)),
        ((0,) * 8, 300, ("hybrid", 4)),
        ((0,) * 8, 440, ("hybrid", 2)),
        ((0,) * 8, 480, ("staged", 1)),
        ((0,) * 4 + (1,) * 4, 800, ("hybrid", 4)),
        ((0,) * 4 + (1,) * 4, 1200, ("staged", 1)),
        ((0,) * 8 + (1,) * 8, 1200, ("hybrid", 4)),
        ((0,) * 8 + (1,) * 8, 1500, ("staged", 1)),
        ((0,) * 8 + (1,) * 8, 100_000, ("staged", 1)),
    ],
)
def test_under_the_reference_costs(
    nodes: tuple[int, ...], tokens: int, expected: tuple[str, int]
) -> None:
    """28 query heads and 4 key/value heads, causal: rows a rank from which staged is taken."""
    costs = load_costs(None)
    links = Links(
        nodes=nodes,
        flops=costs.attention.flops,
        bytes_per_s_in_node=costs.exchange.bytes_per_s_in_node,
        bytes_per_s_across=costs.exchange.bytes_per_s_across,
        latency=costs.exchange.latency,
        half_rate_tokens=costs.attention.half_rate_tokens,
    )
    layer = Layer(
        q_heads=28, kv_heads=4, head_dim=128, itemsize=2, tokens=tokens,
        pairs=tokens * tokens * len(nodes) / 2,
    )  # fmt: skip
    chosen = choice(layer, links)
    assert (chosen.name, chosen.share) == expected
