from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynapar.costs import Costs, coefficients, costs_from_json, costs_to_json, load_costs
from dynapar.errors import CostsError

SMALL: dict[str, Any] = {
    "version": 1,
    "name": "laptop",
    "measured": True,
    "linear": {"parameters": 1e6, "flops": 1e10},
    "attention": {"layers": 4, "hidden": 64, "flops": 1e9, "half_rate_tokens": 32},
    "fixed": {"microbatch": 0.004},
}


def test_the_reference_is_shipped_and_not_measured() -> None:
    costs = load_costs(None)
    assert (costs.name, costs.measured) == ("h100_7b", False)
    assert costs.linear.parameters == 6.5e9


def test_harder_costs_are_shipped_by_name_unless_there_is_such_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harder, reference = load_costs("harder"), load_costs("h100_7b")
    assert reference == load_costs(None)
    assert (harder.name, harder.measured, harder.fixed.microbatch) == ("harder", False, 0.08)
    easy = reference.exchange
    expected = replace(easy, bytes_per_s_in_node=100e9, bytes_per_s_across=12e9, latency=3e-5)
    assert harder.exchange == expected
    same = replace(harder, name="h100_7b", exchange=easy, fixed=reference.fixed)
    assert same == reference
    monkeypatch.chdir(tmp_path)
    Path("harder").write_text(json.dumps(SMALL))
    assert load_costs("harder").name == "laptop"


def test_a_small_measured_set_has_the_same_form(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(SMALL))
    costs = load_costs(path)
    assert costs.measured
    constants = coefficients(costs, ranks_per_node=4)
    assert constants.linear_token == pytest.approx(600.0)
    assert (constants.fixed, constants.linear_rank, constants.llm_floor) == (4000, 0, 0)
    assert constants.wire_in_node == constants.encoder_token == constants.hop == 0.0


@pytest.mark.parametrize("costs", [load_costs(None), costs_from_json(SMALL)], ids=["ref", "small"])
def test_what_is_written_is_read_back(costs: Costs) -> None:
    assert costs_from_json(json.loads(json.dumps(costs_to_json(costs)))) == costs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"costs has version 2; expected 1: calibrate again"),
        ({"linear": None}, r"costs.linear is None; expected an object"),
        ({"linear": {"parameters": 1e6}}, r"costs.linear is incomplete .*flops"),
        ({"linear": {"parameters": 1e6, "flopps": 1e9}}, r"costs.linear has 'flopps'; expected"),
        ({"linear": {"parameters": "x", "flops": 1e9}}, r"linear.parameters is 'x'; expected a"),
        ({"linear": {"parameters": -1, "flops": 1e9}}, r"parameters is -1; expected a finite"),
        ({"linear": {"parameters": 1, "flops": 0}}, r"flops is 0; expected .* above 0"),
        ({"exchange": {"layers": 0}}, r"exchange.layers is 0; expected .* above 0"),
        ({"attentoin": {}}, r"costs has 'attentoin'; expected one of attention"),
        ({"measured": "yes"}, r"needs a text `name` and a true or false `measured`"),
        ({"contention_prior": "x"}, r"contention_prior is 'x'; expected a number"),
        (
            {"exchange": {"bytes_per_s_in_node": 1e9, "bytes_per_s_across": 2e9}},
            r"bytes_per_s_across is 2e\+09, above bytes_per_s_in_node 1e\+09",
        ),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CostsError, match=message):
        costs_from_json({**SMALL, **change})


def test_missing_parts_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match=r"costs has no section 'fixed'; add it"):
        costs_from_json({k: v for k, v in SMALL.items() if k != "fixed"})
    with pytest.raises(CostsError, match=r"none.json': No such file or directory"):
        load_costs(tmp_path / "none.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(CostsError, match=r"bad.json' is not JSON"):
        load_costs(bad)
