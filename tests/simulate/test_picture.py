from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from dynapar.cluster import Cluster
from dynapar.errors import ConfigError
from dynapar.plan import Sync
from dynapar.simulate.compare import Comparison, Scene, compare
from dynapar.simulate.picture import draw_comparison
from tests.simulate.scenes import COSTS, config, random_table


def comparison(sync: Sync) -> Comparison:
    scene = Scene(
        batches=(random_table(1, 20),),
        cluster=Cluster.parse("1x4"),
        costs=COSTS,
        config=config(sync),
    )
    return compare(scene, ["static", "padded"])


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_a_picture_has_every_colour_of_its_key(sync: Sync, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    draw_comparison(comparison(sync), path, title="a comparison")
    with Image.open(path) as image:
        assert min(image.size) > 500
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    # LLM, encoder, fixed, idle
    expected = {(0x3B, 0x6F, 0xB6), (0x5A, 0xA4, 0x69), (0x8C, 0x6B, 0xB1), (0xD9, 0xD9, 0xD9)}
    assert expected <= colours


def test_an_ending_that_is_no_picture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has the ending '.txt'; expected one of .*png"):
        draw_comparison(comparison("step"), tmp_path / "picture.txt", title="")
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"need matplotlib, .*pip install 'dynapar\[report\]'"):
        draw_comparison(comparison("step"), tmp_path / "picture.png", title="")
