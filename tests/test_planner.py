from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.errors import ConfigError, EmptyStepError, PlanError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan, Sync, plan_digest, validate
from dynapar.planner import (
    PlannerConfig,
    assemble,
    homogeneous_plan,
    plan_step,
    random_plan,
)
from tests.samples import table

COSTS = load_costs(None)
FOUR = Cluster(nodes=1, ranks_per_node=4)
CLUSTERS = [
    Cluster(nodes=1, ranks_per_node=1),
    FOUR,
    Cluster(nodes=2, ranks_per_node=4),
    Cluster(nodes=3, ranks_per_node=3),
    Cluster(nodes=4, ranks_per_node=1),
]


def config(sync: Sync = "step", **fields: object) -> PlannerConfig:
    values = {"capacity": 4096, "encoder_capacity": 4096, **fields}
    return PlannerConfig(sync=sync, **values)  # type: ignore[arg-type]


def plan(samples: SampleTable, cluster: Cluster, settings: PlannerConfig) -> StepPlan:
    return plan_step(samples, step=3, cluster=cluster, costs=COSTS, config=settings)


@st.composite
def problems(draw: st.DrawFn) -> tuple[SampleTable, Cluster, PlannerConfig]:
    """Batches of all shapes that the cluster can hold."""
    cluster = draw(st.sampled_from(CLUSTERS))
    sync: Sync = draw(st.sampled_from(["step", "microbatch"]))
    largest = draw(st.sampled_from([None, None, 1, 2, 3]))
    most = 4096 * cluster.degrees(largest)[-1]
    short = st.integers(1, 4096)
    lengths = draw(st.lists(st.one_of(short, short, st.integers(1, most)), min_size=1, max_size=24))
    sizes = st.lists(st.integers(1, 900), max_size=3)
    units = draw(st.lists(sizes, min_size=len(lengths), max_size=len(lengths)))
    gate = draw(st.sampled_from([0.0, 0.0, 0.2]))
    return table(lengths, units), cluster, config(sync, max_degree=largest, gate=gate)


@given(problems())
@settings(max_examples=150)
def test_plans_are_valid_never_above_homogeneous_and_the_same_twice(
    problem: tuple[SampleTable, Cluster, PlannerConfig],
) -> None:
    """`validate` derives coverage, memory, order, shapes and times anew."""
    samples, cluster, settings = problem
    made = plan(samples, cluster, settings)
    validate(made, COSTS)
    assert made.lower_bound <= made.makespan
    if made.homogeneous_degree:
        homogeneous = homogeneous_plan(
            samples, degree=None, step=3, cluster=cluster, costs=COSTS, config=settings
        )
        validate(homogeneous, COSTS)
        assert homogeneous.makespan == made.homogeneous_makespan
        assert homogeneous.degrees == (made.homogeneous_degree,)
        assert made.makespan <= homogeneous.makespan
        if made.chosen == "dynamic":
            assert made.makespan < homogeneous.makespan * (1 - settings.gate)
    again = plan(samples, cluster, settings)
    assert plan_digest(again) == plan_digest(made)


@given(problems(), st.integers(0, 1000))
@settings(max_examples=100)
def test_random_plans_are_valid(
    problem: tuple[SampleTable, Cluster, PlannerConfig], seed: int
) -> None:
    samples, cluster, settings = problem
    made, again = (
        random_plan(samples, seed=seed, step=1, cluster=cluster, costs=COSTS, config=settings)
        for _ in range(2)
    )
    validate(made, COSTS)
    assert plan_digest(again) == plan_digest(made)
    assert max(made.degrees) <= (settings.max_degree or cluster.ranks)


def test_random_plans_hold_what_an_executor_must_survive() -> None:
    samples = table(
        [3000, 900, 40, 2000, 700, 1200, 64, 5], [[80, 80], [], [60], [], [9], [], [], []]
    )
    found = set()
    for seed in range(40):
        made = random_plan(
            samples, seed=seed, step=0, cluster=FOUR, costs=COSTS, config=config(max_degree=4)
        )
        found |= {f"degree {degree}" for degree in made.degrees}
        lengths = {len(queue) for queue in made.queues}
        found |= {"unequal queues"} if len(lengths) > 1 else set()
        found |= {"an empty queue"} if 0 in lengths else set()
        for micro in made.microbatches:
            for place in micro.placements:
                if len(place.ranks) == 1 and len(micro.ranks) > 1:
                    found.add("whole in a ring")
                if set(place.encoders) - set(place.ranks):
                    found.add("encoded elsewhere")
    assert found == {
        "degree 1", "degree 2", "degree 3", "degree 4", "unequal queues", "an empty queue",
        "whole in a ring", "encoded elsewhere",
    }  # fmt: skip


