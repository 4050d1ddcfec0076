"""Runs whose steps take whole groups of samples: cut anywhere, on other ranks, they go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from dynapar.errors import CheckpointError
from dynapar.plan import plan_from_json, validate
from dynapar.train.config import read_run_config
from dynapar.train.loop import train
from dynapar.train.metrics import METRICS, PLANS, read_steps
from tests.distributed import run_ranks
from tests.train.tiny import write_config
from tests.verify.tree_run import write_run

GROUPED = {"samples": 7, "group_by": "prefix"}
PLANNER = {"capacity": 400, "encoder_capacity": 400}


def check_train(rank: int, config: Path) -> None:
    train(read_run_config(config))


@pytest.mark.usefixtures("alone")
def test_a_grouped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = write_run(tmp_path, planner=PLANNER, checkpoint={"folder": "whole"}, batch=GROUPED)
    train(read_run_config(whole))
    dist.destroy_process_group()
    settings = {"planner": PLANNER, "checkpoint": {"folder": "cut"}, "batch": GROUPED}
    cut = write_config(tmp_path, "cut.yaml", steps=2, **settings)
    train(read_run_config(cut))
    dist.destroy_process_group()
    apart = write_config(tmp_path, "apart.yaml", **{**settings, "batch": {"samples": 7}})
    with pytest.raises(CheckpointError, match="the checkpoint's order of samples is one of groups"):
        train(read_run_config(apart))
    dist.destroy_process_group()
    cut = write_config(tmp_path, "cut.yaml", steps=4, **settings)
    run_ranks(check_train, 2, tmp_path, cut)
    found, wanted = (
        list(read_steps(read_run_config(config).checkpoint.folder / METRICS))
        for config in (cut, whole)
    )
    for key in ("ids", "targets"):
        assert [row[key] for row in found] == [row[key] for row in wanted], key
    for key in ("loss", "gradient_norm"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in wanted], rel=1e-4)
    lines = (tmp_path / "whole" / PLANS).read_text().splitlines()
    plans = [plan_from_json(json.loads(line)) for line in lines]
    for plan in plans:
        validate(plan)
    assert sum(len(plan.samples.trees.rows) for plan in plans if plan.samples.trees) >= 4
