from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import Costs, coefficients, load_costs
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.packing.ticks import sample_columns, unit_columns
from dynapar.plan import Sync, plan_from_json, plan_to_json, validate
from dynapar.planner import (
    PlannerConfig,
    group_by_prefix,
    homogeneous_plan,
    plan_step,
    random_plan,
)
from dynapar.planner.grouping import Saved, saved
from tests.packing import oddcosts
from tests.packing.exact import Exact
from tests.prefixed import Group, prefixed, tables
from tests.samples import table

CLUSTER = Cluster(nodes=1, ranks_per_node=4)
COSTS = load_costs(None)
ROOMY = PlannerConfig(capacity=100_000, encoder_capacity=100_000)


def grouped(samples: SampleTable, config: PlannerConfig = ROOMY) -> SampleTable:
    return group_by_prefix(samples, cluster=CLUSTER, config=config)


def test_one_row_stands_for_all_samples_of_a_prefix() -> None:
    samples = prefixed(
        [
            Group(20, (7, 9, 30), (50, 60), ((), (5,), (8, 9))),
            Group(0, (11,)),
            Group(4, (6,)),
        ],
        turns=2,
    )
    made = grouped(samples)
    # In the table: s0 and s1 of p0, the one of p2; then another of p0, and the one without.
    assert samples.prefixes is not None
    assert samples.prefixes.ids == ("p0", "p0", "p2", "p0", "")
    assert made.ids == ("s0", "s2", "s4")
    assert made.llm_tokens.tolist() == [20 + 7 + 30 + 9, 10, 11]
    assert [made.units(row).tolist() for row in range(3)] == [[50, 60, 8, 9, 5], [], []]
    assert made.text_tokens.tolist() == [18 + 7 + (30 - 2) + (9 - 1), 10, 11]
    labels = samples.label_tokens
    assert made.label_tokens.tolist() == [labels[[0, 1, 3]].sum(), labels[2], labels[4]]
    assert made.modalities.tolist() == [1, 0, 0]
    trees = made.trees
    assert trees is not None
    assert trees.prefix_ids == ("p0", "", "")
    assert trees.prefix_tokens.tolist() == [20, 0, 0]
    assert trees.prefix_units.tolist() == [2, 0, 0]
    assert trees.offsets.tolist() == [0, 3, 3, 3]
    assert trees.member_ids == ("s0", "s1", "s3")
    assert trees.member_tokens.tolist() == [27, 50, 29]
    assert trees.member_labels.tolist() == labels[[0, 1, 3]].tolist()
    assert trees.member_units.tolist() == [0, 2, 1]
    assert saved(made) == Saved(members=3, trees=1, llm_tokens=2 * 20, encoder_tokens=2 * 110)


def test_nothing_changes_where_nothing_is_shared() -> None:
    plain = table([5, 6, 7])
    assert grouped(plain) is plain
    alone = prefixed([Group(5, (7,)), Group(0, (3, 9)), Group(2, (2,))])
    assert grouped(alone) is alone
    assert saved(alone).llm_tokens == saved(plain).trees == 0


@settings(max_examples=60)
@given(tables(), st.integers(150, 400), st.integers(140, 600))
def test_every_sample_is_in_the_step_once(
    samples: SampleTable, capacity: int, encoder_capacity: int
) -> None:
    config = PlannerConfig(capacity=capacity, encoder_capacity=encoder_capacity)
    made = grouped(samples, config)
    trees = made.trees
    if trees is None:
        assert made is samples
        return
    alone = [name for row, name in enumerate(made.ids) if not trees.prefix_ids[row]]
    assert sorted([*alone, *trees.member_ids]) == sorted(samples.ids)
    assert made.label_tokens.sum() == samples.label_tokens.sum()
    less = saved(made)
    assert made.llm_tokens.sum() + less.llm_tokens == samples.llm_tokens.sum()
    assert made.unit_tokens.sum() + less.encoder_tokens == samples.unit_tokens.sum()
    assert (made.take(np.arange(len(made)))).trees == trees


@settings(max_examples=60)
@given(tables(), st.sampled_from(oddcosts.ALL), st.integers(1, 4))
def test_a_tree_costs_no_more_than_its_members(
    samples: SampleTable, costs: Costs, degree: int
) -> None:
    constants = coefficients(costs, ranks_per_node=2)
    made = grouped(samples)
    if made.trees is None:
        return
    apart = dict(
        zip(samples.ids, sample_columns(samples.llm_tokens, degree, constants), strict=True)
    )
    together = sample_columns(made.llm_tokens, degree, constants, reach=made.reach)
    units = unit_columns(np.array(made.unit_tokens), constants)
    own = unit_columns(np.array(samples.unit_tokens), constants)
    assert units.sum() <= own.sum()
    for row in made.trees.rows.tolist():
        names = made.trees.member_ids[made.trees.members(row)]
        # Each of these is rounded on its own.
        most = sum(apart[name] + 1 for name in names)
        assert (together[row] <= most).all(), (together[row], most)


