from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.planner import PlannerConfig
from dynapar.planning import PlanRequest, plan_steps
from dynapar.simulate.peers import PEERS
from tests.test_cli import call, failed

SMALL = ("--cluster", "1x4", "--global-batch", "24", "--steps", "2", "--draws", "2")


def output(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert call("simulate", *arguments) == 0
    return capsys.readouterr().out


def test_a_workload_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "docs", *SMALL)
    for word in ("dynapar", "homogeneous", "static", "padded", "padded-best", "noisy s", "idle %"):
        assert word in text
    for peer in PEERS:
        assert f"│ {peer} " in text or f"note: {peer}: " in text
    assert "note: megatron and verl see LLM tokens alone, as in use; encoder units are" in text
    assert "docs on 1x4, sync step, 24 samples a step, costs h100_7b (not measured)" in text


def test_json_has_what_the_plans_say(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "video", *SMALL, "--json", "--compare", "static"))
    request = PlanRequest(
        source="video",
        cluster=Cluster.parse("1x4"),
        config=PlannerConfig(capacity=16_384, encoder_capacity=65_536),
        costs=load_costs(None),
        global_batch=24,
        steps=2,
    )
    plans = list(plan_steps(request))
    ours, *others = found["schedulers"]
    assert (ours["scheduler"], [row["scheduler"] for row in others]) == ("dynapar", ["static"])
    assert ours["makespans"] == [plan.makespan / 1e6 for plan in plans]
    assert found["bounds"] == [plan.lower_bound / 1e6 for plan in plans]
    assert found["noise"] == {"microbatch": 0.05, "rank": 0.02, "draws": 2, "slow": []}
    assert (found["costs"], found["measured"], found["sync"]) == ("h100_7b", False, "step")


def test_a_metadata_file_is_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "meta.jsonl"
    lines = [{"id": f"s{k}", "text_tokens": 100 + 50 * k} for k in range(30)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = json.loads(output(capsys, path, *SMALL, "--json", "--compare", "padded"))
    assert found["source"] == str(path)
    assert found["schedulers"][1]["gain"] >= 1.0


def test_a_sweep_has_a_row_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("--sweep", "batch=8,16", "--compare", "static,padded", "--json")
    found = json.loads(output(capsys, "docs", *SMALL, *sweep))
    assert [row["batch"] for row in found["rows"]] == ["8", "16"]
    alone = json.loads(
        output(capsys, "docs", *SMALL[:2], "--global-batch", "16", *SMALL[4:], "--json")
    )
    assert found["rows"][1]["tokens/s"] == alone["schedulers"][0]["tokens/s"]
    for values in ("ranks=1x2,1x4", "capacity=16384,32768"):
        text = output(capsys, "docs", *SMALL, "--sweep", values, "--compare", "static")
        assert "static gain" in text


def test_a_slow_rank_makes_all_slower(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = ("flat", *SMALL[:6], "--draws", "0", "--compare", "static", "--json")
    plain = json.loads(output(capsys, *quiet))
    slow = json.loads(output(capsys, *quiet, "--slow", "1:2"))
    assert plain["noise"] is None
    assert slow["schedulers"][0]["makespan s"] > 1.5 * plain["schedulers"][0]["makespan s"]


def test_costs_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    device = ("--model", "qwen2.5-vl-7b", "--device", "a100")
    text = output(capsys, "docs", *SMALL, "--compare", "static", *device)
    assert "costs qwen2.5-vl-7b@A100 (not measured)" in text


def test_traffic_that_rules_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "flat", *SMALL, "--compare", "static", "--sync", "microbatch")
    assert "in 100 % of dynapar's waves the traffic of sharded parameters is the longest" in text


def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    text = output(capsys, "docs", *SMALL, "--compare", "static", "--picture", path)
    assert f"picture written to {path}" in text
    assert path.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("doc", *SMALL), "source 'doc' cannot be planned"),
        (("docs", *SMALL, "--compare", "best"), "scheduler 'best' is unknown"),
        (("docs", *SMALL, "--sweep", "nodes=1"), "--sweep is 'nodes=1'; expected NAME=VALUE"),
        (("docs", *SMALL, "--sweep", "batch=x"), "--sweep batch has 'x'; expected whole numbers"),
        (
            ("docs", *SMALL, "--sweep", "batch=8", "--picture", "p.png"),
            "--picture draws one comparison",
        ),
        (("docs", *SMALL, "--slow", "x"), "--slow is 'x'; expected RANK:FACTOR"),
        (("docs", *SMALL, "--slow", "9:2"), "slow rank 9 is not there: ranks are 0..3"),
        (("docs", *SMALL, "--device", "H100"), "needs to know what runs on it; name it by --model"),
        (("docs", *SMALL, "--device", "H100", "--costs", "c.json"), "both --costs and --device"),
        (
            ("docs", *SMALL, "--device", "B300", "--model", "qwen3-8b"),
            "device 'B300' is unknown; expected one of A100, H100, H200",
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("simulate", *arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line


def test_costs_of_another_version_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"version": 0, "name": "old"}')
    line = failed(capsys, 2, "simulate", "docs", *SMALL, "--costs", path)
    assert line == f"error: costs '{path}' has version 0; expected 1: calibrate again"


def test_simulating_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from dynapar.simulate_command import simulate_command\n"
        "simulate_command('docs', cluster='1x2', capacity=16384, encoder_capacity=65536,"
        " global_batch=8, steps=1, draws=1, compare='static,padded,verl')\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_scheduler_is_given_the_trees(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "meta.jsonl"
    lines = [
        {"id": f"s{k}", "text_tokens": 500 + 9 * k, "prefix": {"id": f"p{k % 6}", "tokens": 400}}
        for k in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    steps = (*SMALL, "--steps", "1", "--global-batch", "30", "--compare", "static,dhp,entrain")
    apart = json.loads(output(capsys, path, *steps, "--json"))
    trees = json.loads(output(capsys, path, *steps, "--json", "--group-by", "prefix"))
    assert [row["scheduler"] for row in trees["schedulers"]] == [
        row["scheduler"] for row in apart["schedulers"]
    ]
    for one, other in zip(trees["schedulers"], apart["schedulers"], strict=True):
        assert one["makespans"][0] < other["makespans"][0]
    whole = sum(500 + 9 * k for k in range(30))
    assert trees["notes"][-1] == (
        f"30 samples are grouped into 6 trees by prefix, which every scheduler is given: "
        f"{whole - 24 * 400:,} instead of {whole:,} llm tokens (-{960000 / whole:.1f} %), 0 "
        f"instead of 0 encoder tokens (-0.0 %)"
    )
    assert not any("trees" in note for note in apart["notes"])


def test_a_source_without_prefixes_cannot_be_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    assert "samples are to be grouped by prefix, and workload 'docs' says of none" in failed(
        capsys, 2, "simulate", "docs", *SMALL, "--group-by", "prefix"
    )