PROGRAM = """
from tests.samples import table
from tests.test_planner import *
rng = np.random.default_rng(5)
units = [rng.integers(9, 900, int(k)).tolist() for k in rng.integers(0, 3, 60)]
samples = table((rng.lognormal(6.5, 1.2, 60).astype(int) + 1).tolist(), units)
for sync in ("step", "microbatch"):
    print(plan_digest(plan(samples, CLUSTERS[2], config(sync))))
"""


def test_hash_order_does_not_matter() -> None:
    outputs = set()
    for seed in ("1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 2


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_more_ranks_than_samples_leaves_queues_empty(sync: Sync) -> None:
    settings = config(sync, max_degree=1)
    made = plan(table([100, 50]), FOUR, settings)
    validate(made, COSTS)
    empty = [queue for queue in made.queues if not any(entry is not None for entry in queue)]
    assert len(empty) == 2


def test_a_step_without_samples_is_refused() -> None:
    makers: tuple[Callable[[], StepPlan], ...] = (
        lambda: plan(table([]), FOUR, config()),
        lambda: homogeneous_plan(
            table([]), degree=1, step=3, cluster=FOUR, costs=COSTS, config=config()
        ),
        lambda: random_plan(table([]), seed=0, step=3, cluster=FOUR, costs=COSTS, config=config()),
    )
    for make in makers:
        with pytest.raises(EmptyStepError) as caught:
            make()
        assert str(caught.value) == (
            "step 3 has no samples; expected at least one. Leave the step out, or look at what "
            "chose its samples: the source may be empty, or all of it filtered out"
        )


def test_a_long_sample_gets_a_ring_and_short_ones_do_not_wait() -> None:
    made = plan(table([16000] + [600] * 24), Cluster(nodes=2, ranks_per_node=4), config())
    degrees = {p.sample: len(p.ranks) for m in made.microbatches for p in m.placements}
    assert degrees[0] >= 4
    assert min(degrees.values()) < degrees[0]
    assert made.makespan < made.homogeneous_makespan


def test_a_long_video_is_encoded_by_several_ranks() -> None:
    samples = table([4000, 300], [[900] * 8, []])
    made = plan(samples, FOUR, config(encoder_capacity=3600))
    (place,) = (p for m in made.microbatches for p in m.placements if p.sample == 0)
    assert len(set(place.encoders)) >= 2


def test_the_gate_prefers_homogeneous_within_its_share() -> None:
    rng = np.random.default_rng(0)
    samples = table((rng.lognormal(6.0, 1.5, 16).astype(int) + 16).clip(max=16384).tolist())
    free = plan(samples, FOUR, config())
    assert free.chosen == "dynamic"
    gated = plan(samples, FOUR, config(gate=0.9))
    assert gated.chosen == "homogeneous"
    assert gated.homogeneous_makespan == free.homogeneous_makespan


def test_homogeneous_uses_one_degree_and_refuses_what_does_not_fit() -> None:
    samples = table([7000, 100, 300, 50], [[], [40, 50], [], []])
    for degree in (2, 3, 4):
        made = homogeneous_plan(
            samples, degree=degree, step=0, cluster=FOUR, costs=COSTS, config=config()
        )
        validate(made, COSTS)
        assert made.degrees == (degree,)
    with pytest.raises(PlanError, match=r"does not fit at degree 1: its longest sample 's0' has 7"):
        homogeneous_plan(samples, degree=1, step=0, cluster=FOUR, costs=COSTS, config=config())
    with pytest.raises(PlanError, match=r"degree is 5; cluster 1x4 allows 1, 2, 3, 4"):
        homogeneous_plan(samples, degree=5, step=0, cluster=FOUR, costs=COSTS, config=config())


def named(tokens: int, units: list[int]) -> SampleTable:
    return dataclasses.replace(table([10, tokens], [[], units]), ids=("a16", "a17"))


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        (
            named(90_000, []),
            PlannerConfig(capacity=16_384, encoder_capacity=65_536),
            "sample 'a17' has 90,000 tokens; 4 ranks x capacity 16,384 hold 65,536. Raise "
            "capacity, add ranks, or leave the sample out",
        ),
        (
            named(9000, []),
            config(max_degree=2),
            "sample 'a17' has 9,000 tokens; 2 ranks (max_degree 2) x capacity 4,096 hold 8,192. "
            "Raise capacity, allow more ranks a sample, or leave the sample out",
        ),
        (
            named(5000, []),
            config(max_degree=1),
            "sample 'a17' has 5,000 tokens; 1 rank (max_degree 1) x capacity 4,096 hold 4,096. "
            "Raise capacity, allow more ranks a sample, or leave the sample out",
        ),
        (
            named(90, [5000]),
            config(),
            "sample 'a17' has an encoder unit of 5,000 encoder tokens; encoder_capacity is 4,096. "
            "Raise encoder_capacity, or leave the sample out",
        ),
        (
            named(90, [4000] * 5),
            config(),
            "sample 'a17' has 90 tokens and 20,000 encoder tokens in 5 units, which no degree up "
            "to 4 deals out within capacity 4,096 and encoder_capacity 4,096. Raise them, add "
            "ranks, or leave the sample out",
        ),
    ],
)
def test_what_cannot_be_placed_is_named(
    samples: SampleTable, settings: PlannerConfig, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(samples, FOUR, settings)
    assert str(caught.value) == message
    with pytest.raises(PlanError) as caught:
        random_plan(samples, seed=0, step=0, cluster=FOUR, costs=COSTS, config=settings)
    assert str(caught.value) == message


def test_exactly_full_ranks_fit() -> None:
    """Tokens that fill all ranks to the last one, and units that fill every encoder."""
    made = plan(table([16384], [[4096] * 4]), FOUR, config())
    validate(made, COSTS)
    assert made.microbatches[0].tokens_per_rank == (4096,) * 4
    assert made.microbatches[0].encoder_tokens_per_rank == (4096,) * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capacity": 0}, r"capacity is 0; expected 1 or more"),
        ({"encoder_capacity": -1}, r"encoder_capacity is -1; expected 1 or more"),
        ({"sync": "never"}, r"sync is 'never'; expected 'step' or 'microbatch'"),
        ({"gate": 1.0}, r"gate is 1.0; expected 0 or more, below 1"),
        ({"max_degree": 0}, r"max_degree is 0; expected 1 or more"),
    ],
)
def test_bad_configurations_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlannerConfig(**{"capacity": 1, "encoder_capacity": 1, **fields})  # type: ignore[arg-type]


