from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.errors import PlanError
from dynapar.plan import Sync
from dynapar.planner import plan_step
from dynapar.simulate import Schedule, from_plan, replay
from dynapar.simulate.schedule import from_layout
from tests.simulate.oracle import simulate
from tests.simulate.scenes import COSTS, config, random_table, some_plan

SYNCS = st.sampled_from(["step", "microbatch"])
SEEDS = st.integers(0, 10_000)


@settings(max_examples=60, deadline=None)
@given(SEEDS, SYNCS, st.integers(1, 40), st.sampled_from(["1x1", "1x4", "2x4", "3x3"]))
def test_without_noise_a_plan_takes_what_it_says(
    seed: int, sync: Sync, samples: int, cluster: str
) -> None:
    plan = some_plan(seed, sync, samples=samples, cluster=cluster)
    seen = replay(from_plan(plan, COSTS))
    assert seen.makespan == plan.makespan
    assert seen.starts.tolist() == [micro.start for micro in plan.microbatches]
    assert seen.waves.tolist() == [[wave.encoder, wave.llm] for wave in plan.waves]
    if sync == "step":
        ends = [micro.start + micro.ticks for micro in plan.microbatches]
        assert seen.ends.tolist() == ends


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_planned_steps_take_what_they_say(sync: Sync) -> None:
    for seed in range(5):
        plan = plan_step(
            random_table(seed, 60, longest=60_000),
            step=0,
            cluster=Cluster.parse("2x4"),
            costs=COSTS,
            config=config(sync),
        )
        assert replay(from_plan(plan, COSTS)).makespan == plan.makespan


@settings(max_examples=40, deadline=None)
@given(SEEDS, SYNCS)
def test_with_noise_it_agrees_with_a_slow_event_simulation(seed: int, sync: Sync) -> None:
    schedule = from_plan(some_plan(seed, sync), COSTS)
    rng = np.random.default_rng(seed)
    own = np.exp(0.3 * rng.standard_normal(schedule.ranks))
    shared = np.exp(0.3 * rng.standard_normal(len(schedule.layout.first)))
    makespan, starts = simulate(schedule, own.tolist(), shared.tolist())
    seen = replay(schedule, rank_factors=own, microbatch_factors=shared)
    assert (seen.makespan, seen.starts.tolist()) == (makespan, starts)
    assert int(seen.spent.sum()) == schedule.ranks * makespan
    assert (seen.spent >= 0).all()


@settings(max_examples=20, deadline=None)
@given(SEEDS, SYNCS)
def test_a_slow_rank_never_makes_a_step_shorter(seed: int, sync: Sync) -> None:
    schedule = from_plan(some_plan(seed, sync), COSTS)
    own = np.ones(schedule.ranks)
    before = replay(schedule).makespan
    own[seed % schedule.ranks] = 1.5
    assert replay(schedule, rank_factors=own).makespan >= before


@settings(max_examples=20, deadline=None)
@given(SEEDS, SYNCS)
def test_the_queues_of_a_layout_are_those_of_its_plan(seed: int, sync: Sync) -> None:
    plan = some_plan(seed, sync)
    ours = from_plan(plan, COSTS)
    made = from_layout(
        ours.layout,
        ours.loads,
        sync=sync,
        ranks=plan.ranks,
        costs=COSTS,
        constants=ours.constants,
        tokens=ours.tokens,
        computed_tokens=ours.tokens,
    )
    assert made.queue_offsets.tolist() == ours.queue_offsets.tolist()
    assert made.queue.tolist() == ours.queue.tolist()


def test_the_closing_pass_is_no_part_of_the_makespan() -> None:
    closing = [from_plan(some_plan(1, sync), COSTS).closing for sync in ("step", "microbatch")]
    assert closing == [250_000, 50_000]


def test_traffic_rules_short_waves() -> None:
    plan = some_plan(3, "microbatch", samples=3)
    seen = replay(from_plan(plan, COSTS))
    assert 0 < seen.traffic_waves == sum(wave.llm == 780_000 for wave in plan.waves)


def test_queues_that_contradict_each_other_are_named() -> None:
    schedule = from_plan(some_plan(5, "step", samples=40), COSTS)
    layout = schedule.layout
    wide = np.flatnonzero(layout.width > 1).tolist()
    one, other = next(
        (a, b)
        for a in wide
        for b in wide
        if a < b and len(_members(schedule, a) & _members(schedule, b)) > 1
    )
    rank = min(_members(schedule, one) & _members(schedule, other))
    queue = schedule.queue.copy()
    span = slice(schedule.queue_offsets[rank], schedule.queue_offsets[rank + 1])
    own = queue[span]
    first, second = (int(np.flatnonzero(own == b)[0]) for b in (one, other))
    own[first], own[second] = own[second], own[first]
    with pytest.raises(PlanError, match=rf"microbatches \[.*{one}.*\] never start"):
        replay(replace(schedule, queue=queue))


def test_waves_of_unequal_length_are_refused() -> None:
    schedule = from_plan(some_plan(5, "microbatch"), COSTS)
    offsets = schedule.queue_offsets.copy()
    offsets[-1] -= 1
    broken = replace(schedule, queue_offsets=offsets, queue=schedule.queue[:-1])
    with pytest.raises(PlanError, match="all must have as many: fill them up with dummies"):
        replay(broken)


def _members(schedule: Schedule, number: int) -> set[int]:
    layout = schedule.layout
    return set(range(layout.first[number], layout.first[number] + layout.width[number]))
