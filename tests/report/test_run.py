"""A report on a run of real ranks, as `dynapar train` leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynapar.costs import costs_to_json, load_costs
from dynapar.report.gather import Question, gather
from dynapar.report.model import Report
from dynapar.report.page import page
from dynapar.report.source import open_source
from dynapar.report.trace import write_trace
from dynapar.train.config import read_run_config
from dynapar.train.loop import train
from tests.distributed import run_ranks
from tests.report.test_page import read
from tests.report.test_trace import check_rules
from tests.train.tiny import write_run


def check_train(rank: int, config: Path) -> None:
    train(read_run_config(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three steps on two ranks; the longest samples need both."""
    place = tmp_path_factory.mktemp("trained")
    costs = place / "costs.json"
    costs.write_text(json.dumps({**costs_to_json(load_costs(None)), "name": "mine"}))
    planner = {"capacity": 300, "encoder_capacity": 64}
    config = write_run(place, steps=3, planner=planner, costs="costs.json")
    run_ranks(check_train, 2, place, config)
    costs.unlink()
    return place / "run"


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return gather(open_source(folder), Question())


def test_a_run_says_all_that_its_report_needs(report: Report) -> None:
    """With the costs that it was planned with, though their file is gone."""
    assert report.notes == ()
    assert report.kind == "run"
    assert [step.step for step in report.steps] == [0, 1, 2]
    assert {2} < {degree for step in report.steps for degree in step.samples_by_degree}
    assert report.compared is not None
    assert report.compared.costs == "mine"
    assert report.compared.difference == 0
    assert report.measured is not None
    assert report.measured.cpu
    assert [step.step for step in report.measured.steps] == [0, 1, 2]
    assert all(rank.microbatches for rank in report.measured.ranks)
    for gantt in report.gantts:
        assert {box.first for box in gantt.measured} == {0, 1}
        for rank, end in enumerate(gantt.measured_steps):
            assert end >= sum(box.seconds for box in gantt.measured if box.first == rank)


def test_its_page_and_trace_are_sound(report: Report, folder: Path, tmp_path: Path) -> None:
    read(page(report))
    write_trace(open_source(folder), tmp_path / "t.json")
    check_rules(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