def test_assemble_places_units_by_cost_and_packs_waves() -> None:
    samples = table([3000, 100, 200], [[50], [400, 300], []])
    made = assemble(
        samples,
        microbatches=[((0, 1), [(0, (0,)), (1, (1,))]), ((2,), [(2, (2,))])],
        step=0,
        cluster=FOUR,
        costs=COSTS,
        config=config("microbatch"),
    )
    assert made.queues == ((0,), (0,), (1,), (None,))
    # Where parts are waited for one after the other, units are balanced among themselves.
    assert made.microbatches[0].encoder_tokens_per_rank == (400, 350)
    later = assemble(
        samples,
        microbatches=[((0, 1), [(0, (0,)), (1, (1,))]), ((2,), [(2, (2,))])],
        step=0,
        cluster=FOUR,
        costs=COSTS,
        config=config("microbatch"),
        waves=[0, 1],
        encoders=[[1], [0, 1], []],
    )
    assert later.queues == ((0, None), (0, None), (None, 1), (None, None))
    assert later.microbatches[0].encoder_tokens_per_rank == (400, 350)


@pytest.mark.parametrize(
    ("microbatches", "message"),
    [
        ([((0,), [(0, (0,))])], r"hold rows \[0\]"),
        ([((0,), [(0, (0,)), (1, (0,)), (5, (0,))])], r"has row 5; there are 2"),
        ([((0,), [(0, (0,)), (1, (1,))])], r"ranks \[1\] of sample 's1' are not all among \[0\]"),
        ([((0, 2), [(0, (0,)), (1, (2,))])], r"ranks \[0, 2\] of the microbatch are not consec"),
        ([((3, 4), [(0, (3,)), (1, (4,))])], r"not all among \[3, 4\] and 0..3"),
        ([((0,), [(0, (0,)), (1, (0,))])], r"rank 0 holds 5,000 tokens; capacity is 4,096"),
    ],
)
def test_assemble_names_what_is_wrong(
    microbatches: list[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        assemble(
            table([3000, 2000]),
            microbatches=microbatches,
            step=0,
            cluster=FOUR,
            costs=COSTS,
            config=config(),
        )
