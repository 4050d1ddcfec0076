"""A run whose steps hold trees of shared prefixes has the gradient of the samples apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dynapar.catalog import load_model_shape
from dynapar.data.index import read_index
from dynapar.data.materialize import Materializer
from dynapar.data.sources import open_source
from dynapar.errors import ConfigError
from dynapar.train.config import read_run_config
from dynapar.train.setup import group_samples
from dynapar.verify import verify_command
from tests.verify.tree_run import write_run


def test_conversations_say_what_they_share_and_the_index_how_much(tmp_path: Path) -> None:
    config = read_run_config(write_run(tmp_path))
    table = read_index(config.index).table
    prefixes = table.prefixes
    assert prefixes is not None
    of = dict(zip(table.ids, range(len(table)), strict=True))
    units = {name: int(prefixes.units[row]) for name, row in of.items()}
    groups = len(table.units(of["video0"]))
    assert units == {
        **{f"image{n}": 1 for n in range(4)},
        **{f"text{n}": 0 for n in range(3)},
        **{f"video{n}": groups for n in range(3)},
        "alone0": 0,
        "alone1": 0,
    }
    shape = load_model_shape(str(config.model))
    source = open_source(config.source)
    loader = Materializer(shape, source, read_index(config.index))
    whole = [loader.load(row, units=frozenset()) for row in range(len(table))]
    for name, others in (("image0", "image1"), ("text0", "text2"), ("video1", "video2")):
        size = int(prefixes.tokens[of[name]])
        one, other = whole[of[name]].input_ids, whole[of[others]].input_ids
        assert one[:size].equal(other[:size])
        assert size > 5
    assert prefixes.tokens[of["alone1"]] == table.llm_tokens[of["alone1"]] - 1
    grouped = group_samples(config, table.draw(np.arange(len(table))), ranks=4)
    assert grouped.trees is not None
    assert len(grouped.trees.rows) == 3


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12)])
def test_trees_have_the_gradient_of_their_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, tolerance: float
) -> None:
    verify_command(write_run(tmp_path), dtype=dtype, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["batches"][0]["samples"] == {"image": 4, "text": 5, "video": 3}
    for plan in found["plans"]:
        assert sum(plan["degrees"].values()) == 5
        assert plan["worst"] < tolerance


def test_groups_of_a_source_that_names_none_are_refused(tmp_path: Path) -> None:
    config = write_run(tmp_path, named=False)
    with pytest.raises(ConfigError, match="samples are to be grouped by prefix, and the source"):
        verify_command(config, dtype=None, json=False)
