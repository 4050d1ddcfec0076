"""What holds for every plan of every step, on clusters of all shapes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import Costs, coefficients, load_costs
from dynapar.errors import CostsError, EmptyStepError, PlanError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan, Sync
from dynapar.planner import PlannerConfig, homogeneous_plan, plan_step
from tests.planner.contract import hold
from tests.samples import table

COSTS = load_costs(None)
CAPACITY = 4096
SYNCS: tuple[Sync, Sync] = ("step", "microbatch")
CLUSTERS = ["1x1", "1x3", "3x1", "2x3", "1x6", "3x4", "2x6", "1x12", "3x8", "4x6", "24x1"]
"""1, 3, 6, 12 and 24 ranks."""


def plan(samples: SampleTable, cluster: Cluster, config: PlannerConfig) -> StepPlan:
    return plan_step(samples, step=0, cluster=cluster, costs=COSTS, config=config)


def config(sync: Sync, **fields: int | None) -> PlannerConfig:
    values: dict[str, int | None] = {
        "capacity": CAPACITY, "encoder_capacity": CAPACITY, "peer_budget": None, **fields,
    }  # fmt: skip
    return PlannerConfig(sync=sync, **values)  # type: ignore[arg-type]


@st.composite
def lengths(draw: st.DrawFn, most: int) -> list[int]:
    """One sample, alike ones, one giant among short ones, or any mix."""
    kind = draw(st.sampled_from(["one", "alike", "giant", "mixed", "mixed"]))
    if kind == "one":
        return [draw(st.integers(1, most))]
    if kind == "alike":
        return [draw(st.integers(1, CAPACITY))] * draw(st.integers(2, 40))
    short = draw(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=30))
    if kind == "giant":
        return [*short, draw(st.integers(most // 2 + 1, most))]
    return [*short, *draw(st.lists(st.integers(1, most), max_size=3))]


@st.composite
def steps(draw: st.DrawFn) -> tuple[SampleTable, Cluster, PlannerConfig]:
    cluster = Cluster.parse(draw(st.sampled_from(CLUSTERS)))
    budget = draw(st.none() | st.none() | st.integers(0, 12))
    settings = config(draw(st.sampled_from(SYNCS)), peer_budget=budget)
    largest = max(d for d in cluster.degrees() if d <= (cluster.ranks if budget is None else 1))
    tokens = draw(lengths(CAPACITY * largest))
    sizes = st.lists(st.integers(1, 900), max_size=3)
    media = draw(st.booleans())
    units = [draw(sizes) if media else [] for _ in tokens]
    return table(tokens, units), cluster, settings


@given(steps())
@settings(max_examples=150)
def test_every_plan_keeps_its_contract(step: tuple[SampleTable, Cluster, PlannerConfig]) -> None:
    samples, cluster, settings = step
    hold(plan(samples, cluster, settings), cluster, settings)


@given(steps(), st.data())
@settings(max_examples=60)
def test_no_plan_is_above_a_homogeneous_one(
    step: tuple[SampleTable, Cluster, PlannerConfig], data: st.DataObject
) -> None:
    samples, cluster, settings = step
    made = plan(samples, cluster, settings)
    degree = data.draw(st.none() | st.sampled_from(cluster.degrees()))
    try:
        other = homogeneous_plan(
            samples, degree=degree, step=0, cluster=cluster, costs=COSTS, config=settings
        )
    except PlanError:
        return
    assert made.makespan <= other.makespan
    assert not other.optimal or made.makespan == other.makespan


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("shape", CLUSTERS)
def test_steps_at_the_edge(shape: str, sync: Sync) -> None:
    """One token, one giant that fills the cluster, all equal, and fewer samples than ranks."""
    cluster, settings = Cluster.parse(shape), config(sync)
    full = CAPACITY * cluster.ranks
    for tokens in ([1], [full], [full, full], [777] * (3 * cluster.ranks), [full, 5, 5, 900], [9]):
        hold(plan(table(tokens), cluster, settings), cluster, settings)


@pytest.mark.parametrize("sync", SYNCS)
def test_a_step_without_samples_is_an_error_of_its_own(sync: Sync) -> None:
    with pytest.raises(EmptyStepError, match=r"step 0 has no samples; expected at least one"):
        plan(table([]), Cluster.parse("1x4"), config(sync))


@pytest.mark.parametrize(
    ("tokens", "units", "message"),
    [
        ([5, 0], [[], []], "sample 's1' has 0 tokens; expected 1 or more. Leave the sample out"),
        ([5, -3], [[], []], "sample 's1' has -3 tokens; expected 1 or more. Leave the sample out"),
        (
            [5, 9],
            [[7], [4, 0]],
            "sample 's1' has an encoder unit of 0 encoder tokens; expected 1 or more. Leave the "
            "unit or the sample out",
        ),
        (
            [5, 1 << 40],
            [[], []],
            "sample 's1' of 1,099,511,627,776 tokens would take 2.83e+15 s; expected less than "
            "1.1e+06 s. Check the costs and the length",
        ),
    ],
)
def test_samples_that_have_no_time_are_named(
    tokens: list[int], units: list[list[int]], message: str
) -> None:
    samples = dataclasses.replace(table(tokens, units))
    with pytest.raises(PlanError) as caught:
        plan(samples, Cluster.parse("1x4"), config("step"))
    assert str(caught.value) == message


def slow(**fields: float) -> Costs:
    return dataclasses.replace(
        COSTS, name="odd", linear=dataclasses.replace(COSTS.linear, **fields)
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (-1.0, r"costs 'odd': linear.parameters is -1.0; expected a finite number 0 or more"),
        (float("inf"), r"linear.parameters is inf; expected a finite number 0 or more"),
        (float("nan"), r"linear.parameters is nan; expected a finite number 0 or more"),
        (
            1e300,
            r"costs 'odd' give linear_token 1.5e\+292 microseconds; expected less than 1.1e\+12. "
            r"Check the rates: FLOPs and bytes are a second's",
        ),
    ],
)
def test_costs_that_cannot_be_counted_are_named(parameters: float, message: str) -> None:
    with pytest.raises(CostsError, match=message):
        coefficients(slow(parameters=parameters), ranks_per_node=8)


def test_slow_costs_still_plan() -> None:
    """Up to what is refused, sums of ticks do not overflow."""
    costs = slow(parameters=1e15)
    samples = table([4096 * 3, 2000, 50] * 12)
    made = plan_step(
        samples, step=0, cluster=Cluster.parse("3x8"), costs=costs, config=config("step")
    )
    hold(made, Cluster.parse("3x8"), config("step"))
    assert made.makespan > 10**10
