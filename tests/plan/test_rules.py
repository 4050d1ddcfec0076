"""A plan that breaks what it says of itself is refused, with all that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.errors import PlanError
from dynapar.plan import StepPlan, Sync, plan_from_json, plan_to_json, validate
from dynapar.planner import PlannerConfig, assemble
from dynapar.rings import RingRules
from tests.planner.test_rules import table
from tests.test_cli import call

COSTS = load_costs(None)
ANY = RingRules(peer_budget=None)


def made(
    *microbatches: tuple[int, int],
    sync: Sync = "step",
    own: tuple[int, ...] | None = None,
    cluster: str = "2x4",
) -> StepPlan:
    """Microbatch i is on the ranks (first, width) and runs sample i; the first on `own` of them,
    where that is given."""
    given = []
    for row, (first, width) in enumerate(microbatches):
        ranks = tuple(range(first, first + width))
        given.append((ranks, [(row, own if own and row == 0 else ranks)]))
    return assemble(
        table([900] * len(given), [0] * len(given)),
        microbatches=given,
        step=0,
        cluster=Cluster.parse(cluster),
        costs=COSTS,
        config=PlannerConfig(capacity=4096, encoder_capacity=4096, sync=sync, peer_budget=None),
    )


def problems(plan: StepPlan) -> str:
    with pytest.raises(PlanError) as caught:
        validate(plan, COSTS)
    _, _, rest = str(caught.value).partition("is not valid: ")
    return rest.removesuffix(". Plan again, and report this if the planner made it")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            replace(ANY, degrees="pow2"),
            "microbatch 0 has 3 ranks; the plan's rings allow 1, 2, 4, 8; "
            "sample 's0' has 3 ranks; the plan's rings allow 1, 2, 4, 8",
        ),
        (
            replace(ANY, max_degree=2),
            "microbatch 0 has 3 ranks; the plan's rings allow 1, 2; "
            "sample 's0' has 3 ranks; the plan's rings allow 1, 2",
        ),
        (
            replace(ANY, windows="aligned"),
            "microbatch 0 is on ranks 1..3, which do not start at a multiple of 3; the plan's "
            "windows are aligned; sample 's0' is on ranks 1..3, which do not start at a multiple "
            "of 3; the plan's windows are aligned",
        ),
        (
            replace(ANY, peer_budget=1),
            "microbatch 0 has 3 ranks; the plan's rings allow 1; sample 's0' has 3 ranks; the "
            "plan's rings allow 1; rank 1 meets 2 others; peer_budget is 1; rank 2 meets 2 others; "
            "peer_budget is 1; rank 3 meets 2 others; peer_budget is 1",
        ),
    ],
)
def test_rings_that_the_plan_rules_out(rules: RingRules, message: str) -> None:
    plan = made((1, 3))
    validate(plan, COSTS)
    assert problems(replace(plan, rings=rules)) == message


def test_peers_are_counted_over_all_microbatches() -> None:
    """Rank 1 meets 0 and 2; all others meet one."""
    plan = made((0, 2), (1, 2))
    rules = replace(ANY, peer_budget=1)
    assert "rank 1 meets 2 others; peer_budget is 1" in problems(replace(plan, rings=rules))
    assert "rank 0 meets" not in problems(replace(plan, rings=rules))
    validate(replace(plan, rings=replace(ANY, peer_budget=2)), COSTS)


def test_rings_stay_in_their_pod() -> None:
    """A budget of 4 makes pods of two nodes of two."""
    rules = replace(ANY, peer_budget=4)
    validate(replace(made((0, 3), (5, 3), cluster="4x2"), rings=rules), COSTS)
    crossing = replace(made((2, 3), cluster="4x2"), rings=rules)
    where = "is on ranks 2..4, not inside one pod of 4 ranks, which peer_budget 4 leaves"
    assert problems(crossing) == f"microbatch 0 {where}; sample 's0' {where}"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (made((0, 4)), "queues have lengths [0, 1]; equal_counts asks for one"),
        (
            made((0, 4), (0, 8), (4, 4)),
            "microbatch 1 is at places 0 to 1 of its ranks' queues; equal_counts asks for one",
        ),
        (
            made((0, 8), own=(0, 1)),
            "sample 's0' is on 2 of the 8 ranks of its microbatch; equal_counts asks for all",
        ),
        (
            made((0, 4), sync="microbatch"),
            "the queues have 4 dummies; equal_counts asks for none",
        ),
    ],
    ids=["lengths", "places", "shares", "dummies"],
)
def test_counts_that_are_not_equal(plan: StepPlan, message: str) -> None:
    validate(plan, COSTS)
    assert problems(replace(plan, equal_counts=True)) == message


def test_equal_counts_as_they_should_be() -> None:
    for sync in ("step", "microbatch"):
        plan = made((0, 4), (4, 4), (0, 8), sync=sync)
        validate(replace(plan, equal_counts=True), COSTS)


def test_rules_are_written_and_read() -> None:
    rules = RingRules(degrees="pow2", windows="aligned", peer_budget=None, max_degree=4)
    plan = replace(made((0, 4), (4, 4)), rings=rules, equal_counts=True)
    values = json.loads(json.dumps(plan_to_json(plan)))
    assert values["rings"] == {
        "degrees": "pow2", "windows": "aligned", "peer_budget": None, "max_degree": 4,
    }  # fmt: skip
    assert values["equal_counts"] is True
    assert plan_from_json(values) == plan
    other = replace(plan, rings=replace(rules, max_degree=8))
    assert plan_to_json(other)["digest"] != values["digest"]


def test_rules_out_of_range_are_refused() -> None:
    values = plan_to_json(made((0, 4)))
    values["rings"] = {**values["rings"], "peer_budget": -3}  # type: ignore[dict-item]
    with pytest.raises(PlanError) as caught:
        plan_from_json(values)
    assert str(caught.value) == (
        "the plan's rings.peer_budget is -3; expected 0 or more, or none: plan again"
    )


FLAGS = ("--degrees", "pow2", "--windows", "aligned", "--peer-budget", "7", "--equal-counts")


def test_command_line_plans_and_checks_by_the_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plans.jsonl"
    sizes = ("--cluster", "2x4", "--capacity", "8192", "--encoder-capacity", "8192")
    planned = call("plan", "longdoc", *sizes, "--global-batch", "20", *FLAGS, "--out", out)
    assert planned == 0
    assert call("plan", "--check", out) == 0
    values = json.loads(out.read_text())
    assert values["rings"]["peer_budget"] == 7
    tight = replace(plan_from_json(values), rings=RingRules(max_degree=1))
    out.write_text(json.dumps(plan_to_json(tight)))
    capsys.readouterr()
    assert call("plan", "--check", out) == 1
    assert "ranks; the plan's rings allow 1;" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_budget_that_is_no_number(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--cluster", "1x2", "--capacity", "512", "--encoder-capacity", "512")
    assert call(command, "uniform", *sizes, "--global-batch", "4", "--peer-budget", "few") == 2
    assert capsys.readouterr().err == (
        "error: --peer-budget is 'few'; expected a whole number, 0 or more, or none\n"
    )
