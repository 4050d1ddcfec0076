from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynapar.errors import ConfigError
from dynapar.train.config import memory_of, read_run_config
from dynapar.train.setup import planner_config
from tests.train.tiny import write_config, write_model


def test_paths_start_at_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = read_run_config(write_config(tmp_path, costs="costs.json"))
    assert config.model == tmp_path / "model"
    assert config.source == str(tmp_path / "data" / "data.jsonl")
    assert config.index == tmp_path / "index.parquet"
    assert config.costs == tmp_path / "costs.json"
    assert config.checkpoint.folder == tmp_path / "run"


def test_absolute_paths_stay(tmp_path: Path) -> None:
    config = read_run_config(
        write_config(tmp_path, model="/a/model", source="/b/shards-{000..003}.tar")
    )
    assert config.model == Path("/a/model")
    assert config.source == "/b/shards-{000..003}.tar"
    assert config.costs is None


PLANNER = {"capacity": 160, "encoder_capacity": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planner": {**PLANNER, "capacity": 0}}, "capacity is 0; expected 1 or more"),
        ({"planner": {**PLANNER, "sync": "microbatch"}}, "sync is 'microbatch'; expected 'step'"),
        ({"planner": {**PLANNER, "degree": 2}}, "degree is 2 with scheduler 'dynamic'"),
        ({"planner": {**PLANNER, "peer_budget": -1}}, "peer_budget is -1; expected 0 or more, or"),
        ({"planner": {**PLANNER, "max_degree": 0}}, "max_degree is 0; expected 1 or more, or none"),
        ({"planner": {**PLANNER, "degrees": "odd"}}, "degrees is 'odd' .*expected one of 'any'"),
        ({"optimizer": {"lr": 1e-3, "clip_norm": 0.0}}, "clip_norm is 0.0; expected above 0"),
        ({"optimizer": {"lr": 1e-3, "betas": [0.9, 1.0]}}, r"betas are \[0.9, 1.0\]; expected"),
        ({"batch": {"samples": 4, "stub_limit": 1.5}}, "stub_limit is 1.5; expected 0 to 1"),
        (
            {"planner": {**PLANNER, "memory": "2GB"}},
            r"planner.capacity is 160 with memory 2GB; exp",
        ),
        (
            {"planner": {**PLANNER, "recompute": ["full"]}},
            r"recompute is \['full'\] without memory",
        ),
        ({"planner": {"memory": "2GB"}, "recompute": True}, "recompute is true with planner.memo"),
        ({"planner": {"memory": "2 GBit"}}, "memory is '2 GBit'; expected bytes with a unit"),
        ({"planner": {"memory": "1MB"}}, r"memory 1.0 MB, less 8% .* states .* take 1.8 MB"),
        ({"planner": {}}, "capacity is 0; expected 1 or more"),
        ({"lookahead": 1}, "lookahead is 1; expected 2 or more"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0.0; expected above 0"),
        ({"precision": "float64", "recompute": True}, "float64' with recompute; expected"),
        ({"attention": {"scheme": "ring"}}, "scheme is 'ring' .*expected one of 'auto', 'staged'"),
        (
            {"attention": {"scheme": "hybrid"}},
            "section 'attention': share is None with scheme 'hybrid'; expected 2 or more ranks",
        ),
        ({"attention": {"share": 2}}, "share is 2 with scheme 'auto'; expected none, since only"),
        ({"attention": {"stages": 0}}, "stages is 0; expected 1 or more, or none for one a"),
        ({"attention": {"pol": True}}, "no key 'pol'; the nearest is 'pool'"),
        ({"precision": "float16"}, "precision is 'float16' .*expected one of 'float32'"),
        ({"batch": {"samples": 4, "blok": 2}}, "no key 'blok'; the nearest is 'block'"),
    ],
    ids=str,
)
def test_mistakes_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        read_run_config(write_config(tmp_path, **changes))


def test_capacities_follow_from_memory(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    section = {"memory": "1.2GB", "peer_budget": 0, "recompute": ["full", "none"]}
    config = read_run_config(write_config(tmp_path, planner=section))
    limits = memory_of(config)
    assert limits is not None
    assert [own.policy for own in limits.policies] == ["none", "full"]
    assert config.planner.capacity == limits.capacity > 10_000
    assert config.planner.encoder_capacity == limits.encoder_capacity == 4 * limits.capacity
    assert planner_config(config).memory == limits
