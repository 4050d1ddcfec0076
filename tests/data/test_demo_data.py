from __future__ import annotations

import filecmp
import json
from pathlib import Path

import numpy as np
from transformers import AutoConfig, Qwen2_5_VLConfig

from tests.data.conftest import Demo, build_demo


def differing(a: Path, b: Path) -> list[str]:
    """Files that are not in both folders with the same bytes."""
    seen = filecmp.dircmp(a, b)
    found = [*seen.left_only, *seen.right_only]
    found += filecmp.cmpfiles(a, b, seen.common_files, shallow=False)[1]
    return found + [name for sub in seen.common_dirs for name in differing(a / sub, b / sub)]


def test_the_script_gives_the_same_bytes_each_time(demo: Demo, tmp_path: Path) -> None:
    assert "already there" in build_demo(demo.folder)
    build_demo(tmp_path / "again")
    assert differing(demo.folder, tmp_path / "again") == ["index.parquet"]


def test_the_data_are_as_varied_as_promised(demo: Demo) -> None:
    table = demo.index.table
    assert len(table) >= 400
    text, image, video = (table.modalities == bit for bit in (0, 1, 2))
    assert min(text.sum(), image.sum(), video.sum()) >= 40
    lengths = table.llm_tokens[text]
    assert 60 <= lengths.min() <= 100
    assert 5500 <= lengths.max() <= 6000
    longest = np.sort(lengths)[-len(lengths) // 20 :]
    assert longest.sum() > 0.2 * lengths.sum()
    pictures = np.diff(table.unit_offsets)[image]
    assert set(pictures) >= {1, 2, 3, 4}
    frames = [
        m.tokens(demo.shape).frames
        for row in np.flatnonzero(video)
        for m in demo.index.media(int(row))
    ]
    assert min(map(len, frames)) == 4
    assert max(map(len, frames)) >= 60
    assert max(table.units(int(row)).max() for row in np.flatnonzero(image)) >= 4 * 1100


def test_the_model_folder_is_a_small_qwen(demo: Demo) -> None:
    config = AutoConfig.from_pretrained(demo.folder / "model")
    assert isinstance(config, Qwen2_5_VLConfig)
    assert demo.shape.vision.window == 8
    assert demo.shape.text.vocabulary == 4096
    assert len(demo.shape.vision.full_layers) < demo.shape.vision.layers


def test_five_shards_hold_all_samples(demo: Demo) -> None:
    assert len(list((demo.folder / "shards").glob("*.tar"))) == 5
    manifest = json.loads((demo.folder / "manifest.json").read_text())
    assert manifest["samples"] == len(demo.index)


def test_every_package_has_a_licence(demo: Demo) -> None:
    text = (demo.folder / "LICENSES.md").read_text()
    manifest = json.loads((demo.folder / "manifest.json").read_text())
    for package in set(manifest["made_by"]) - {"layout", "seed", "python"}:
        assert f"| {package} | {manifest['made_by'][package]} | " in text
    assert "Python standard library" in text
