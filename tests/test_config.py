"""Strict YAML into dataclasses: what is taken, and what each mistake says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dynapar.config import load_config
from dynapar.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    capacity: int
    sync: Literal["step", "microbatch"] = "step"
    gate: float = 0.0
    max_degree: int | None = None

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}; expected 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str
    source: Path
    planner: Planner
    shuffle: bool = True
    seeds: tuple[int, ...] = (0,)
    betas: tuple[float, float] = (0.9, 0.99)
    stages: list[Planner] = field(default_factory=list)
    resume: Planner | None = None
    limit: int | str = "none"
    version: Literal[1, 2] = 1


MINIMAL = "name: a\nsource: data/x.jsonl\nplanner: {capacity: 16_384}\n"


def read(tmp_path: Path, text: str) -> Run:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(Run, path)


def test_defaults_and_nested_sections(tmp_path: Path) -> None:
    planner = Planner(capacity=16384)
    assert read(tmp_path, MINIMAL) == Run(name="a", source=Path("data/x.jsonl"), planner=planner)


def test_every_kind_of_field(tmp_path: Path) -> None:
    text = """
name: "1"
source: ~/x
planner: {capacity: 5, sync: microbatch, gate: 1, max_degree: 3}
shuffle: false
seeds: [1, 2, 3]
betas: [0.5, 1e-4]
stages:
  - capacity: 1
  - capacity: 2
    max_degree: null
