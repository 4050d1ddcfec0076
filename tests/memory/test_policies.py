from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.costs import Costs, HostCosts, coefficients, load_costs
from dynapar.errors import ConfigError
from dynapar.memory import POLICIES, Policy, costs_under, parse_policies, transfer_price
from dynapar.packing.ticks import Coefficients, sample_ticks, unit_ticks

COSTS = load_costs(None)


def test_full_repeats_the_forward_pass_of_everything() -> None:
    none, full = (
        coefficients(costs_under(COSTS, policy), ranks_per_node=8) for policy in ("none", "full")
    )
    assert full.linear_token == pytest.approx(none.linear_token * 4 / 3)
    assert full.attention_pair == pytest.approx(none.attention_pair * 4.5 / 3.5)
    assert full.wire_in_node == pytest.approx(none.wire_in_node * 4 / 3)
    assert full.hop == pytest.approx(none.hop * 4 / 3)
    assert full.encoder_token == pytest.approx(none.encoder_token * 4 / 3)
    assert full.encoder_square == pytest.approx(none.encoder_square * 4.5 / 3.5)
    assert (full.fixed, full.llm_floor) == (none.fixed, none.llm_floor)


def test_selective_repeats_neither_attention_nor_its_exchange() -> None:
    none, kept = (
        coefficients(costs_under(COSTS, policy), ranks_per_node=8)
        for policy in ("none", "selective")
    )
    assert kept.linear_token == pytest.approx(none.linear_token * 4 / 3)
    same = ("attention_pair", "wire_in_node", "wire_across", "hop", "encoder_square")
    assert all(getattr(kept, name) == pytest.approx(getattr(none, name)) for name in same)


def test_offload_waits_for_both_ways() -> None:
    kept = costs_under(COSTS, "full")
    away = costs_under(
        COSTS, "offload", token_bytes=1e6, encoder_token_bytes=1e5, host_bytes_per_s=2e10
    )
    more = [coefficients(costs, ranks_per_node=8) for costs in (kept, away)]
    assert more[1].linear_token - more[0].linear_token == pytest.approx(2e6 / 2e10 * 1e6)
    assert more[1].encoder_token - more[0].encoder_token == pytest.approx(2e5 / 2e10 * 1e6)


def test_a_frozen_encoder_repeats_nothing() -> None:
    assert costs_under(COSTS, "full", encoder_trained=False).encoder == COSTS.encoder


@given(
    policy=st.integers(1, len(POLICIES) - 1),
    tokens=st.integers(1, 200_000),
    degree=st.integers(1, 64),
    slow=st.floats(0.01, 100.0),
)
def test_no_sample_gets_cheaper_from_a_policy_to_the_next(
    policy: int, tokens: int, degree: int, slow: float
) -> None:
    """What makes the bound under "none" a bound for all plans of a budget."""
    exchange = replace(
        COSTS.exchange,
        bytes_per_s_in_node=COSTS.exchange.bytes_per_s_in_node / slow,
        bytes_per_s_across=COSTS.exchange.bytes_per_s_across / slow,
    )
    costs = replace(COSTS, exchange=exchange)
    before, after = (_coefficients(costs, POLICIES[place]) for place in (policy - 1, policy))
    old, new = sample_ticks(tokens, degree, before), sample_ticks(tokens, degree, after)
    assert all(a <= b for a, b in zip(old, new, strict=True))
    assert unit_ticks(tokens, before) <= unit_ticks(tokens, after)


def _coefficients(costs: Costs, policy: Policy) -> Coefficients:
    return coefficients(costs_under(costs, policy, token_bytes=1000.0), ranks_per_node=8)


def test_policies_are_read_in_their_own_order() -> None:
    assert parse_policies("full, none,full") == ("none", "full")
    with pytest.raises(ConfigError, match="recompute is 'some'; expected some of none, selective"):
        parse_policies("none,some")
    with pytest.raises(ConfigError, match="recompute names no policy; expected some of none"):
        parse_policies(())


def test_the_price_of_transfer_is_named() -> None:
    assert "25 GB/s, which is assumed: dynapar calibrate measures it" in transfer_price(COSTS)
    measured = replace(COSTS, host=HostCosts(bytes_per_s=8e9))
    assert transfer_price(measured) == "offload is priced by 8 GB/s, as measured"
