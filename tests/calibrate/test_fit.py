"""The fit finds planted costs through outliers, in a form that the planner prices the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dynapar.calibrate.blocks import choose_blocks
from dynapar.calibrate.fit import Found, costs_of, features, fit, medians
from dynapar.calibrate.measure import Timings, spread_of
from dynapar.calibrate.predict import predict
from dynapar.catalog import ModelShape, load_model_shape
from dynapar.costs import (
    Costs,
    MeasuredOn,
    check_origin,
    costs_from_json,
    costs_to_json,
    load_costs,
)
from dynapar.errors import CostsError
from dynapar.meta import SampleTable
from tests.bench.test_costs import table
from tests.train.tiny import write_model

PLANTED = Found(0.012, 1e-4, 5e-8, 1.4e-5, 4e-5, 9e-9, 1e-3)
HERE = MeasuredOn(hardware="chip", model="abc", precision="float32", versions="torch 9")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return load_model_shape(str(write_model(tmp_path_factory.mktemp("model") / "model")))


def calibrated(samples: SampleTable, shape: ModelShape, *, outliers: int) -> Costs:
    blocks = choose_blocks(samples, capacity=2048, encoder_capacity=4096, ranks=2)
    seconds = np.array([features(samples, block) for block in blocks]) @ np.array(PLANTED)
    seconds[:: len(blocks) // max(outliers, 1)] *= 1.5 if outliers else 1.0
    timings = Timings(np.ones((3, len(blocks))), np.full(3, 0.5), np.full(3, 0.25), False)
    return costs_of(fit(samples, blocks, seconds), shape, [timings], HERE)


@pytest.mark.parametrize("outliers", [0, 4])
def test_planted_costs_are_found(shape: ModelShape, outliers: int) -> None:
    samples = table()
    costs = calibrated(samples, shape, outliers=outliers)
    for block in choose_blocks(samples, capacity=1500, encoder_capacity=3000, ranks=2):
        if block.recompute == "none":
            expected = float(np.dot(features(samples, block), PLANTED))
            found = predict(samples, block, costs)
            assert found == pytest.approx(expected, rel=0.02 if outliers else 1e-3)
    assert costs.step.closing_step == 0.75


def test_a_file_keeps_where_it_was_measured(shape: ModelShape) -> None:
    costs = calibrated(table(), shape, outliers=0)
    assert costs_from_json(json.loads(json.dumps(costs_to_json(costs)))) == costs
    check_origin(costs, HERE)
    other = MeasuredOn(hardware="other", model="abc", precision="float32", versions="torch 8")
    with pytest.raises(CostsError, match=r"hardware 'chip'; expected 'other', as here.*calibrate"):
        check_origin(costs, other)
    check_origin(load_costs(None), other)


def test_a_file_of_before_was_measured_on_staged_rings(shape: ModelShape) -> None:
    values = json.loads(json.dumps(costs_to_json(calibrated(table(), shape, outliers=0))))
    assert values["measured_on"].pop("attention") == "staged"
    found = costs_from_json(values).measured_on
    assert found is not None
    assert found.attention == "staged"
    values["measured_on"]["attention"] = 3
    with pytest.raises(CostsError, match=r"expected texts hardware, .*, attention: cal"):
        costs_from_json(values)


def test_a_file_that_was_cut_off_is_refused(shape: ModelShape, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs_to_json(calibrated(table(), shape, outliers=0)))[:-20])
    with pytest.raises(CostsError, match=r"is not JSON .* or run `dynapar calibrate`"):
        load_costs(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_a_time_that_is_no_time_is_refused(bad: float) -> None:
    blocks = choose_blocks(table(), capacity=512, encoder_capacity=2048, ranks=1)
    times = np.ones((3, len(blocks)))
    times[1, 2] = bad
    with pytest.raises(CostsError, match=r"expected finite seconds above 0\. Calibrate again"):
        medians(blocks, [Timings(times, np.ones(3), np.ones(3), False)])


def test_the_spread_of_normal_times_is_their_deviation() -> None:
    times = np.random.default_rng(0).normal(1.0, 0.1, 100_000)
    assert spread_of(times) == pytest.approx(0.0967, rel=0.02)
