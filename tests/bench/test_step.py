"""Three layouts of the same steps on real ranks: what is run, and that it is the same work."""

from __future__ import annotations

import numpy as np
import pytest

from dynapar.bench import step
from dynapar.bench.step import LAYOUTS, Readings, bootstrap, compare_layouts
from dynapar.errors import CheckFailedError
from dynapar.train.config import RunConfig, read_run_config
from tests.verify.small_run import write_small_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    path = write_small_run(
        tmp_path_factory.mktemp("small"), planner={"capacity": 120, "encoder_capacity": 300}
    )
    return read_run_config(path)


def test_the_layouts_run_the_same_samples(config: RunConfig) -> None:
    found = compare_layouts(config, steps=2, repeats=2, ranks=4)
    results = {result.layout: result for result in found.results}
    assert tuple(results) == LAYOUTS
    assert {sum(result.degrees.values()) for result in found.results} == {24}
    ours, best, common = results.values()
    assert ours.ratio == 1.0
    assert ours.interval == (1.0, 1.0)
    assert ours.tokens == best.tokens < common.tokens, "padding is computed"
    assert common.degrees == {4: 24}, "the longest sample needs all four ranks"
    assert common.encoder_tokens == 4 * ours.encoder_tokens == 4 * best.encoder_tokens
    for result in found.results:
        assert result.busy_seconds > 0
        assert result.interval[0] <= result.ratio <= result.interval[1]


def test_another_loss_is_refused(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = (((1.0, 1.0, 1.0),),)
    readings = Readings(busy=ones, wall=ones, loss=(((2.0, 2.0, 2.1),),))
    monkeypatch.setattr(step, "run_on_ranks", lambda *args, **options: [readings] * 4)
    with pytest.raises(
        CheckFailedError, match=r"layout padded gives a loss that is 5\.0e-02 apart"
    ):
        compare_layouts(config, steps=1, repeats=1, ranks=4)


def test_the_interval_holds_the_ratio() -> None:
    draw = np.random.default_rng(0)
    under = draw.uniform(1, 2, 40)
    over = under * draw.uniform(1.2, 1.8, 40)
    low, high = bootstrap(over, under)
    assert 1.2 < low < over.sum() / under.sum() < high < 1.8
    assert bootstrap(over, under) == (low, high)
