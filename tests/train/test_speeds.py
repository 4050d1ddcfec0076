"""On real ranks: a rank slowed twofold gets about half the work, and a checkpoint keeps that."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from dynapar.costs import costs_to_json, load_costs
from dynapar.plan import StepPlan
from dynapar.speeds import FULL, Pace
from dynapar.train import checkpoint, loop
from dynapar.train.config import read_run_config
from dynapar.train.metrics import METRICS, RankTimes, read_steps
from dynapar.train.run import Run
from tests.distributed import run_ranks
from tests.train.tiny import PLANNER, write_run


def slow_run(rank: int, config: Path) -> None:
    """Rank 1's clock says that it takes twice as long as the costs; the other one's, as long."""

    def own_pace(run: Run, plan: StepPlan, times: RankTimes) -> Pace:
        predicted = sum(times.predicted)
        return Pace(predicted, predicted * (1 + run.ranks.rank))

    loop.own_pace = own_pace
    run = read_run_config(config)
    # A rank's process may have begun before this test, with another standard output.
    with (config.parent / f"said_{rank}").open("w") as said, redirect_stdout(said):
        loop.train(run)
    path = checkpoint.find_latest(run.checkpoint.folder)
    assert path is not None
    kept = checkpoint.read_progress(path).loader["speeds"]
    assert isinstance(kept, dict)
    assert kept["published"][0] == FULL
    assert kept["published"][1] == pytest.approx(FULL / 2, rel=0.12)


def test_a_slow_rank_gets_half_the_work(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({**costs_to_json(load_costs(None)), "measured": True}))
    config = write_run(
        tmp_path / "run",
        samples=40,
        steps=20,
        batch={"samples": 24},
        planner=PLANNER,
        costs=str(costs),
    )
    run_ranks(slow_run, 2, tmp_path, config)
    folder = read_run_config(config).checkpoint.folder
    last = read_steps(folder / METRICS)[-1]
    ranks, speeds = last["ranks"], last["speeds"]
    assert isinstance(ranks, list)
    assert speeds == [1.0, pytest.approx(0.5, abs=0.06)]
    assert 0.35 <= sum(ranks[1]["predicted"]) / sum(ranks[0]["predicted"]) <= 0.65
    assert float(str(last["paced_makespan"])) >= float(str(last["makespan"]))
    said = (config.parent / "said_0").read_text()
    assert "rank 1 takes" in said
    assert "rank 0 takes" not in said
