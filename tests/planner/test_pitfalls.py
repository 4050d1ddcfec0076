"""The known failures of other planners, one test a row (PP1 .. PP19), each on its small input."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.errors import EmptyStepError, PlanError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan, Sync
from dynapar.planner import PlannerConfig, homogeneous_plan, plan_ahead, plan_step
from tests.planner.contract import hold
from tests.samples import table

COSTS = load_costs(None)
SYNCS: tuple[Sync, Sync] = ("step", "microbatch")


def made(
    samples: SampleTable, shape: str, capacity: int, sync: Sync = "step", **rules: object
) -> StepPlan:
    """A plan that keeps its contract."""
    cluster = Cluster.parse(shape)
    config = PlannerConfig(
        capacity=capacity,
        encoder_capacity=capacity,
        sync=sync,
        **{"peer_budget": None, **rules},  # type: ignore[arg-type]
    )
    plan = plan_step(samples, step=0, cluster=cluster, costs=COSTS, config=config)
    hold(plan, cluster, config)
    return plan


def lognormal(n: int, median: float, sigma: float, most: int) -> SampleTable:
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, n).astype(int)
    return table(drawn.clip(1, most).tolist())


@pytest.mark.parametrize("sync", SYNCS)
def test_pp1_the_token_limit_is_hard(sync: Sync) -> None:
    plan = made(table([7] * 8), "1x2", 8, sync)
    assert max(max(micro.tokens_per_rank) for micro in plan.microbatches) <= 8


@pytest.mark.parametrize("sync", SYNCS)
def test_pp2_any_number_of_samples_is_fine(sync: Sync) -> None:
    made(lognormal(206, 500, 1.0, 8000), "1x4", 4096, sync)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    ("lengths", "shape"),
    [([900, 40, 3000], "1x8"), ([16_384] * 9, "1x8"), ([2000] * 64, "32x8")],
)
def test_pp3_few_samples_on_many_ranks(lengths: list[int], shape: str, sync: Sync) -> None:
    made(table(lengths), shape, 16_384, sync)


def test_pp4_few_samples_are_shared_and_each_token_counts_once() -> None:
    plan = made(table([9000, 12_000]), "1x8", 16_384)
    assert min(plan.degrees) > 1
    assert sum(sum(micro.tokens_per_rank) for micro in plan.microbatches) == 21_000


def test_pp5_any_batch_size_is_fine() -> None:
    made(lognormal(249, 700, 0.8, 4096), "1x2", 4096)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("shape", ["1x3", "1x6", "2x3", "3x4", "3x8", "24x1"])
def test_pp6_rings_are_windows_that_the_cluster_has(shape: str, sync: Sync) -> None:
    ranks = Cluster.parse(shape).ranks
    plan = made(table([1000 * min(4, ranks), 300, 300, 80]), shape, 1000, sync)
    assert max(plan.degrees) >= min(4, ranks)


def test_pp7_a_sample_that_fits_nowhere_is_named() -> None:
    with pytest.raises(PlanError) as caught:
        made(table([50, 140_000]), "1x8", 16_384)
    assert str(caught.value) == (
        "sample 's1' has 140,000 tokens; 8 ranks x capacity 16,384 hold 131,072. Raise capacity, "
        "add ranks, or leave the sample out"
    )


def test_pp8_full_width_samples_need_no_multiple() -> None:
    plan = made(table([8 * 512] * 3), "1x8", 512, "microbatch")
    assert {len(queue) for queue in plan.queues} == {3}


def test_pp9_parts_need_not_be_multiples_of_the_cuts() -> None:
    plan = homogeneous_plan(
        table([5, 9]), degree=4, step=0, cluster=Cluster.parse("1x4"), costs=COSTS,
        config=PlannerConfig(capacity=64, encoder_capacity=64),
    )  # fmt: skip
    assert sum(sum(micro.tokens_per_rank) for micro in plan.microbatches) == 14


@pytest.mark.parametrize("degree", [1, 2])
def test_pp10_pp11_totals_need_no_multiple(degree: int) -> None:
    plan = homogeneous_plan(
        table([4000, 551]), degree=degree, step=0, cluster=Cluster.parse("1x2"), costs=COSTS,
        config=PlannerConfig(capacity=4551, encoder_capacity=64),
    )  # fmt: skip
    assert sum(sum(micro.tokens_per_rank) for micro in plan.microbatches) == 4551


def test_pp12_nothing_is_padded() -> None:
    samples = lognormal(2048, 512, 1.0, 16_384)
    plan = made(samples, "32x8", 16_384)
    held = sum(sum(micro.tokens_per_rank) for micro in plan.microbatches)
    assert held == samples.llm_tokens.sum()


def test_pp13_planning_is_off_the_steps_path() -> None:
    planned_by: list[str] = []

    def planner(samples: SampleTable, /, *, step: int) -> StepPlan:
        planned_by.append(threading.current_thread().name)
        return made(samples, "32x8", 16_384)

    with plan_ahead([lognormal(2048, 700, 1.0, 16_384)], planner) as plans:
        assert len(list(plans)) == 1
    assert planned_by == ["dynapar-planner"]


@pytest.mark.parametrize("sync", SYNCS)
def test_pp14_no_sample_is_dropped_between_packs(sync: Sync) -> None:
    plan = made(table([6, 5, 4, 6]), "1x1", 10, sync)
    held = [place.sample for micro in plan.microbatches for place in micro.placements]
    assert sorted(held) == [0, 1, 2, 3]


@pytest.mark.parametrize("sync", SYNCS)
def test_pp15_rings_stand_on_boundaries_where_that_is_asked(sync: Sync) -> None:
    lengths = [400, 400, 201, 200, 200, 200, 200, 101, 50]
    plan = made(table(lengths), "1x8", 100, sync, degrees="pow2", windows="aligned")
    for number, micro in enumerate(plan.microbatches):
        assert micro.ranks[0] % len(micro.ranks) == 0
        members = [rank for rank, queue in enumerate(plan.queues) if number in queue]
        assert tuple(members) == micro.ranks


def test_pp16_time_is_balanced_and_not_tokens() -> None:
    plan = made(lognormal(256, 1500, 1.4, 16_384), "1x8", 16_384)
    ends = [0] * 8
    for micro in plan.microbatches:
        for rank in micro.ranks:
            ends[rank] = micro.start + micro.ticks
    assert max(ends) <= 1.03 * min(ends)
    squares = [sum(int(n) ** 2 for n in micro.tokens_per_rank) for micro in plan.microbatches]
    assert max(squares) > 1.03 * min(squares)


def test_pp17_planning_changes_no_sample() -> None:
    samples = table([3000, 40, 900, 7000], [[300, 200], [], [9], []])
    before = {name: np.array(getattr(samples, name)) for name in ("llm_tokens", "unit_tokens")}
    first = made(samples, "1x4", 4096)
    again = made(samples, "1x4", 4096)
    assert all((getattr(samples, name) == values).all() for name, values in before.items())
    assert first.microbatches == again.microbatches


def test_pp18_packs_need_not_fill_up_exactly() -> None:
    plan = made(lognormal(3000, 900, 1.0, 8192), "1x8", 8192)
    assert sum(len(micro.placements) for micro in plan.microbatches) == 3000


@pytest.mark.parametrize("sync", SYNCS)
def test_pp19_empty_samples_and_empty_steps_are_refused(sync: Sync) -> None:
    with pytest.raises(PlanError, match=r"sample 's0' has 0 tokens; expected 1 or more"):
        made(table([0, 100]), "1x4", 4096, sync)
    with pytest.raises(EmptyStepError, match=r"step 0 has no samples"):
        made(table([]), "1x4", 4096, sync)
