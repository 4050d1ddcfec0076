from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.errors import PlanError
from dynapar.plan import (
    PlanFormError,
    StepPlan,
    plan_digest,
    plan_from_json,
    plan_to_json,
    validate,
)
from dynapar.planner import PlannerConfig, group_by_prefix, plan_step
from tests.prefixed import Group, prefixed

COSTS = load_costs(None)
CLUSTER = Cluster(nodes=1, ranks_per_node=2)
CONFIG = PlannerConfig(capacity=4000, encoder_capacity=800)


def plan() -> StepPlan:
    """s0, s1 and s2 are a tree of p0; s3 is alone; s4 and s5 are a tree of p2."""
    samples = prefixed(
        [
            Group(500, (90, 800, 60), (300, 200), ((), (40,), ())),
            Group(0, (700,)),
            Group(50, (60, 70)),
        ]
    )
    made = group_by_prefix(samples, cluster=CLUSTER, config=CONFIG)
    return plan_step(made, step=3, cluster=CLUSTER, costs=COSTS, config=CONFIG)


def test_a_tree_lists_its_prefix_and_members() -> None:
    written: Any = plan_to_json(plan())
    first, alone, _ = written["samples"]
    assert first == {
        "id": "s0",
        "llm_tokens": 1450,
        "text_tokens": 1447,
        "label_tokens": 587 + 1296 + 557,
        "modalities": ["image"],
        "encoder_tokens": 540,
        "encoder_units": [300, 200, 40],
        "prefix": {"id": "p0", "tokens": 500, "encoder_units": 2},
        "members": [
            {"id": "s0", "tokens": 590, "label_tokens": 587, "encoder_units": 0},
            {"id": "s1", "tokens": 1300, "label_tokens": 1296, "encoder_units": 1},
            {"id": "s2", "tokens": 560, "label_tokens": 557, "encoder_units": 0},
        ],
    }
    assert not {"prefix", "members"} & set(alone)


def test_plans_with_trees_read_back_and_digests_cover_them() -> None:
    one = plan()
    validate(one, COSTS)
    read = plan_from_json(plan_to_json(one))
    assert read == one
    trees = one.samples.trees
    assert trees is not None
    digests = {plan_digest(one)}
    changes: list[tuple[str, Any]] = [
        ("prefix_ids", ("p9", "", "p2")),
        ("member_ids", ("s0", "s1", "s9", "s4", "s5")),
        ("member_tokens", trees.member_tokens + np.array([1, -1, 0, 0, 0])),
    ]
    for name, value in changes:
        other = replace(one, samples=replace(one.samples, trees=replace(trees, **{name: value})))
        assert other != one
        digests.add(plan_digest(other))
    assert len(digests) == 4
    changed = copy.deepcopy(plan_to_json(one))
    changed["samples"][0]["prefix"]["tokens"] = 501  # type: ignore[index, call-overload]
    with pytest.raises(PlanError, match="step 3: the plan's digest is"):
        plan_from_json(changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("members"), "samples[0].members is missing"),
        (lambda row: row.pop("prefix"), "samples[0].prefix is missing"),
        (
            lambda row: row["members"][1].update(tokens="many"),
            "samples[0].members[1].tokens is 'many'; expected an integer",
        ),
        (lambda row: row["prefix"].pop("id"), "samples[0].prefix.id is missing"),
    ],
)
def test_a_tree_of_another_form_is_refused(change: Callable[[Any], object], message: str) -> None:
    values: Any = copy.deepcopy(plan_to_json(plan()))
    change(values["samples"][0])
    with pytest.raises(PlanFormError) as caught:
        plan_from_json(values)
    assert str(caught.value) == (
        f"step 3: the plan's form is broken: {message}. A tree has a prefix and members: plan again"
    )


def test_unknown_keys_of_a_member_are_refused() -> None:
    values: Any = copy.deepcopy(plan_to_json(plan()))
    values["samples"][0]["members"][0]["weight"] = 2
    with pytest.raises(PlanError, match=r"samples\[0\].members\[0\].weight is an unknown key"):
        plan_from_json(values)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prefix_tokens": [700, 0, 50]}, "tree 's0' has members of [590, 1300, 560] tokens"),
        ({"prefix_tokens": [0, 0, 50]}, "expected more than its prefix's 0, and 1 or more there"),
        ({"prefix_tokens": [499, 0, 50]}, "tree 's0' has 1450 llm_tokens; its members make 1452"),
        (
            {"member_labels": [587, 1296, 558, 109, 119]},
            "tree 's0' has 2440 label_tokens; its members have 2441",
        ),
        (
            {"member_labels": [590, 1293, 557, 109, 119]},
            "tree 's0' has members of [590, 1293, 557] targets in [590, 1300, 560] tokens",
        ),
        (
            {"member_units": [1, 1, 0, 0, 0]},
            "tree 's0' has 3 encoder units; prefix and members have 4",
        ),
        ({"prefix_units": [-1, 0, 0]}, "tree 's0' has 3 encoder units; prefix and members have 0"),
        (
            {"member_ids": ("s0", "s1", "s3", "s4", "s5")},
            "sample 's3' is in the step twice, alone or as a member of trees",
        ),
        (
            {"member_ids": ("s0", "s1", "s2", "s4", "s0")},
            "sample 's0' is in the step twice, alone or as a member of trees",
        ),
        (
            {"prefix_ids": ("p0", "p1", "p2")},
            "sample 1 has prefix 'p1' and 0 members; expected two or more with a prefix, none",
        ),
        (
            {"offsets": [0, 3, 4, 5]},
            "sample 1 has prefix '' and 1 members; expected two or more with a prefix, none",
        ),
        ({"prefix_units": [2, 0]}, "the columns of trees do not all have 3 rows, one a sample"),
        ({"member_units": [0, 1, 0, 0]}, "the columns of members do not all have 5 rows"),
    ],
)
def test_trees_that_do_not_add_up_are_named(columns: dict[str, Any], message: str) -> None:
    one = plan()
    trees = one.samples.trees
    assert trees is not None
    changed: dict[str, Any] = {
        name: value if isinstance(value, tuple) else np.array(value, np.int64)
        for name, value in columns.items()
    }
    bad = replace(one, samples=replace(one.samples, trees=replace(trees, **changed)))
    with pytest.raises(PlanError) as caught:
        validate(bad, COSTS)
    assert message in str(caught.value)


def test_a_plan_that_prices_trees_as_if_they_were_causal_is_refused() -> None:
    one = plan()
    with pytest.raises(PlanError, match=r"takes .* ticks .*; the plan says"):
        validate(
            replace(
                one,
                samples=replace(one.samples, trees=None, label_tokens=one.samples.llm_tokens - 1),
            ),
            COSTS,
        )
