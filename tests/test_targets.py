"""A target's price reaches every plan, through the reach that the kernels count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import (
    AttentionCosts,
    Costs,
    FixedCosts,
    LinearCosts,
    OutputCosts,
    coefficients,
    costs_from_json,
    costs_to_json,
    load_costs,
)
from dynapar.errors import CostsError
from dynapar.memory import POLICIES, costs_under
from dynapar.packing.ticks import sample_columns
from dynapar.plan import validate
from dynapar.planner import PlannerConfig, plan_step
from tests.samples import table

TARGET = 8 * 5e5 / 1e9
"""Seconds of a target."""
PLAIN = Costs(
    name="plain",
    measured=True,
    linear=LinearCosts(parameters=1e6, flops=1e10),
    attention=AttentionCosts(layers=4, hidden=64, flops=1e9, half_rate_tokens=32),
    fixed=FixedCosts(microbatch=0.004),
)
COSTS = replace(PLAIN, name="targets", output=OutputCosts(parameters=5e5, flops=1e9))
SAMPLES = replace(
    table([400, 400, 900, 30], [[], [], [], []]), label_tokens=np.array([399, 10, 450, 0])
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_targets_cost_what_the_file_says_shared_by_the_ranks(policy: str, degree: int) -> None:
    plain, costs = costs_under(PLAIN, policy), costs_under(COSTS, policy)  # type: ignore[arg-type]
    columns = [
        sample_columns(
            SAMPLES.llm_tokens,
            degree,
            coefficients(own, ranks_per_node=4),
            reach=SAMPLES.reach_under(own),
        ).sum(axis=1)
        for own in (plain, costs)
    ]
    expected = 1e6 * TARGET * SAMPLES.label_tokens / degree
    assert np.abs(columns[1] - columns[0] - expected).max() <= 1


def test_a_plan_counts_targets_and_is_valid_by_the_same_costs() -> None:
    config = PlannerConfig(capacity=1000, encoder_capacity=10)
    cluster = Cluster.parse("1x2")
    plain = plan_step(SAMPLES, step=0, cluster=cluster, costs=PLAIN, config=config)
    plan = plan_step(SAMPLES, step=0, cluster=cluster, costs=COSTS, config=config)
    validate(plan, COSTS)
    more = 1e6 * TARGET * SAMPLES.label_tokens.sum()
    least, most = plain.makespan + more / 2 - 5, plain.makespan + more + 5
    assert least <= plan.makespan <= most


def test_costs_without_targets_change_nothing() -> None:
    reference = load_costs(None)
    assert np.array_equal(SAMPLES.reach_under(reference), SAMPLES.reach)
    assert costs_from_json(costs_to_json(COSTS)) == COSTS


def test_targets_need_attention_to_be_counted_by() -> None:
    with pytest.raises(CostsError, match=r"output.parameters is 500000 without attention; expect"):
        replace(COSTS, attention=AttentionCosts())
