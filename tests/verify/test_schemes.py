"""`dynapar verify` runs a configuration with its scheme, and is exact under each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynapar.verify import verify_command
from tests.verify.small_run import write_small_run
from tests.verify.tree_run import write_run


def change(config: Path, **changes: object) -> Path:
    """The same run, other settings."""
    values = yaml.safe_load(config.read_text())
    path = config.with_name(f"changed_{len(list(config.parent.iterdir()))}.yaml")
    path.write_text(yaml.safe_dump({**values, **changes}))
    return path


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 query heads of one key/value head: fewer of both than ranks."""
    return write_small_run(tmp_path_factory.mktemp("small"))


def found_in(config: Path, dtype: str | None, capsys: pytest.CaptureFixture[str]) -> Any:
    verify_command(config, dtype=dtype, json=True)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["passed"]
    assert found["order"] == "holds"
    assert "verify: attention: " in err
    return found


CASES: dict[str, tuple[dict[str, object], str, set[str]]] = {
    "ulysses": ({"scheme": "ulysses"}, "float64", {"ulysses"}),
    "hybrid": (
        {"scheme": "hybrid", "share": 2}, "float64", {"hybrid 2x2", "staged", "ulysses"}
    ),
    "pool": ({"scheme": "hybrid", "share": 2, "pool": True}, "float32", {"staged", "ulysses"}),
    "staged at once": ({"scheme": "staged", "stages": 1}, "float32", {"staged"}),
    "bf16": ({"scheme": "ulysses"}, "bf16", {"ulysses"}),
}  # fmt: skip
"""The section `attention`, the precision, and the schemes that its rings then have."""


@pytest.mark.parametrize("name", CASES)
def test_a_run_passes_under_its_scheme(
    name: str, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attention, dtype, expected = CASES[name]
    changes: dict[str, object] = {"attention": attention}
    if name == "pool":
        # A pool has the run's own windows alone, and random plans keep to them.
        planner = {"capacity": 200, "encoder_capacity": 300, "max_degree": 3}
        changes["planner"] = planner
    found = found_in(change(small_run, **changes), dtype, capsys)
    rings: dict[str, int] = {}
    for plan in found["plans"]:
        for scheme, count in plan["rings"].items():
            rings[scheme] = rings.get(scheme, 0) + count
    assert set(rings) == expected
    if name == "pool":
        assert {degree for plan in found["plans"] for degree in plan["degrees"]} == {"1", "2", "3"}


def test_trees_and_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards so short that `auto` has heads shared."""
    config = write_run(tmp_path, attention={"scheme": "auto"})
    found = found_in(config, "float64", capsys)
    assert "ulysses" in {scheme for plan in found["plans"] for scheme in plan["rings"]}


def test_the_table_names_the_schemes(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = change(small_run, attention={"scheme": "ulysses"}, verify={"steps": 1, "plans": 1})
    verify_command(config, dtype=None, json=False)
    out, err = capsys.readouterr()
    assert "ulyssesx" in out
    assert "attention: the model has 2 query heads, so that in rings of 3 or more" in err
