"""The fit finds costs that were planted, and writes them in a form that plans by the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.bench.costs import Block, choose_blocks, fit_costs, measure_costs, non_negative_fit
from dynapar.catalog import ModelShape, load_model_shape
from dynapar.costs import coefficients, costs_from_json, costs_to_json
from dynapar.meta import SampleTable
from dynapar.train.config import read_run_config
from tests.train.tiny import write_model
from tests.verify.small_run import write_small_run

FIXED, LINEAR, ATTENTION, ENCODER, SQUARE, HOP = 0.01, 1e-4, 2e-8, 5e-5, 3e-9, 0.004


def table(n: int = 60) -> SampleTable:
    """Two thirds text, one third with two encoder units."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(20, 1500, n)
    media = np.arange(n) % 3 == 0
    return SampleTable(
        ids=tuple(f"s{i}" for i in range(n)),
        llm_tokens=tokens,
        text_tokens=tokens,
        label_tokens=tokens - 1,
        modalities=media.astype(np.uint8),
        unit_offsets=np.cumsum([0, *np.where(media, 2, 0)]).astype(np.int64),
        unit_tokens=draw.integers(16, 2000, 2 * int(media.sum())),
    )


def planted(samples: SampleTable, block: Block) -> float:
    tokens = [int(samples.llm_tokens[row]) for row in block.rows]
    units = [int(unit) for row in block.rows for unit in samples.units(row)]
    return (
        FIXED
        + LINEAR * sum(tokens) / block.degree
        + ATTENTION * sum(n * n for n in tokens) / block.degree
        + ENCODER * sum(units)
        + SQUARE * sum(unit * unit for unit in units)
        + HOP * (block.degree - 1)
    )


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return load_model_shape(str(write_model(tmp_path_factory.mktemp("model") / "model")))


def test_planted_costs_are_found(shape: ModelShape) -> None:
    samples = table()
    blocks = choose_blocks(samples, capacity=2048, encoder_capacity=4096)
    seconds = np.array([planted(samples, block) for block in blocks])
    fit = fit_costs(shape, samples, blocks, seconds, "cpu")
    assert fit.costs.measured
    assert fit.blocks == len(blocks)
    assert fit.worst_error < 1e-6
    read = costs_from_json(costs_to_json(fit.costs))
    assert read == fit.costs
    found = coefficients(read, ranks_per_node=4)
    assert found.fixed == FIXED * 1e6
    assert found.linear_token == pytest.approx(LINEAR * 1e6)
    assert found.attention_pair == pytest.approx(ATTENTION * 1e6)
    assert found.encoder_token == pytest.approx(ENCODER * 1e6)
    assert found.encoder_square == pytest.approx(SQUARE * 1e6)
    assert found.hop == pytest.approx(HOP * 1e6)


def test_blocks_fit_and_hold_all_sizes() -> None:
    samples = table()
    blocks = choose_blocks(samples, capacity=2048, encoder_capacity=4096)
    encoder = samples.encoder_tokens
    for block in blocks:
        rows = list(block.rows)
        assert len(set(rows)) == len(rows)
        assert samples.llm_tokens[rows].sum() <= 2048
        assert encoder[rows].sum() <= 4096
    alone = {block.rows[0] for block in blocks if len(block.rows) == 1 and block.degree == 1}
    fits = encoder <= 4096
    for kind in (encoder == 0, encoder > 0):
        of_kind = np.flatnonzero(fits & kind)
        tokens = samples.llm_tokens[of_kind]
        assert {of_kind[tokens.argmin()], of_kind[tokens.argmax()]} <= alone
    assert any(len(block.rows) > 1 for block in blocks)
    assert {block.degree for block in blocks} == {1, 2}


@given(
    st.lists(st.floats(0, 10), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=4, max_size=8),
)
def test_the_fit_is_not_worse_than_any_other(planted: list[float], rows: list[list[float]]) -> None:
    """Against the coefficients that made the times, and a grid around them."""
    features = np.array(rows) + 0.1
    seconds = features @ np.array(planted) + 0.01

    def error(coefficients: np.ndarray) -> float:
        return float(np.square(features @ coefficients / seconds - 1).sum())

    found = non_negative_fit(features, seconds)
    assert found.min() >= 0
    for scale in (0.5, 0.9, 1.0, 1.1):
        assert error(found) <= error(np.array(planted) * scale) + 1e-9
    assert error(found) <= error(np.zeros(3)) + 1e-9


def test_a_real_measurement(tmp_path: Path) -> None:
    config = read_run_config(write_small_run(tmp_path))
    fit = measure_costs(config, name="here")
    assert fit.costs.name == "here"
    assert fit.costs.measured
    assert fit.blocks > 10
    assert fit.costs.fixed.microbatch + 1 / fit.costs.linear.flops > 0