def test_one_member_costs_what_the_sample_does() -> None:
    constants = coefficients(COSTS, ranks_per_node=4)
    samples = prefixed([Group(900, (7000,)), Group(800, (50, 60))])
    made = grouped(samples)
    for degree in (1, 2, 4):
        apart = sample_columns(samples.llm_tokens, degree, constants)
        together = sample_columns(made.llm_tokens, degree, constants, reach=made.reach)
        assert together[0].tolist() == apart[0].tolist()


def test_a_tree_that_fits_nowhere_is_cut_where_it_does() -> None:
    samples = prefixed([Group(100, (60, 50, 40, 30, 20, 150), (30,), ((70,),) * 6)])
    for capacity, encoder, parts in (
        (100_000, 100_000, [["s0", "s1", "s2", "s3", "s4", "s5"]]),
        (66, 100_000, [["s0", "s1", "s2"], ["s3", "s4"], ["s5"]]),
        (100_000, 110, [["s0", "s1", "s2"], ["s3", "s4", "s5"]]),
    ):
        config = PlannerConfig(capacity=capacity, encoder_capacity=encoder)
        made = grouped(samples, config)
        trees = made.trees
        assert trees is not None
        found = [
            list(trees.member_ids[trees.members(row)]) or [made.ids[row]]
            for row in range(len(made))
        ]
        assert found == parts, capacity
        plan = plan_step(made, step=0, cluster=CLUSTER, costs=COSTS, config=config)
        validate(plan, COSTS)


def test_a_sample_that_fits_nowhere_names_its_prefix() -> None:
    samples = prefixed([Group(100, (60, 400)), Group(0, (70,))])
    config = PlannerConfig(capacity=60, encoder_capacity=9)
    with pytest.raises(PlanError) as caught:
        grouped(samples, config)
    assert str(caught.value) == (
        "sample 's1' of prefix 'p0' has 500 tokens, 100 of them in the prefix, and 0 encoder "
        "tokens; alone it does not fit on up to 4 ranks of capacity 60 and encoder_capacity 9. "
        "Raise them, allow more ranks a sample, or leave it out"
    )


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_plans_of_trees_are_valid_and_read_back(sync: Sync) -> None:
    rng = np.random.default_rng(3)
    groups = [
        Group(int(p), tuple(rng.integers(20, 3000, k).tolist()), (int(e),), ())
        for p, k, e in zip(
            rng.integers(300, 9000, 9),
            rng.integers(1, 7, 9),
            rng.integers(50, 2000, 9),
            strict=True,
        )
    ]
    samples = prefixed([*groups, Group(0, (15_000, 40, 700, 9000))], turns=3)
    config = PlannerConfig(capacity=8192, encoder_capacity=16_384, sync=sync)
    made = grouped(samples, config)
    assert made.trees is not None
    apart = plan_step(samples, step=0, cluster=CLUSTER, costs=COSTS, config=config)
    plan = plan_step(made, step=0, cluster=CLUSTER, costs=COSTS, config=config)
    assert plan.lower_bound < apart.lower_bound
    assert plan.makespan < apart.makespan
    others = [
        homogeneous_plan(made, degree=None, step=0, cluster=CLUSTER, costs=COSTS, config=config),
        random_plan(made, seed=1, step=0, cluster=CLUSTER, costs=COSTS, config=config),
    ]
    for each in (plan, *others):
        validate(each, COSTS)
        read = plan_from_json(plan_to_json(each))
        assert read == each
        assert read.samples.trees == made.trees
        assert plan.lower_bound <= each.makespan


@pytest.mark.parametrize("costs", oddcosts.ALL, ids=lambda costs: costs.name)
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_bound_below_optimum_below_plan_of_trees(sync: Sync, costs: Costs) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        groups = [
            Group(int(rng.integers(3, 30)), tuple(rng.integers(4, 30, k).tolist()), (9,), ())
            for k in (1, 3, 2)
        ]
        samples = prefixed([*groups, Group(0, (int(rng.integers(20, 90)),))])
        config = PlannerConfig(capacity=64, encoder_capacity=64, sync=sync)
        cluster = Cluster(nodes=1, ranks_per_node=3)
        made = group_by_prefix(samples, cluster=cluster, config=config)
        assert len(made) < len(samples)
        plan = plan_step(made, step=0, cluster=cluster, costs=costs, config=config)
        oracle = Exact(made, cluster, costs, 64, 64)
        optimum = oracle.step() if sync == "step" else oracle.waves()
        assert plan.lower_bound <= optimum <= plan.makespan, seed
