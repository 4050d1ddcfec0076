"""A run uses the scheme that it is configured with, says so, and may go on under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynapar.costs import load_costs
from dynapar.data.index import read_index
from dynapar.errors import ConfigError
from dynapar.plan import plan_from_json
from dynapar.rings import RingRules, windows
from dynapar.runtime.order import OrderLog, replay
from dynapar.train.config import read_run_config
from dynapar.train.loop import train
from dynapar.train.metrics import METRICS, PLANS, read_steps
from dynapar.train.origin import measured_on
from dynapar.train.setup import (
    describe_attention,
    make_cluster,
    make_planner,
    make_schemes,
    pool_of,
    pool_windows,
)
from tests.distributed import run_ranks
from tests.train.tiny import write_config, write_run

STEPS = 4
KEPT = {"folder": "run", "every": 2}


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile the planner here: a rank that does may outlast its peers' patience."""
    config = read_run_config(write_run(tmp_path_factory.mktemp("compiled")))
    table = read_index(config.index).table
    make_planner(config, costs=load_costs(None), ranks=4)(table, 0)


def check_train(rank: int, config: Path) -> None:
    train(read_run_config(config))


def rows(config: Path) -> list[Any]:
    return list(read_steps(read_run_config(config).checkpoint.folder / METRICS))


def schemes_of(config: Path) -> list[dict[int, set[str]]]:
    """For each step, the schemes by the degree of the ring that had them."""
    folder = read_run_config(config).checkpoint.folder
    found = []
    for row, line in zip(rows(config), read_steps(folder / PLANS), strict=True):
        plan = plan_from_json(dict(line))  # type: ignore[arg-type]
        of: dict[int, set[str]] = {}
        by_ring: dict[int, set[str]] = {}
        for times, queue in zip(row["ranks"], plan.queues, strict=True):
            assert len(times["schemes"]) == len(queue)
            for number, scheme in zip(queue, times["schemes"], strict=True):
                assert number is not None
                of.setdefault(len(plan.microbatch(number).ranks), set()).add(scheme)
                by_ring.setdefault(number, set()).add(scheme)
        assert all(len(schemes) == 1 for schemes in by_ring.values()), "the ranks of a ring agree"
        found.append(of)
    return found


def communicators(config: Path) -> set[str]:
    paths = sorted(read_run_config(config).checkpoint.folder.glob("order_*.jsonl"))
    logs = [OrderLog.load(path) for path in paths]
    assert len(logs) == 4
    replay(logs)
    return {operation.communicator for log in logs for operation in log.operations}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staged")
    config = write_run(folder, steps=STEPS, checkpoint=KEPT, attention={"scheme": "staged"})
    run_ranks(check_train, 4, folder, config)
    return config


@pytest.mark.parametrize(
    "attention",
    [
        {"scheme": "ulysses"},
        {"scheme": "hybrid", "share": 2, "pool": True},
        {"pool": True, "stages": 1},
    ],
    ids=str,
)
def test_a_run_goes_on_under_another_scheme(
    attention: dict[str, object], staged: Path, tmp_path: Path
) -> None:
    """The gradient is the same, so a checkpoint has no scheme."""
    write_run(tmp_path)
    first = write_config(
        tmp_path, "first.yaml", steps=2, checkpoint=KEPT, attention={"scheme": "staged"}
    )
    run_ranks(check_train, 4, tmp_path, first)
    config = write_config(tmp_path, steps=STEPS, checkpoint=KEPT, attention=attention)
    run_ranks(check_train, 4, tmp_path, config)
    want, got = rows(staged), rows(config)
    assert [row["ids"] for row in got] == [row["ids"] for row in want]
    assert [row["plan_digest"] for row in got] == [row["plan_digest"] for row in want]
    for key in ("loss", "gradient_norm"):
        assert [row[key] for row in got] == pytest.approx([row[key] for row in want], rel=1e-4)
    before, after = schemes_of(config)[:2], schemes_of(config)[2:]
    assert all(of[1] == {"local"} for of in before + after)
    assert all(of[degree] == {"staged"} for of in before for degree in of if degree > 1)
    rings = {degree: of[degree] for of in after for degree in of if degree > 1}
    assert rings, "there are rings in these steps"
    if attention.get("scheme") == "ulysses":
        assert all(found == {"ulysses"} for found in rings.values())
    if attention.get("scheme") == "hybrid":
        expected = {2: {"ulysses"}, 3: {"staged"}, 4: {"hybrid 2x2"}}
        assert rings == {degree: expected[degree] for degree in rings}
    used = communicators(config) - {"data"}
    if attention.get("pool"):
        assert used == {
            "exchange 0-1", "exchange 1-2", "exchange 2-3", "exchange 0-2", "exchange 1-3",
            "exchange 0-3",
        }  # fmt: skip
    else:
        assert used == {"exchange"}


