"""The trace, by the rules of Chrome's format, and against the plans and measurements."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dynapar.plan import StepPlan, Sync
from dynapar.report.source import open_source
from dynapar.report.trace import MEASURED, PLANNED, STEPS, Written, write_trace
from tests.report.small import plans, row_of, write_plans, write_run


def traced(path: Path, out: Path, **limits: int) -> tuple[Written, list[dict[str, Any]]]:
    written = write_trace(open_source(path), out, **limits)
    whole = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    return written, whole["traceEvents"]


def slices(events: list[dict[str, Any]], process: int) -> dict[int, list[dict[str, Any]]]:
    """By thread, in the order of the file."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == process:
            found[event["tid"]].append(event)
    return found


@pytest.fixture(scope="module")
def made() -> list[StepPlan]:
    return plans(3)


def check_rules(events: list[dict[str, Any]]) -> None:
    """What both viewers ask for: whole times of 0 or more, and slices that nest."""
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    for event in events:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        # Perfetto draws thread 0, and one with its process's number, as one "main thread".
        assert event["tid"] not in (0, event["pid"])
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert isinstance(event["dur"], int)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            assert event["pid"] in processes
    for process in processes:
        for own in slices(events, process).values():
            ends: list[int] = []
            for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
                begin, end = event["ts"], event["ts"] + event["dur"]
                while ends and ends[-1] <= begin:
                    ends.pop()
                assert not ends or end <= ends[-1], f"{event} ends after what it is inside of"
                ends.append(end)


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_planned_slices_are_those_of_the_plans(sync: Sync, tmp_path: Path) -> None:
    own = plans(2, sync=sync)
    written, events = traced(write_plans(tmp_path / "p.jsonl", own), tmp_path / "t.json")
    check_rules(events)
    assert (written.steps, written.left_out) == (2, 0)
    assert written.events == sum(event["ph"] == "X" for event in events)
    by_thread = slices(events, PLANNED)
    steps = by_thread[STEPS]
    assert [event["dur"] for event in steps] == [plan.makespan for plan in own]
    assert steps[1]["ts"] == own[0].makespan
    for plan, step in zip(own, steps, strict=True):
        for rank in range(plan.ranks):
            inside = [
                event
                for event in by_thread[STEPS + rank + 1]
                if event["name"].startswith("microbatch") and event["args"]["step"] == plan.step
            ]
            queue = [entry for entry in plan.queue(rank) if entry is not None]
            assert [event["args"]["microbatch"] for event in inside] == queue
            for event, micro in zip(inside, plan.of_rank(rank), strict=True):
                waits = 0  # for the encoder part of its wave, where it encodes nothing itself
                if sync == "microbatch" and not micro.parts.encoder:
                    waits = next(w.encoder for w in plan.waves if w.start == micro.start)
                assert event["ts"] - step["ts"] == micro.start + waits
                if sync == "step":
                    assert event["dur"] == micro.ticks
    assert slices(events, MEASURED) == {}


def test_measured_slices_are_those_of_the_metrics(made: list[StepPlan], tmp_path: Path) -> None:
    _, events = traced(write_run(tmp_path / "run", made), tmp_path / "t.json")
    check_rules(events)
    by_thread = slices(events, MEASURED)
    assert len(by_thread[STEPS]) == 3
    for rank in range(8):
        names = [event["name"] for event in by_thread[STEPS + rank + 1]]
        assert names.count("waiting for the loader") == 3
        assert names.count("closing pass") == 3
        expected = []
        for plan in made:
            row: Any = row_of(plan)
            expected += row["ranks"][rank]["microbatches"]
        found = [
            event["dur"] for event in by_thread[STEPS + rank + 1] if "microbatch" in event["name"]
        ]
        assert found == pytest.approx([1e6 * seconds for seconds in expected], abs=1)


def test_later_steps_are_left_out_where_there_is_no_room(
    made: list[StepPlan], tmp_path: Path
) -> None:
    path = write_plans(tmp_path / "p.jsonl", made)
    whole, _ = traced(path, tmp_path / "t.json")
    written, events = traced(path, tmp_path / "t.json", most=whole.events - 1)
    check_rules(events)
    assert (written.steps, written.left_out) == (2, 1)
    written, events = traced(path, tmp_path / "t.json", most=1)
    assert (written.steps, written.left_out) == (1, 2)
    assert len(slices(events, PLANNED)) == 9
