"""The grid of `scripts/bench/planner`, a corner of it, and its page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "planner"
CORNER = (
    "--clusters", "1x2", "--a-rank", "2", "8", "--workloads", "docs", "--costs", "h100_7b",
    "--schedulers", "dynapar", "homogeneous", "static", "dhp", "--seeds", "2", "--peer-seeds", "1",
    "--repeat", "1", "--syncs", "microbatch",
)  # fmt: skip


def bench(*arguments: str | Path) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "grid.jsonl"
    bench("--out", path, *CORNER)
    return path


def test_a_run_goes_on_where_it_stopped(grid: Path) -> None:
    """2 and 8 samples a rank are both 64 samples here: one cell. Two seeds, of peers one."""
    lines = grid.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["scheduler"], row["seed"]) for row in rows] == [
        ("dynapar", 0), ("dynapar", 1), ("homogeneous", 0), ("homogeneous", 1), ("static", 0),
        ("dhp", 0),
    ]  # fmt: skip
    assert bench("--out", grid, *CORNER) == ""
    short = grid.with_name("short.jsonl")
    short.write_text("\n".join(lines[:5]) + "\n")
    again = json.loads(bench("--out", short, *CORNER))
    assert again | {"cpu_ms": 0} == rows[5] | {"cpu_ms": 0}


def test_rows_hold_what_is_known(grid: Path) -> None:
    ours, *_, peer = [json.loads(line) for line in grid.read_text().splitlines()]
    assert 0 < ours["bound_us"] <= ours["makespan_us"] <= peer["makespan_us"]
    assert ours["cpu_ms"] > 0
    assert ours["expected_us"] > 0.9 * ours["makespan_us"]
    assert (ours["floor"], ours["waves"] > 0, ours["samples"]) == (False, True, 64)
    assert ours["code"] != peer["code"]


def test_the_page_says_what_misses_its_figure(grid: Path) -> None:
    rows = [json.loads(line) for line in grid.read_text().splitlines()]
    made = grid.with_name("made.jsonl")
    for row in rows:
        row |= {"bound_us": 1_000_000, "makespan_us": 1_010_000, "expected_us": 1_020_000}
        row["cpu_ms"] = 2.0
    rows[1]["makespan_us"] = 1_091_000  # 9.1 %: mean 5.05 %, worst seed above 8 %
    rows[3]["makespan_us"] = 1_080_000  # homogeneous is ahead of that
    rows.append(rows[5] | {"seed": 1, "failure": "over capacity: by 1 token", "timeout": False})
    del rows[-1]["makespan_us"], rows[-1]["expected_us"]
    rows.append(rows[-1] | {"scheduler": "verl", "failure": "timeout: no plan", "timeout": True})
    made.write_text("\n".join(map(json.dumps, rows)))
    bench("--out", made, "--write", made.with_suffix(".md"))
    text = made.with_suffix(".md").read_text()
    assert "| h100_7b | microbatch | 1 | **5.0** (of 2.5) | 5.0 (of 6) | **9.1** (of 8) |" in text
    assert "- h100_7b, microbatch: docs on 1x2, 64 samples: mean 5.0 %, worst seed 9.1 %" in text
    assert "dynapar's makespan is **above another's** in 1 of 4 comparisons (homogeneous 1)" in text
    assert "docs on 1x2, 64 samples, seed 1: homogeneous 0.9899" in text
    assert "dynapar's makespan under noise is above no other's in any of 4 comparisons." in text
    assert "| docs | 5.0 / 9.1 |" in text
    assert "| dhp | 2 | 1 | 0 | 1.000 | 1.000 | 1.000 | 1.000 / 1.000 | 1.000 | 2.0 | 2 |" in text
    assert "| verl | 1 | 0 | 1 | - | - | - | - / - | - | 2.0 | 2 |" in text
    assert "- dhp, microbatch, 1 cases; docs on 1x2, 64 samples, seed 1: over capacity" in text
