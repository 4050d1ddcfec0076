from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dynapar.attention.exchange import Transport
from dynapar.costs import load_costs
from dynapar.data.index import read_index
from dynapar.errors import ConfigError, ModelError
from dynapar.rings import RingRules
from dynapar.runtime.order import OrderLog
from dynapar.train.config import OptimizerSection, read_run_config
from dynapar.train.setup import (
    join_ranks,
    load_model,
    make_cluster,
    make_optimizer,
    make_planner,
)
from tests.distributed import TIMEOUT, run_ranks
from tests.train.tiny import write_config, write_model, write_run


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    one, same, other = (load_model(folder, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_weights_of_the_folder_win(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    model = load_model(folder, seed=1)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)
    loaded = load_model(folder, seed=2)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    saved = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, saved[name].float()), name


def test_a_double_model_is_double_throughout(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "model"), seed=0, precision="float64")
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64}


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model in .* Expected a folder"):
        load_model(tmp_path, seed=0)
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen9"]}))
    with pytest.raises(ModelError, match=r"architectures is \['Qwen9'\]; expected one class"):
        load_model(folder, seed=0)


def test_matrices_alone_decay(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "model"), seed=0)
    optimizer = make_optimizer(model, OptimizerSection(lr=0.1, weight_decay=0.5))
    for group in optimizer.param_groups:
        assert {p.ndim > 1 for p in group["params"]} == {group["weight_decay"] == 0.5}
    counted = sum(len(group["params"]) for group in optimizer.param_groups)
    assert counted == len(list(model.parameters()))


def test_ranks_fill_whole_nodes(tmp_path: Path) -> None:
    config = read_run_config(write_config(tmp_path, ranks_per_node=2))
    assert (make_cluster(config, 6).nodes, make_cluster(config, 6).ranks_per_node) == (3, 2)
    with pytest.raises(ConfigError, match="3 ranks are no multiple of ranks_per_node 2"):
        make_cluster(config, 3)
    whole = read_run_config(write_config(tmp_path))
    assert (make_cluster(whole, 3).nodes, make_cluster(whole, 3).ranks_per_node) == (1, 3)


@pytest.mark.parametrize(
    ("planner", "degrees"),
    [
        ({}, None),
        ({"max_degree": 3}, None),
        ({"scheduler": "homogeneous", "degree": 4}, {4}),
        ({"scheduler": "random"}, None),
        ({"degrees": "pow2", "windows": "aligned", "peer_budget": 3, "equal_counts": True}, None),
    ],
    ids=str,
)
def test_the_planner_is_the_configured_one(
    planner: dict[str, object], degrees: set[int] | None, tmp_path: Path
) -> None:
    section = {"capacity": 160, "encoder_capacity": 64, **planner}
    config = read_run_config(write_run(tmp_path, planner=section))
    table = read_index(config.index).table
    plan = make_planner(config, costs=load_costs(None), ranks=4)(table, 7)
    found = {len(place.ranks) for micro in plan.microbatches for place in micro.placements}
    assert (plan.step, plan.capacity, plan.ranks) == (7, 160, 4)
    assert degrees is None or found == degrees
    assert plan.equal_counts == planner.get("equal_counts", False)
    assert plan.rings == RingRules(
        degrees="pow2" if "degrees" in planner else "any",
        windows="aligned" if "windows" in planner else "any",
        peer_budget=3 if "peer_budget" in planner else 64,
        max_degree=3 if "max_degree" in planner else None,
    )
    assert max(found) <= int(str(planner.get("max_degree", 4)))


def check_groups(rank: int) -> OrderLog:
    ranks = join_ranks(timeout=TIMEOUT, device=torch.device("cpu"))
    assert isinstance(ranks.transport, Transport)
    groups = [dist.group.WORLD, ranks.transport.group, ranks.control]
    assert len({id(group) for group in groups}) == 3
    assert None not in groups
    assert all(dist.get_process_group_ranks(group) == [0, 1] for group in groups)
    return ranks.log


def test_gradients_exchanges_and_control_have_a_group_each(tmp_path: Path) -> None:
    run_ranks(check_groups, 2, tmp_path)
