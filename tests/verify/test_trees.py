"""A run whose steps hold trees of shared prefixes has the gradient of the samples apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapar.catalog import load_model_shape
from dynapar.data.index import build_index, read_index
from dynapar.data.sources import open_source
from dynapar.errors import ConfigError
from dynapar.train.config import read_run_config
from dynapar.train.setup import group_samples
from dynapar.verify import verify_command
from tests.data.small import noise, said, write_clip, write_lines
from tests.train.tiny import write_config, write_model

COLOURS = ("red", "green", "blue", "red green blue " * 9)


def asked(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def write_run(folder: Path, *, named: bool = True, **changes: Any) -> Path:
    """Four answers about one picture, three about one clip, three to one text, two alone.

    The text's first answers are learnt in all three samples, so that targets of the prefix count
    three times. One answer about the picture comes with a picture of its own.
    """
    media = folder / "data" / "media"
    media.mkdir(parents=True)
    noise(40, 32, seed=0).save(media / "0.png")
    noise(24, 24, seed=1).save(media / "1.png")
    write_clip(media / "clip.mp4", 12, height=24, width=32)
    samples: list[dict[str, object]] = []
    for number, colour in enumerate(COLOURS):
        more = "<image>" if number == 2 else ""
        samples.append(
            {
                "id": f"image{number}",
                "messages": [asked("<image>what is it"), said(colour), asked(more), said("ja")],
                "images": ["media/0.png", "media/1.png"][: 1 + len(more) // 7],
                "prefix": "picture",
            }
        )
        if number < 3:
            turns = [asked("say it"), said("red red red"), asked("again"), said(colour)]
            samples.append({"id": f"text{number}", "messages": turns, "prefix": "talk"})
            turns = [asked("<video>and then"), said(f"{colour} blue")]
            samples.append(
                {
                    "id": f"video{number}",
                    "messages": turns,
                    "videos": ["media/clip.mp4"],
                    "prefix": "clip",
                }
            )
    samples.append({"id": "alone0", "messages": [asked("hm"), said("green " * 40)]})
    samples.append({"id": "alone1", "messages": [asked("hm"), said("red")], "prefix": "only one"})
    if not named:
        samples = [{key: each[key] for key in each if key != "prefix"} for each in samples]
    source = write_lines(folder / "data" / "data.jsonl", samples)
    model = write_model(folder / "model")
    build_index(open_source(str(source)), load_model_shape(str(model)), folder / "index.parquet")
    return write_config(
        folder,
        **{
            "planner": {"capacity": 150, "encoder_capacity": 300},
            "batch": {"samples": 12, "group_by": "prefix"},
            "verify": {"steps": 1, "plans": 2},
            **changes,
        },
    )


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
    from dynapar.data.materialize import Materializer

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
