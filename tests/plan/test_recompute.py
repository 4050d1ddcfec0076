"""A plan says what its microbatches recompute and why, and is checked for it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynapar.errors import PlanError
from dynapar.memory import POLICIES, MemoryLimits, Piece, PolicyLimits
from dynapar.plan import (
    PlanFormError,
    StepPlan,
    Sync,
    plan_digest,
    plan_from_json,
    plan_to_json,
    validate,
)
from dynapar.planner.recompute import relaxed
from tests.plan.small import COSTS, plan

NONE = PolicyLimits(
    policy="none", pieces=(Piece(1000, 10, 1),), capacity=4000, encoder_capacity=800
)
FULL = PolicyLimits(
    policy="full", pieces=(Piece(1000, 6, 1), Piece(2000, 1, 20)), capacity=6000,
    encoder_capacity=800,
)  # fmt: skip
MEMORY = MemoryLimits(budget=41_000, policies=(NONE, FULL))


def budgeted(sync: Sync = "step") -> StepPlan:
    """Of `plan`: two microbatches have more than 4,000 tokens on a rank, and recompute."""
    made = plan(sync)
    return relaxed(made, memory=MEMORY, costs=COSTS, bound=1)


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_a_budgeted_plan_survives_its_json_form(sync: Sync) -> None:
    made = budgeted(sync)
    values: Any = json.loads(json.dumps(plan_to_json(made)))
    assert values["version"] == 2
    assert [micro["recompute"] for micro in values["microbatches"]] == [
        "full", "full", "none", "none",
    ]  # fmt: skip
    read = plan_from_json(values)
    assert read == made
    assert read.memory == MEMORY
    assert [micro.recompute for micro in read.microbatches] == ["full", "full", "none", "none"]
    validate(read, COSTS)


def test_plans_without_recompute_are_of_version_1_as_before() -> None:
    values: Any = plan_to_json(plan())
    assert values["version"] == 1
    assert "memory" not in values
    assert all("recompute" not in micro for micro in values["microbatches"])


def test_recomputing_takes_longer() -> None:
    before, after = plan().columns, budgeted().columns
    assert (after.ticks[:2] > before.ticks[:2]).all()
    assert (after.ticks[2:] == before.ticks[2:]).all()


def changed(policies: list[int]) -> StepPlan:
    made = budgeted()
    numbers = np.array(policies, np.int64)
    return replace(made, columns=replace(made.columns, recompute=numbers))


def test_the_digest_covers_policies_and_budget() -> None:
    made = budgeted()
    digests = {plan_digest(made), plan_digest(changed([2, 2, 2, 0]))}
    digests.add(plan_digest(replace(made, memory=replace(MEMORY, budget=41_001))))
    digests.add(plan_digest(replace(plan(), makespan=made.makespan)))
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            [0, 2, 0, 0],
            r"microbatch 0: rank 0 needs 46,\d{3} bytes under recompute 'none'; the budget is 41",
        ),
        ([2, 1, 0, 0], r"microbatch 1 has recompute 'selective'; the plan's budget knows none, fu"),
        ([2, 2, 2, 0], r"microbatch 2 takes \d+ ticks .*; the plan says"),
        ([2, 7, 0, 0], r"columns.recompute holds \[2, 7, 0, 0\]; expected 0\.\.3"),
    ],
)
def test_a_policy_that_is_wrong_is_found(policies: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(changed(policies), COSTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, r"version is 1; expected 2 by the rest of the plan"),
        ({"memory": 5}, r"memory is 5; expected an object"),
        ({"memory": {"budget": 1}}, r"memory.host_bytes_per_s is missing"),
        ({"memory": None}, r"digest is \w+, its content's is \w+; the line was changed"),
    ],
)
def test_a_broken_form_is_named(change: dict[str, object], message: str) -> None:
    values: Any = json.loads(json.dumps(plan_to_json(budgeted())))
    values.update(change)
    with pytest.raises(PlanError, match=message):
        plan_from_json(values)


def test_an_unknown_policy_is_named() -> None:
    values: Any = json.loads(json.dumps(plan_to_json(budgeted())))
    values["microbatches"][2]["recompute"] = "some"
    with pytest.raises(PlanFormError, match=r"microbatches\[2\].recompute is 'some'; expected one"):
        plan_from_json(values)


def test_policies_are_numbered_as_they_are_listed() -> None:
    """The numbers are in digests: a new policy goes to the end."""
    assert POLICIES == ("none", "selective", "full", "offload")