resume:
limit: 7
"""
    run = read(tmp_path, text)
    assert run.planner == Planner(capacity=5, sync="microbatch", gate=1.0, max_degree=3)
    assert isinstance(run.planner.gate, float)
    assert run == Run(
        name="1",
        source=Path.home() / "x",
        planner=run.planner,
        shuffle=False,
        seeds=(1, 2, 3),
        betas=(0.5, 1e-4),
        stages=[Planner(capacity=1), Planner(capacity=2)],
        limit=7,
    )


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_their_value(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    text = MINIMAL.replace("16_384", f"1, gate: {value!r}")
    assert read(tmp_path_factory.getbasetemp(), text).planner.gate == value


@pytest.mark.parametrize("word", ["on", "yes", "1:30", "2024-01-01", "0o17", "010", "1e"])
def test_what_only_yaml_1_1_converts_is_text(tmp_path: Path, word: str) -> None:
    assert read(tmp_path, MINIMAL.replace("a\n", f"{word}\n", 1)).name == word


MESSAGES = {
    "unknown key, with the nearest": (
        MINIMAL.replace("{capacity", "{capcity"),
        "run.yaml:3: section 'planner' has no key 'capcity'; the nearest is 'capacity', "
        "all are: capacity, sync, gate, max_degree",
    ),
    "unknown key of the file": (
        MINIMAL + "shufle: true\n",
        "run.yaml:4: the configuration has no key 'shufle'; the nearest is 'shuffle', all are: "
        "name, source, planner, shuffle, seeds, betas, stages, resume, limit, version",
    ),
    "missing key": (
        "name: a\nsource: x\nplanner:\n  gate: 0.5\n",
        "run.yaml:4: section 'planner' lacks 'capacity'; expected an integer",
    ),
    "missing section": (
        "name: a\nsource: x\n",
        "run.yaml:1: the configuration lacks 'planner'; expected a section with the keys "
        "capacity, sync, gate, max_degree",
    ),
    "key given twice": (
        MINIMAL + "name: b\n",
        "run.yaml:4: the configuration has the key 'name' twice; remove one",
    ),
    "text for an integer": (
        MINIMAL.replace("16_384", "16k"),
        "run.yaml:3: planner.capacity is '16k' (str); expected an integer",
    ),
    "bool for an integer": (
        MINIMAL.replace("16_384", "true"),
        "run.yaml:3: planner.capacity is True (bool); expected an integer",
    ),
    "fraction for an integer": (
        MINIMAL.replace("16_384", "1.0"),
        "run.yaml:3: planner.capacity is 1.0 (float); expected an integer",
    ),
    "integer for text": (
        MINIMAL.replace("a\n", "1\n", 1),
        "run.yaml:1: name is 1 (int); expected text (in quotes where it looks like something else)",
    ),
    "number for a bool": (
        MINIMAL + "shuffle: 1\n",
        "run.yaml:4: shuffle is 1 (int); expected true or false",
    ),
    "bool for a number": (
        MINIMAL.replace("16_384", "1, gate: true"),
        "run.yaml:3: planner.gate is True (bool); expected a finite number",
    ),
    "not a number": (
        MINIMAL.replace("16_384", "1, gate: .nan"),
        "run.yaml:3: planner.gate is nan (float); expected a finite number",
    ),
    "infinite": (
        MINIMAL.replace("16_384", "1, gate: -.inf"),
        "run.yaml:3: planner.gate is -inf (float); expected a finite number",
    ),
    "no choice": (
        MINIMAL.replace("16_384", "1, sync: steps"),
        "run.yaml:3: planner.sync is 'steps' (str); expected one of 'step', 'microbatch'",
    ),
    "bool for a choice": (
        MINIMAL + "version: true\n",
        "run.yaml:4: version is True (bool); expected one of 1, 2",
    ),
    "optional": (
        MINIMAL.replace("16_384", "1, max_degree: many"),
        "run.yaml:3: planner.max_degree is 'many' (str); expected an integer",
    ),
    "null for what is required": (
        MINIMAL.replace("a\n", "\n", 1),
        "run.yaml:1: name is empty; expected text (in quotes where it looks like something else)",
    ),
    "value for a section": (
        MINIMAL.replace("{capacity: 16_384}", "16384"),
        "run.yaml:3: section 'planner' is 16384 (int); expected a section with the keys "
        "capacity, sync, gate, max_degree",
    ),
    "section for a value": (
        MINIMAL.replace("a\n", "{b: 1}\n", 1),
        "run.yaml:1: name is a section; expected text (in quotes where it looks like something "
        "else)",
    ),
    "value for a list": (
        MINIMAL + "seeds: 1\n",
        "run.yaml:4: seeds is 1 (int); expected a list of an integer",
    ),
    "item of a list": (
        MINIMAL + "seeds: [1, 2.5]\n",
        "run.yaml:4: seeds[1] is 2.5 (float); expected an integer",
    ),
    "list of another length": (
        MINIMAL + "betas: [0.9]\n",
        "run.yaml:4: betas is a list; expected a list of 2: a finite number, a finite number",
    ),
    "section in a list": (
        MINIMAL + "stages:\n- capacity: 1\n- capacity: 1\n  gat: 0\n",
        "run.yaml:7: section 'stages[1]' has no key 'gat'; the nearest is 'gate', all are: "
        "capacity, sync, gate, max_degree",
    ),
    "union": (
        MINIMAL + "limit: 1.5\n",
        "run.yaml:4: limit is 1.5 (float); expected an integer or text (in quotes where it looks "
        "like something else)",
    ),
    "a section's own check": (
        MINIMAL.replace("{capacity: 16_384}", "\n  capacity: 0"),
        "run.yaml:4: section 'planner': capacity is 0; expected 1 or more",
    ),
    "not YAML": ("name: [a\nsource: b\n", "run.yaml:2: not YAML: expected ',' or ']', but got ':'"),
    "two documents": (
        MINIMAL + "---\n" + MINIMAL,
        "run.yaml:4: not YAML: but found another document",
    ),
    "an object": (
        MINIMAL.replace("a\n", "!!python/name:os.system x\n", 1),
        "run.yaml:1: not YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/name:os.system'",
    ),
    "empty": (
        "# nothing\n",
        "run.yaml: the file is empty; expected a section with the keys name, source, planner, "
        "shuffle, seeds, betas, stages, resume, limit, version",
    ),
}


@pytest.mark.parametrize(("text", "message"), MESSAGES.values(), ids=MESSAGES)
def test_message(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message) + "$"):
        read(tmp_path, text)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.yaml: .*No such"):
        load_config(Run, missing)
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(Run, tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe4")
    with pytest.raises(ConfigError, match="can't decode byte 0xe4"):
        load_config(Run, tmp_path / "latin.yaml")


def test_control_characters_are_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: not YAML: unacceptable character #x0007"):
        read(tmp_path, MINIMAL + "\a")


def test_the_loader_leaves_yaml_as_it_was() -> None:
    assert yaml.safe_load("a: on\nb: 1:30") == {"a": True, "b": 90}
