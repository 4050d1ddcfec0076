"""Which scheme a ring of a run takes: as configured, or the cheapest by the run's costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynapar.attention.prices import Layer, Links, price
from dynapar.attention.select import MARGIN, select
from dynapar.catalog import load_model_shape
from dynapar.costs import Costs, FixedCosts, LinearCosts, MeasuredOn, load_costs
from dynapar.errors import ConfigError
from dynapar.schemes import SchemeRules, Schemes, describe, measured_as, name_all, name_of
from dynapar.shapes import TextShape

TEXT = load_model_shape("qwen2.5-vl-7b").text
COSTS = load_costs(None)
BARE = Costs(
    name="bare",
    measured=True,
    linear=LinearCosts(parameters=1e9, flops=1e12),
    fixed=FixedCosts(microbatch=0.01),
)


def by_price(text: TextShape = TEXT, costs: Costs = COSTS, node: int = 8) -> Schemes:
    return Schemes(text=text, costs=costs, itemsize=2, ranks_per_node=node)


def asked(scheme: str, **more: int) -> Schemes:
    return replace(by_price(), rules=SchemeRules(scheme=scheme, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schemes", "expected"),
    [
        (asked("staged"), ["local", *["staged"] * 7]),
        (asked("ulysses"), ["local", *["ulysses"] * 7]),
        (
            asked("hybrid", share=4),
            [
                *("local", "ulysses", "staged", "ulysses"),
                *("staged", "hybrid 2x3", "staged", "hybrid 4x2"),
            ],
        ),
        (
            asked("hybrid", share=12),
            ["local", *["ulysses"] * 3, "staged", "ulysses", "staged", "hybrid 4x2"],
        ),
        (Schemes(), ["local", *["staged"] * 7]),
        (by_price(costs=BARE), ["local", *["staged"] * 7]),
    ],
)
def test_what_is_configured_holds_at_every_degree(schemes: Schemes, expected: list[str]) -> None:
    for degree, name in enumerate(expected, start=1):
        chosen = schemes.of(range(degree), tokens=64, pairs=64 * 32 * degree, needed=0.75)
        assert (chosen.degree, name_of(degree, chosen.share)) == (degree, name)
        assert chosen == schemes.at(degree)


def test_stages_spread_what_is_between_groups() -> None:
    assert asked("staged", stages=1).at(4).stages == ((1, 2, 3),)
    assert asked("hybrid", share=2, stages=1).at(6).stages == ((1, 2),)
    assert asked("auto", stages=2).of_causal(range(4), 8192).stages == ((1,), (2, 3))


@pytest.mark.parametrize("node", [8, 4, 2])
@pytest.mark.parametrize("degree", [2, 3, 4, 6, 8])
def test_auto_is_the_cheapest_of_all_schemes(node: int, degree: int) -> None:
    """Against the prices of all, spelt out from the cost file's sections."""
    found = set()
    for tokens in (7, 60, 230, 300, 900, 4000, 20000):
        layer = Layer(
            q_heads=28, kv_heads=4, head_dim=128, itemsize=2, tokens=tokens,
            pairs=degree * tokens * (degree * tokens + 1) / 2 / degree,
        )  # fmt: skip
        links = Links(
            nodes=tuple(rank // node for rank in range(2, 2 + degree)),
            flops=3e14, bytes_per_s_in_node=2e11, bytes_per_s_across=4e10, latency=1e-5,
            half_rate_tokens=256,
        )  # fmt: skip
        shares = [u for u in range(1, degree + 1) if degree % u == 0]
        seconds = {}
        for share in shares:
            name = {1: "staged", degree: "ulysses"}.get(share, "hybrid")
            scheme = select(degree, name=name, share=share if name == "hybrid" else None)
            seconds[share] = price(layer, links, share=share, stages=scheme.stages).seconds
        chosen = by_price(node=node).of_causal(range(2, 2 + degree), tokens)
        best = min(seconds.values())
        if chosen.share == 1:
            assert seconds[1] <= best * (1 + MARGIN)
        else:
            assert math.isclose(seconds[chosen.share], best)
            assert seconds[1] > best * (1 + MARGIN)
        found.add(chosen.share)
    assert degree == 2 or len(found) > 1, "the lengths tell schemes apart"


def test_a_ring_that_needs_no_rows_of_others_is_staged() -> None:
    """Samples that are whole on one rank each: staged then sends nothing at all."""
    assert by_price().of(range(4), tokens=32, pairs=600, needed=0.1).share == 4
    assert by_price().of(range(4), tokens=32, pairs=600, needed=0).share == 1


def test_the_choice_needs_figures_of_attention_and_of_the_exchange() -> None:
    assert by_price().priced
    assert not by_price(costs=replace(COSTS, exchange=BARE.exchange)).priced
    assert not by_price(costs=replace(COSTS, attention=BARE.attention)).priced
    assert not replace(by_price(), text=None).priced
    assert not asked("staged").priced


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scheme": "ring"}, r"scheme is 'ring'; expected one of \['auto', 'staged'"),
        ({"scheme": "hybrid"}, r"share is None with scheme 'hybrid'; expected 2 or more ranks"),
        ({"scheme": "hybrid", "share": 1}, r"share is 1 with scheme 'hybrid'; .* Give share"),
        ({"share": 2}, r"share is 2 with scheme 'auto'; expected none, .* set scheme: hybrid"),
        ({"scheme": "staged", "stages": 0}, r"stages is 0; expected 1 or more, or none"),
        ({"scheme": "ulysses", "stages": 2}, r"stages is 2 with scheme 'ulysses'; .* no stages"),
    ],
)
def test_rules_that_cannot_be_say_what_to_do(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchemeRules(**values)  # type: ignore[arg-type]


def test_names() -> None:
    assert [name_of(6, share) for share in (1, 2, 3, 6)] == [
        "staged", "hybrid 2x3", "hybrid 3x2", "ulysses",
    ]  # fmt: skip
    assert name_all(4, (2, 2)) == "hybrid 2x2"
    assert name_all(4, (4, 1)) == "ulysses + staged"


RINGS = [range(degree) for degree in range(1, 5)]


def test_what_a_run_says_of_auto() -> None:
    """The bounds are where the choice changes, to the token."""
    (line,) = describe(by_price(), RINGS, capacity=16384)
    assert line == (
        "attention: auto, the cheapest by costs h100_7b (not measured here): degree 2 staged; "
        "degree 3 ulysses, from 90 tokens a rank staged; "
        "degree 4 ulysses, from 224 tokens a rank staged"
    )
    for ring, bound in ((range(3), 90), (range(4), 224)):
        assert by_price().of_causal(ring, bound - 1).share == len(ring)
        assert by_price().of_causal(ring, bound).share == 1
    line, apart = describe(by_price(), RINGS, capacity=100)
    assert line.endswith("degree 3 ulysses, from 90 tokens a rank staged; degree 4 ulysses")
    assert apart == (
        "attention: plans price rings as staged; by the same costs their attention takes 0.65 "
        "times that at degree 4 (a causal sequence of 100 tokens a rank)"
    )
    (line,) = describe(by_price(costs=BARE), RINGS, capacity=100)
    assert line == (
        "attention: auto, costs bare do not say what moving keys and values costs: degree 2 "
        "staged; degree 3 staged; degree 4 staged"
    )


def test_a_scheme_that_plans_do_not_price_is_said() -> None:
    first, second = describe(asked("ulysses"), RINGS, capacity=16384)
    assert first == (
        "attention: ulysses, as configured: degree 2 ulysses; degree 3 ulysses; degree 4 ulysses"
    )
    assert second == (
        "attention: plans price rings as staged; by the same costs their attention takes 1.03 "
        "times that at degree 2, 1.11 times that at degree 3, 1.02 times that at degree 4 (a "
        "causal sequence of 16,384 tokens a rank)"
    )
    lines = describe(asked("hybrid", share=2), RINGS, capacity=16384)
    assert "at degree 2, " in lines[1]
    assert "at degree 3" not in lines[1], "which is staged"
    lines = describe(replace(asked("ulysses"), costs=BARE), RINGS, capacity=16384)
    assert lines[1].endswith("as staged, by costs bare that do not say what ulysses takes")
    assert len(describe(asked("staged"), RINGS, capacity=16384)) == 1
    lines = describe(asked("staged", stages=1), RINGS, capacity=16384)
    assert "takes 1.0" in lines[1]
    assert "at degree 2" not in lines[1], "one stage either way"


def test_costs_that_were_measured_under_another_scheme_are_said() -> None:
    here = MeasuredOn(hardware="chip", model="abc", precision="float32", versions="torch 9")
    costs = replace(BARE, measured_on=here)
    assert len(describe(by_price(costs=costs), RINGS, capacity=64)) == 1
    lines = describe(replace(asked("ulysses"), costs=costs), RINGS, capacity=64)
    assert lines[2] == (
        "attention: costs bare were measured with rings staged, and these run ulysses: calibrate "
        "again with this configuration"
    )
    same = replace(costs, measured_on=replace(here, attention=measured_as(asked("ulysses").rules)))
    assert len(describe(replace(asked("ulysses"), costs=same), RINGS, capacity=64)) == 1
    assert measured_as(SchemeRules(stages=2)) == "staged, stages 2"
    assert measured_as(SchemeRules(scheme="hybrid", share=4)) == "hybrid in groups of 4"


def test_ranks_without_heads_are_said() -> None:
    text = replace(TEXT, heads=3, kv_heads=1)
    lines = describe(replace(asked("ulysses"), text=text), RINGS, capacity=64)
    assert lines[-1].startswith(
        "attention: the model has 3 query heads, so that in rings of 4 or more some ranks compute"
    )


def test_a_run_without_rings_and_one_of_many_degrees() -> None:
    assert describe(by_price(), RINGS[:1], capacity=64) == [
        "attention: no rings, each sample is on one rank"
    ]
    rings = [range(degree) for degree in (*range(1, 9), 12, 16, 20, 24)]
    (line,) = describe(asked("staged"), rings, capacity=64)
    assert line == (
        "attention: staged, as configured: degree 2 staged; degree 4 staged; degree 8 staged; "
        "degree 16 staged; degree 24 staged; those between alike"
    )
