"""A step dealt by speed is valid, gives a slow rank less, and never ends later than before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan, plan_digest, validate
from dynapar.planner import PlannerConfig, plan_step
from dynapar.planner.speeds import deal_by_speed, paced_makespan
from dynapar.speeds import FULL, predict_ranks

COSTS = load_costs(None)
CLUSTER = Cluster(nodes=1, ranks_per_node=4)
CONFIG = PlannerConfig(capacity=16_384, encoder_capacity=65_536)


def table(n: int, seed: int, longest: int = 40_000) -> SampleTable:
    draw = np.random.default_rng(seed)
    tokens = np.clip(draw.lognormal(7.5, 1.2, n), 16, longest).astype(np.int64)
    units = draw.integers(0, 3, n)
    return SampleTable(
        ids=tuple(f"s{i}" for i in range(n)),
        llm_tokens=tokens,
        text_tokens=tokens,
        label_tokens=tokens - 1,
        modalities=(units > 0).astype(np.uint8),
        unit_offsets=np.concatenate(([0], np.cumsum(units))).astype(np.int64),
        unit_tokens=draw.integers(16, 4000, int(units.sum())),
    )


def planned(n: int, seed: int, longest: int = 40_000) -> StepPlan:
    samples = table(n, seed, longest)
    return plan_step(samples, step=0, cluster=CLUSTER, costs=COSTS, config=CONFIG)


def dealt(plan: StepPlan, speeds: list[int]) -> StepPlan:
    return deal_by_speed(plan, speeds=speeds, cluster=CLUSTER, costs=COSTS, config=CONFIG)


def paced(plan: StepPlan, speeds: list[int]) -> float:
    """The slow obvious way, rounding apart."""
    own = predict_ranks(plan, COSTS)
    place, free = [0] * plan.ranks, [0.0] * plan.ranks
    for micro in plan.microbatches:
        lasts = max(own[rank][place[rank]] * FULL / speeds[rank] for rank in micro.ranks)
        end = max(free[rank] for rank in micro.ranks) + lasts
        for rank in micro.ranks:
            free[rank], place[rank] = end, place[rank] + 1
    return max(free)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 60), st.integers(0, 9), st.lists(st.integers(200, 1000), min_size=4, max_size=4)
)
def test_it_is_valid_and_never_later(n: int, seed: int, speeds: list[int]) -> None:
    plan = planned(n, seed)
    again = dealt(plan, speeds)
    validate(again, COSTS)
    assert paced_makespan(again, COSTS, speeds) <= paced_makespan(plan, COSTS, speeds)
    for each in (plan, again):
        assert paced_makespan(each, COSTS, speeds) == pytest.approx(
            paced(each, speeds) * 1e6, abs=10 * len(each.microbatches)
        )
    assert plan_digest(dealt(plan, speeds)) == plan_digest(again)


def test_a_rank_of_half_speed_gets_half_the_work() -> None:
    """Of what fits one rank: a ring of three of the four ranks cannot avoid the slow one."""
    for seed in range(5):
        plan = planned(120, seed, longest=16_384)
        again = dealt(plan, [FULL, FULL, FULL // 2, FULL])
        work = [sum(own) for own in predict_ranks(again, COSTS)]
        others = (sum(work) - work[2]) / 3
        assert 0.4 <= work[2] / others <= 0.6
        # Three ranks and a half do what four did: a seventh more time at best.
        assert paced(again, [FULL, FULL, FULL // 2, FULL]) <= 1.16 * plan.makespan / 1e6


def test_equal_speeds_leave_the_plan_alone() -> None:
    plan = planned(20, 0)
    assert dealt(plan, [FULL] * 4) is plan
    assert paced_makespan(plan, COSTS, [FULL] * 4) == plan.makespan