def test_a_run_says_what_it_takes(tmp_path: Path) -> None:
    write_run(tmp_path)
    for attention, said in (
        ({"scheme": "staged"}, ["attention: staged, as configured: degree 2 staged; "]),
        (
            {"pool": True},
            [
                "attention: auto, the cheapest by costs h100_7b (not measured here): degree 2 ",
                "attention: plans price rings as staged; ",
                "attention: a pool of 6 process groups, one for each window",
            ],
        ),
        ({"scheme": "ulysses"}, ["attention: ulysses, as", "attention: plans price", "of 3 or"]),
    ):
        config = read_run_config(write_config(tmp_path, attention=attention))
        schemes = make_schemes(config, costs=load_costs(None), ranks=4)
        lines = describe_attention(config, schemes, ranks=4)
        assert len(lines) == len(said)
        assert all(part in line for part, line in zip(said, lines, strict=True)), lines


def test_a_pool_of_too_many_groups_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    wide = {"capacity": 160, "encoder_capacity": 64}
    path = write_config(tmp_path, planner=wide, ranks_per_node=8, attention={"pool": True})
    config = read_run_config(path)
    with pytest.raises(
        ConfigError,
        match=r"attention.pool is true, and rank \d+ would be in \d\d process groups, one for each "
        r"of the \d+ windows .* expected at most 64. Set planner.windows: aligned",
    ):
        pool_windows(config, 64)
    path = write_config(
        tmp_path,
        planner={**wide, "windows": "aligned"},
        ranks_per_node=8,
        attention={"pool": True},
    )
    config = read_run_config(path)
    found = pool_windows(config, 64)
    assert found == windows(make_cluster(config, 64), RingRules(windows="aligned"))
    path = write_config(
        tmp_path,
        planner={**wide, "peer_budget": 3},
        ranks_per_node=8,
        attention={"pool": True},
    )
    pool = pool_of(read_run_config(path))
    assert pool is not None
    assert {count for _, count in pool(64)} == {2}, "a budget of 3 peers leaves rings of two"
    assert pool_of(read_run_config(write_config(tmp_path))) is None


def test_what_memory_does_not_count_is_said(tmp_path: Path) -> None:
    write_run(tmp_path)
    planner = {"memory": "2GB"}
    for attention, said in (
        ({}, False), ({"scheme": "ulysses"}, True), ({"pool": True}, True)
    ):  # fmt: skip
        config = read_run_config(write_config(tmp_path, planner=planner, attention=attention))
        schemes = make_schemes(config, costs=load_costs(None), ranks=4)
        lines = describe_attention(config, schemes, ranks=4)
        assert any("planner.memory counts the staged exchange" in line for line in lines) == said


def test_schemes_know_the_model_the_precision_and_the_nodes(tmp_path: Path) -> None:
    write_run(tmp_path)
    for precision, itemsize in (("float32", 4), ("bfloat16", 2), ("float64", 8)):
        config = read_run_config(write_config(tmp_path, precision=precision, ranks_per_node=2))
        schemes = make_schemes(config, costs=None, ranks=4)
        assert schemes.itemsize == itemsize
        assert schemes.ranks_per_node == 2
        assert schemes.text is not None
        assert (schemes.text.heads, schemes.text.kv_heads, schemes.text.head_width) == (2, 1, 16)


def test_costs_say_under_which_scheme_they_were_measured(tmp_path: Path) -> None:
    write_run(tmp_path)
    for attention, text in (
        ({}, "staged"),
        ({"scheme": "ulysses"}, "ulysses"),
        ({"scheme": "hybrid", "share": 2}, "hybrid in groups of 2"),
    ):
        config = read_run_config(write_config(tmp_path, attention=attention))
        assert measured_on(config).attention == text
