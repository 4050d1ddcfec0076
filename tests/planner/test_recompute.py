"""Recompute policies are chosen within the bytes, and never at the cost of a longer step."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.costs import HostCosts, load_costs
from dynapar.errors import PlanError
from dynapar.memory import (
    POLICIES,
    MemoryLimits,
    MemoryModel,
    Piece,
    Policy,
    PolicyLimits,
    costs_under,
    memory_limits,
    parse_bytes,
)
from dynapar.meta import IntArray, SampleTable
from dynapar.packing.ticks import Layout
from dynapar.plan import StepPlan, Sync, plan_digest, validate
from dynapar.planner import PlannerConfig, homogeneous_plan, plan_step, random_plan
from dynapar.planner.recompute import cheapest, relaxed
from dynapar.workloads import draw
from tests.samples import table

COSTS = load_costs(None)
CLUSTER = Cluster(nodes=1, ranks_per_node=8)
POLICY_BYTES: dict[Policy, tuple[int, int]] = {
    "none": (100, 10),
    "selective": (40, 4),
    "full": (20, 2),
}
"""Of a token and of an encoder token."""


def budget(tokens: int, *policies: Policy) -> MemoryLimits:
    """One in which "none" holds so many tokens."""
    whole = tokens * 140 + 1000
    return MemoryLimits(
        budget=whole,
        policies=tuple(
            PolicyLimits(
                policy=policy,
                pieces=(Piece(1000, *POLICY_BYTES[policy]),),
                capacity=(whole - 1000) // (POLICY_BYTES[policy][0] + 4 * POLICY_BYTES[policy][1]),
                encoder_capacity=4
                * ((whole - 1000) // (POLICY_BYTES[policy][0] + 4 * POLICY_BYTES[policy][1])),
            )
            for policy in policies or tuple(POLICY_BYTES)
        ),
    )


def planned(
    samples: SampleTable, memory: MemoryLimits, sync: Sync = "step", **more: object
) -> StepPlan:
    config = PlannerConfig(capacity=1, encoder_capacity=1, sync=sync, memory=memory, **more)  # type: ignore[arg-type]
    plan = plan_step(samples, step=0, cluster=CLUSTER, costs=COSTS, config=config)
    validate(plan, COSTS)
    return plan


steps = st.builds(
    lambda lengths, units: table(
        lengths, [units if n % 3 == 0 else [] for n in range(len(lengths))]
    ),
    st.lists(st.integers(16, 40_000), min_size=1, max_size=24),
    st.lists(st.integers(16, 4_000), max_size=4),
)


@settings(max_examples=12)
@given(samples=steps, tokens=st.integers(6_000, 40_000), lockstep=st.booleans())
def test_no_single_policy_is_shorter(samples: SampleTable, tokens: int, lockstep: bool) -> None:
    sync: Sync = "microbatch" if lockstep else "step"
    plan = planned(samples, budget(tokens), sync)
    assert plan.lower_bound <= plan.makespan
    for policy in POLICY_BYTES:
        try:
            alone = planned(samples, budget(tokens, policy), sync)
        except PlanError:
            continue
        assert plan.makespan <= alone.makespan
        # And its bound is one of this plan's problem, too.
        assert plan.lower_bound <= alone.makespan
    if plan.homogeneous_degree:
        assert plan.makespan <= plan.homogeneous_makespan


@settings(max_examples=24)
@given(
    samples=steps,
    seed=st.integers(0, 1000),
    tokens=st.integers(3_000, 40_000),
    fixed=st.sampled_from([0.001, 0.03, 0.5]),
    lockstep=st.booleans(),
)
def test_the_bound_is_below_any_plan_of_the_budget(
    samples: SampleTable, seed: int, tokens: int, fixed: float, lockstep: bool
) -> None:
    """Also with two moments that may be the peak, and where fixed times are what counts."""
    memory = two_moments(budget(tokens))
    costs = replace(COSTS, fixed=replace(COSTS.fixed, microbatch=fixed))
    config = PlannerConfig(
        capacity=1,
        encoder_capacity=1,
        memory=memory,
        sync="microbatch" if lockstep else "step",
    )
    try:
        plan = plan_step(samples, step=0, cluster=CLUSTER, costs=costs, config=config)
        wild = random_plan(samples, seed=seed, step=0, cluster=CLUSTER, costs=costs, config=config)
    except PlanError:
        return
    for each in (plan, wild):
        validate(each, costs)
        assert plan.lower_bound <= each.makespan


def two_moments(memory: MemoryLimits) -> MemoryLimits:
    """The same budget with another moment, at which encoder tokens count more."""
    policies = []
    for limits in memory.policies:
        other = Piece(5_000, limits.pieces[0].token // 2, 30)
        most = (memory.budget - other.fixed) // (other.token + 4 * other.encoder_token)
        capacity = min(limits.capacity, most)
        policies.append(
            replace(
                limits,
                pieces=(*limits.pieces, other),
                capacity=capacity,
                encoder_capacity=4 * capacity,
            )
        )
    return replace(memory, policies=tuple(policies))


def test_the_bound_knows_what_bytes_make_necessary() -> None:
    """Video in 80 GB, in waves: what keeps everything holds so little that it waits for weights."""
    model = MemoryModel(
        shape=load_model_shape("qwen2.5-vl-7b"), sharding="full", ranks=CLUSTER.ranks
    )
    memory = memory_limits(
        model, memory=parse_bytes("80GB"), policies=("none", "selective", "full")
    )
    samples = draw("video", 64, seed=0, longest=65_536)
    assert planned(samples, memory, "microbatch").gap <= 0.12


@settings(max_examples=12)
@given(samples=steps, tokens=st.integers(6_000, 40_000))
def test_each_microbatch_has_the_cheapest_policy_that_fits(
    samples: SampleTable, tokens: int
) -> None:
    memory = budget(tokens)
    plan = planned(samples, memory)
    for micro in plan.microbatches:
        for policy in POLICIES[: POLICIES.index(micro.recompute)]:
            token, encoder = POLICY_BYTES[policy]
            loads = zip(micro.tokens_per_rank, micro.encoder_tokens_per_rank, strict=True)
            assert max(1000 + token * a + encoder * b for a, b in loads) > memory.budget


def test_a_budget_of_one_policy_that_always_fits_is_the_plan_without_one() -> None:
    samples = draw("video", 48, seed=3, longest=60_000)
    own = budget(16_000, "none").policies[0]
    roomy = replace(own, pieces=(Piece(0, 1, 1),))
    memory = MemoryLimits(budget=1 << 40, policies=(roomy,))
    found = planned(samples, memory)
    plain = plan_step(
        samples,
        step=0,
        cluster=CLUSTER,
        costs=COSTS,
        config=PlannerConfig(capacity=own.capacity, encoder_capacity=own.encoder_capacity),
    )
    assert found.columns == plain.columns
    assert found.makespan == plain.makespan


def test_a_uniform_policy_is_planned_by_its_own_costs() -> None:
    samples = table([9000, 700, 5000, 3000, 1200, 50], [[]] * 6)
    memory = replace(budget(4_000, "full"), budget=1 << 40)
    found = planned(samples, memory)
    config = PlannerConfig(capacity=found.capacity, encoder_capacity=found.encoder_capacity)
    own = plan_step(
        samples, step=0, cluster=CLUSTER, costs=costs_under(COSTS, "full"), config=config
    )
    assert found.makespan == own.makespan
    assert set(found.columns.recompute.tolist()) == {POLICIES.index("full")}


def test_recompute_pays_where_memory_is_short_and_not_where_it_is_not() -> None:
    """One sample of 60,000 tokens needs more than 8 ranks hold that keep everything; the others
    do not, and are packed as tightly as that allows."""
    samples = draw("burst", 48, seed=0, longest=60_000)
    short, ample = planned(samples, budget(3_000)), planned(samples, budget(60_000))
    assert not ample.columns.recompute.any()
    long = int(np.argmax(samples.llm_tokens))
    again = [micro for micro in short.microbatches if micro.recompute != "none"]
    assert [[place.sample for place in micro.placements] for micro in again] == [[long]]
    with pytest.raises(PlanError, match="has 60,000 tokens; 8 ranks x capacity 4,199 hold"):
        planned(samples, budget(3_000, "none"))
    alone = [planned(samples, budget(3_000, policy)) for policy in ("selective", "full")]
    assert short.makespan * 1.05 < min(plan.makespan for plan in alone)


def test_homogeneous_and_random_plans_keep_to_the_budget() -> None:
    samples = draw("video", 48, seed=1, longest=60_000)
    config = PlannerConfig(capacity=1, encoder_capacity=1, memory=budget(9_000))
    single = homogeneous_plan(
        samples, degree=None, step=0, cluster=CLUSTER, costs=COSTS, config=config
    )
    wild = random_plan(samples, seed=0, step=0, cluster=CLUSTER, costs=COSTS, config=config)
    for plan in (single, wild):
        validate(plan, COSTS)
        assert plan.memory is not None
    assert single.degrees == (single.homogeneous_degree,)
    assert planned(samples, budget(9_000)).makespan <= single.makespan


def test_plans_are_the_same_twice_and_hold_in_a_real_model() -> None:
    model = MemoryModel(shape=load_model_shape("qwen2.5-vl-7b"), sharding="gathered", ranks=8)
    memory = memory_limits(model, memory=parse_bytes("80GB"), policies=POLICIES)
    samples = draw("video", 64, seed=2, longest=100_000)
    plans = [planned(samples, memory) for _ in range(2)]
    assert plan_digest(plans[0]) == plan_digest(plans[1])
    assert plans[0] == plans[1]


def test_offload_is_priced_by_measured_transfer() -> None:
    fast = replace(COSTS, host=HostCosts(bytes_per_s=50e9))
    samples, memory = table([9_000, 9_000], [[], []]), budget(20_000, "none")
    config = PlannerConfig(capacity=1, encoder_capacity=1, memory=memory)
    for costs, rate in ((COSTS, 25e9), (fast, 50e9)):
        plan = plan_step(samples, step=0, cluster=CLUSTER, costs=costs, config=config)
        assert plan.memory is not None
        assert plan.memory.host_bytes_per_s == rate
        validate(plan, costs)


def test_what_fits_under_no_policy_is_named_with_the_budget() -> None:
    memory = budget(1_000)
    message = (
        r"sample 's0' has 200,000 tokens; 8 ranks x capacity 6,999 hold 55,992\..* \(capacities "
        r"follow from a budget of 141\.0 KB a rank: at most 6,999 tokens and 1 encoder tokens "
        r"under recompute 'full'\)"
    )
    with pytest.raises(PlanError, match=message):
        planned(table([200_000, 5], [[], []]), memory)


def test_loads_that_no_policy_holds_are_named() -> None:
    with pytest.raises(PlanError, match=r"microbatch 1 has up to 9,000 tokens and 7 encoder tok"):
        cheapest(np.array([0, 1, 3]), np.array([5, 20, 9_000]), np.array([0, 7, 0]), budget(1_000))


def unsplit(
    layout: Layout, policies: IntArray, *_: object, **__: object
) -> tuple[Layout, IntArray]:
    return layout, policies


def test_splitting_never_delays_a_queue() -> None:
    """Whatever a microbatch costs besides its samples: dear ones are split less."""
    memory, shorter = budget(3_000), 0
    wide = memory.policies[-1]
    config = PlannerConfig(capacity=wide.capacity, encoder_capacity=wide.encoder_capacity)
    for fixed in (0.001, 0.03, 0.2):
        costs = replace(COSTS, fixed=replace(COSTS.fixed, microbatch=fixed))
        for workload, seed in (("burst", 0), ("video", 1), ("sft", 2), ("docs", 3)):
            samples = draw(workload, 64, seed=seed, longest=50_000)
            plan = plan_step(samples, step=0, cluster=CLUSTER, costs=costs, config=config)
            parted = relaxed(plan, memory=memory, costs=costs, bound=1)
            with patch("dynapar.planner.recompute.split", unsplit):
                whole = relaxed(plan, memory=memory, costs=costs, bound=1)
            assert parted.makespan <= whole.makespan
            shorter += parted.makespan < whole.makespan
            for made in (parted, whole):
                validate(replace(made, homogeneous_degree=0, homogeneous_makespan=0), costs)
    assert shorter > 4


def test_with_equal_counts_nothing_is_split() -> None:
    samples = draw("burst", 96, seed=1, longest=60_000)
    even = planned(samples, budget(3_000), equal_counts=True)
    assert len({len(queue) for queue in even.queues}) == 1
