from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dynapar.errors import PlanError
from dynapar.plan import Sync, plan_digest, plan_from_json, plan_to_json, validate
from dynapar.plan.schema import first_difference
from tests.plan.small import COSTS, plan


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_a_plan_survives_its_json_form(sync: Sync) -> None:
    made = plan(sync)
    values = plan_to_json(made)
    read = plan_from_json(json.loads(json.dumps(values)))
    assert plan_to_json(read) == values
    assert read.microbatches == made.microbatches
    assert (read.queues, read.waves, read.makespan) == (made.queues, made.waves, made.makespan)
    validate(read, COSTS)


def test_json_form_is_that_of_the_design() -> None:
    values: Any = plan_to_json(plan())
    assert list(values) == [
        "version", "step", "sync", "ranks", "ranks_per_node", "capacity", "encoder_capacity",
        "rings", "equal_counts",
        "costs", "samples", "microbatches", "queues", "makespan", "lower_bound", "gap",
        "optimal", "homogeneous", "chosen", "digest", "plan_seconds",
    ]  # fmt: skip
    first = values["microbatches"][0]
    assert first["samples"][1] == {"id": "s1", "ranks": [1], "encoders": [1]}
    assert first["encoder_calls"] == {"vision": 1}
    assert values["queues"] == [[0, 2], [0], [1], [3]]
    parts = first["parts"]
    assert sum(parts.values()) == pytest.approx(first["seconds"], abs=1e-12)


def test_waves_are_part_of_the_json_form() -> None:
    values: Any = plan_to_json(plan("microbatch"))
    assert values["queues"] == [[0, 2], [0, None], [1, None], [None, 3]]
    waves = values["waves"]
    assert [set(wave) for wave in waves] == [{"start", "seconds", "encoder", "llm"}] * 2
    total = sum(wave["encoder"] + wave["llm"] for wave in waves)
    assert values["makespan"] == pytest.approx(total, abs=1e-12)


def test_digest_covers_all_but_the_time_that_planning_took() -> None:
    made = plan()
    assert plan_digest(dataclasses.replace(made, plan_seconds=9.0)) == plan_digest(made)
    for change in (
        {"step": 8},
        {"makespan": made.makespan + 1},
        {"costs": "others"},
        {"optimal": True},
    ):
        assert plan_digest(dataclasses.replace(made, **change)) != plan_digest(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, r"version 3; expected 1 or 2: plan again"),
        ({"makespan": 1.0}, r"step 7: gap is [\d.]+; expected [\d.]+ by the rest of the plan"),
        ({"step": 8}, r"digest is \w+, its content's is \w+; the line was changed"),
        ({"gap": 0.5}, r"step 7: gap is 0.5; expected [\d.]+ by the rest of the plan; the line"),
        ({"extra": 1}, r"step 7: extra is an unknown key; expected none"),
        ({"waves": []}, r"step 7: waves is an unknown key"),
        ({"queues": None}, r"form is broken: queues is None; expected a list. `dynapar plan`"),
        ({"queues": [[0, "a"]]}, r"queues\[0\]\[1\] is 'a'; expected an integer or null"),
        ({"ranks": True}, r"ranks is True; expected an integer"),
        ({"ranks": 4.0}, r"ranks is 4.0; expected an integer"),
        ({"makespan": float("nan")}, r"makespan is nan; expected a number"),
        ({"step": 10**400}, r"step is 1000\d+\.\.\.; expected an integer"),
        ({"sync": "never"}, r"sync is 'never'; expected one of microbatch, step"),
        ({"sync": "microbatch"}, r"waves is missing"),
        ({"chosen": "me"}, r"chosen is 'me'; expected one of dynamic, homogeneous"),
        ({"homogeneous": []}, r"homogeneous is a list; expected an object"),
        ({"digest": 5}, r"digest is 5; expected a string"),
        ({"optimal": 1}, r"optimal is 1; expected a boolean"),
        ({"lower_bound": 1e10}, r"a time of 10000000000.0 seconds; expected at most 9007199254"),
        ({"microbatches": [{"id": 4}]}, r"microbatches\[0\].ranks is missing"),
    ],
)
def test_bad_json_is_refused(change: dict[str, object], message: str) -> None:
    values = {**plan_to_json(plan()), **change}
    with pytest.raises(PlanError, match=message):
        plan_from_json(values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoder_calls": {"vision": 2}}, r"microbatches\[3\].encoder_calls.vision is 2; expect"),
        ({"encoder_calls": {}}, r"microbatches\[3\].encoder_calls.vision is missing; expected 1"),
        ({"note": 1}, r"microbatches\[3\].note is an unknown key"),
        ({"start": 1e-9}, r"microbatches\[3\].start is 1e-09; expected 0.0"),
        ({"id": 4}, r"microbatch ids are not 0, 1, 2"),
        (
            {"samples": [{"id": "x", "ranks": [3], "encoders": []}]},
            r"microbatch 3 runs sample 'x'; expected one of the plan's 6",
        ),
    ],
)
def test_a_tampered_microbatch_is_named(changed: dict[str, object], message: str) -> None:
    values: Any = json.loads(json.dumps(plan_to_json(plan())))
    values["microbatches"][3].update(changed)
    with pytest.raises(PlanError, match=message):
        plan_from_json(values)


@pytest.mark.parametrize(
    ("written", "own", "difference"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2.0}]}, ""),
        ({"a": [1]}, {"a": [1, 2]}, "a has 1 entries; expected 2"),
        ({"a": [0, {"b": True}]}, {"a": [0, {"b": 1}]}, "a[1].b is True; expected 1"),
        ({"a": [1]}, {"a": 1}, "a is a list; expected 1"),
    ],
)
def test_the_first_difference_has_a_path(written: object, own: object, difference: str) -> None:
    assert first_difference(written, own) == difference
