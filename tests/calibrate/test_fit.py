"""The fit finds planted costs through outliers, in a form that the planner prices the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.calibrate.blocks import choose_blocks
from dynapar.calibrate.fit import (
    Found,
    costs_of,
    features,
    fit,
    link_of,
    medians,
    non_negative_fit,
)
from dynapar.calibrate.measure import Timings, spread_of
from dynapar.calibrate.predict import predict
from dynapar.calibrate.transfer import Message
from dynapar.catalog import ModelShape, load_model_shape
from dynapar.costs import (
    Costs,
    HostCosts,
    MeasuredOn,
    check_origin,
    costs_from_json,
    costs_to_json,
    load_costs,
)
from dynapar.errors import CostsError
from dynapar.meta import SampleTable
from tests.train.tiny import write_model

PLANTED = Found(0.012, 1e-4, 5e-8, 1.4e-5, 4e-5, 9e-9, 1e-3, 6e-5)
SIZES = (1_000, 30_000, 200_000, 1_000_000, 4_000_000)
HERE = MeasuredOn(hardware="chip", model="abc", precision="float32", versions="torch 9")


def table(n: int = 60) -> SampleTable:
    """Two thirds text, one third with two encoder units and few targets."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(20, 1500, n)
    media = np.arange(n) % 3 == 0
    return SampleTable(
        ids=tuple(f"s{i}" for i in range(n)),
        llm_tokens=tokens,
        text_tokens=tokens,
        label_tokens=np.where(media, tokens // 5, tokens - 1),
        modalities=media.astype(np.uint8),
        unit_offsets=np.cumsum([0, *np.where(media, 2, 0)]).astype(np.int64),
        unit_tokens=draw.integers(16, 2000, 2 * int(media.sum())),
    )


def timings_of(blocks: np.ndarray, **changes: Any) -> Timings:
    """Ends of a step of 0.75 s, and messages of 2 ms and 1 GB/s."""
    messages = tuple(Message(size, 2e-3 + size / 1e9) for size in SIZES)
    ends = np.full(3, 0.5), np.full(3, 0.25)
    whole = Timings(blocks, *ends, cuda=False, host_rate=7e9, messages=messages)
    return whole._replace(**changes)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return load_model_shape(str(write_model(tmp_path_factory.mktemp("model") / "model")))


def calibrated(samples: SampleTable, shape: ModelShape, *, outliers: int) -> Costs:
    blocks = choose_blocks(samples, capacity=2048, encoder_capacity=4096, ranks=2)
    seconds = np.array([features(samples, block) for block in blocks]) @ np.array(PLANTED)
    seconds[:: len(blocks) // max(outliers, 1)] *= 1.5 if outliers else 1.0
    timings = [timings_of(np.ones((3, len(blocks)))), timings_of(np.ones((3, len(blocks))))]
    return costs_of(fit(samples, blocks, seconds), shape, timings, HERE)


@pytest.mark.parametrize("outliers", [0, 4])
def test_planted_costs_are_found(shape: ModelShape, outliers: int) -> None:
    samples = table()
    costs = calibrated(samples, shape, outliers=outliers)
    for block in choose_blocks(samples, capacity=1500, encoder_capacity=3000, ranks=2):
        if block.recompute == "none":
            expected = float(np.dot(features(samples, block), PLANTED))
            found = predict(samples, block, costs)
            assert found == pytest.approx(expected, rel=0.03 if outliers else 1e-3)
    assert costs.step.closing_step == 0.75
    assert costs.host == HostCosts(bytes_per_s=7e9)
    assert costs.exchange.bytes_per_s_in_node == pytest.approx(1e9)


def test_a_message_that_was_held_up_bends_no_rate() -> None:
    slow = tuple(Message(size, 2e-3 + size / 1e9) for size in SIZES)
    slow = (*slow[:2], slow[2]._replace(seconds=0.9), *slow[3:])
    link = link_of([timings_of(np.ones((3, 1)), messages=slow), timings_of(np.ones((3, 1)))])
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert link.latency == pytest.approx(2e-3, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"closing": np.array([0.5, np.nan, 0.5])}, "closing pass"),
        ({"optimizer": np.array([0.5, np.inf, 0.5])}, "optimizer"),
        ({"host_rate": np.nan}, "copies to the host"),
        ({"messages": (Message(8, np.nan),)}, "messages"),
        ({"messages": (Message(8, 0.0),)}, "messages"),
    ],
    ids=str,
)
def test_other_times_that_are_no_times_are_refused(
    shape: ModelShape, changes: dict[str, object], name: str
) -> None:
    bad = timings_of(np.ones((3, 1)), **changes)
    with pytest.raises(CostsError, match=rf"measured times of {name} are .*; expected finite"):
        costs_of(PLANTED, shape, [bad], HERE)


def test_targets_without_pairs_are_tokens() -> None:
    """The planner counts targets by pairs, so a fit that found no pairs must have no targets."""
    samples = table()
    blocks = choose_blocks(samples, capacity=2048, encoder_capacity=4096, ranks=1)
    planted = PLANTED._replace(pair=0.0, half=0.0)
    seconds = np.array([features(samples, block) for block in blocks]) @ np.array(planted)
    found = fit(samples, blocks, seconds)
    assert found.pair > 0 or found.target == 0


def test_text_blocks_tell_targets_from_tokens() -> None:
    blocks = choose_blocks(table(), capacity=2048, encoder_capacity=4096, ranks=1)
    text = [block for block in blocks if block.kind == "text"]
    shares = [sum(block.targets(table())) / sum(block.lengths) for block in text]
    assert sum(share < 0.25 for share in shares) > 5
    assert sum(share > 0.9 for share in shares) > 5


@given(
    st.lists(st.floats(0, 10), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=4, max_size=8),
)
def test_the_fit_is_not_worse_than_any_other(planted: list[float], rows: list[list[float]]) -> None:
    """Against the coefficients that made the times, and a grid around them."""
    matrix = np.array(rows) + 0.1
    seconds = matrix @ np.array(planted) + 0.01

    def error(coefficients: np.ndarray) -> float:
        return float(np.square(matrix @ coefficients / seconds - 1).sum())

    found = non_negative_fit(matrix, seconds, np.ones(len(seconds)))
    assert found.min() >= 0
    for scale in (0.0, 0.5, 0.9, 1.0, 1.1):
        assert error(found) <= error(np.array(planted) * scale) + 1e-9


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
        medians(blocks, [timings_of(np.ones((3, len(blocks)))), timings_of(times)])


def test_the_spread_of_normal_times_is_their_deviation() -> None:
    times = np.random.default_rng(0).normal(1.0, 0.1, 100_000)
    assert spread_of(times) == pytest.approx(0.0967, rel=0.02)
