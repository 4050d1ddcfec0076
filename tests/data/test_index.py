from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dynapar.catalog import load_model_shape
from dynapar.data.index import build_index, read_index
from dynapar.data.sources import open_source
from dynapar.errors import SampleError, SourceError
from dynapar.index_command import index_command
from tests.data.conftest import Demo
from tests.data.small import noise, said, write_clip, write_lines


def test_rows_hold_what_headers_say(demo: Demo, tmp_path: Path) -> None:
    noise(512, 512).save(tmp_path / "a.png")
    write_clip(tmp_path / "v.mp4", 33)
    sample = {
        "id": "s",
        "messages": [{"role": "user", "content": "<image><video><image>"}, said("Yes")],
        "images": ["a.png", "a.png"],
        "videos": ["v.mp4"],
    }
    path = write_lines(tmp_path / "a.jsonl", [sample, {"id": "t", "messages": [said("Words")]}])
    summary = build_index(open_source(str(path)), demo.shape, tmp_path / "i.parquet")
    index = read_index(tmp_path / "i.parquet")
    table = index.table
    # 33 frames at 8 a second, two of them a second: 8 frames, 4 groups of 64 x 96 pixels.
    assert table.units(0).tolist() == [36 * 36, 4 * 6, 4 * 6, 4 * 6, 4 * 6, 36 * 36]
    assert table.llm_tokens[0] - table.text_tokens[0] == 324 + 4 * 6 + 324
    assert table.modalities.tolist() == [3, 0]
    assert table.encoder_tokens.tolist() == [2 * 1296 + 96, 0]
    assert index.media(0)[1]._asdict() == {
        "kind": 2, "height": 64, "width": 96, "frames": 33, "fps": 8.0, "seconds": 0.0,
    }  # fmt: skip
    assert index.locator(1) == open_source(str(path)).locate()[1]
    assert (summary.samples, summary.kinds) == (2, {"image + video": 1, "text": 1})
    assert summary.llm_tokens == table.llm_tokens.sum()


def test_shards_and_conversations_give_the_same_numbers(demo: Demo, tmp_path: Path) -> None:
    source = open_source(str(demo.folder / "shards" / "shards-{000000..000004}.tar"))
    seen: list[tuple[int, int]] = []
    summary = build_index(
        source, demo.shape, tmp_path / "i.parquet", lambda *done: seen.append(done)
    )
    index = read_index(tmp_path / "i.parquet")
    assert index.table.ids == demo.index.table.ids
    for name in ("llm_tokens", "text_tokens", "label_tokens", "modalities", "unit_tokens"):
        np.testing.assert_array_equal(getattr(index.table, name), getattr(demo.index.table, name))
    assert index.fingerprint != demo.index.fingerprint
    assert seen[-1] == (len(index), len(index))
    assert [note[:3] for note in summary.notes] == ["flv", "mkv", "web"]


def test_indexing_twice_gives_one_fingerprint(demo: Demo, tmp_path: Path) -> None:
    build_index(demo.source, demo.shape, tmp_path / "i.parquet")
    assert read_index(tmp_path / "i.parquet").fingerprint == demo.index.fingerprint


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_two_samples_with_one_id_are_named(demo: Demo, tmp_path: Path, suffix: str) -> None:
    samples = [{"id": "x", "messages": [said("a")]}, {"id": "x", "messages": [said("b")]}]
    path = tmp_path / f"a.{suffix}"
    path.write_text(
        "\n".join(map(json.dumps, samples)) if suffix == "jsonl" else json.dumps(samples)
    )
    first, second = ("line 1", "line 2") if suffix == "jsonl" else ("item 0", "item 1")
    with pytest.raises(SampleError, match=rf"{second} \(sample 'x'\) has the id of .*{first}"):
        build_index(open_source(str(path)), demo.shape, tmp_path / "i.parquet")
    assert not (tmp_path / "i.parquet").exists()


def test_bad_media_stop_the_run_or_are_left_out(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    asked = {"role": "user", "content": "<image>"}
    samples = [
        {"messages": [asked, said("a")], "images": ["bad.png"]},
        {"messages": [said("b")]},
        {"messages": [asked, said("c")], "images": ["absent.png"]},
    ]
    path = write_lines(tmp_path / "a.jsonl", samples)
    said_of = r"a\.jsonl line 1 \(sample 'a-1'\): images\[0\] 'bad\.png' in .* cannot be read"
    with pytest.raises(SampleError, match=said_of):
        build_index(open_source(str(path)), demo.shape, tmp_path / "i.parquet")
    summary = build_index(open_source(str(path)), demo.shape, tmp_path / "i.parquet", skip_bad=True)
    assert (summary.samples, len(summary.skipped)) == (1, 2)
    assert "line 3" in summary.skipped[1]
    assert "absent.png does not exist" in summary.skipped[1]
    write_lines(path, samples[:1])
    with pytest.raises(SampleError, match="none of 1 samples can be read"):
        build_index(open_source(str(path)), demo.shape, tmp_path / "i.parquet", skip_bad=True)


def test_other_settings_and_sources_are_refused(demo: Demo, tmp_path: Path) -> None:
    tokenizer = demo.index.header.tokenizer
    demo.index.check(source=demo.source, shape=demo.shape, tokenizer=tokenizer)
    for path in (demo.folder / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    rules = json.loads((tmp_path / "preprocessor_config.json").read_text())
    rules["max_pixels"] = 1003520
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rules))
    other = load_model_shape(str(tmp_path))
    changed = r"image\.max_pixels was 12845056 and is 1003520\. Run dynapar index"
    with pytest.raises(SourceError, match=changed):
        demo.index.check(source=demo.source, shape=other, tokenizer=tokenizer)
    with pytest.raises(SourceError, match=r"tokenizer\.json was \w+ and is other"):
        demo.index.check(source=demo.source, shape=demo.shape, tokenizer="other")
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [said("a")]}])
    with pytest.raises(SourceError, match=r"source has changed .*source was \w+ and is \w+"):
        demo.index.check(source=open_source(str(path)), shape=demo.shape, tokenizer=tokenizer)


def test_files_that_are_no_index(demo: Demo, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"absent\.parquet does not exist; make it with"):
        read_index(tmp_path / "absent.parquet")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"nothing")
    with pytest.raises(SourceError, match="no Parquet file"):
        read_index(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(SourceError, match="has version None; expected 2"):
        read_index(path)
    columns = pq.read_table(demo.index.path)
    pq.write_table(columns.slice(0, 0), path)
    with pytest.raises(SourceError, match="has 0 rows"):
        read_index(path)


def test_indexing_loads_no_torch(demo: Demo, tmp_path: Path) -> None:
    code = (
        "import sys; from dynapar.catalog import load_model_shape\n"
        "from dynapar.data.index import build_index; from dynapar.data.sources import open_source\n"
        f"build_index(open_source({str(demo.folder / 'data/conversations.jsonl')!r}), "
        f"load_model_shape({str(demo.folder / 'model')!r}), {str(tmp_path / 'i.parquet')!r})\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_metadata_are_indexed_for_planning_alone(demo: Demo, tmp_path: Path) -> None:
    samples: list[dict[str, object]] = [
        {"id": "a", "text_tokens": 12},
        {"id": "b", "text_tokens": 5, "media": [{"kind": "image", "height": 512, "width": 512}]},
    ]
    path = write_lines(tmp_path / "m.jsonl", samples)
    source = open_source(str(path))
    summary = build_index(source, load_model_shape("qwen2.5-vl-7b"), tmp_path / "i.parquet")
    index = read_index(tmp_path / "i.parquet")
    assert (summary.samples, summary.kinds) == (2, {"image": 1, "text": 1})
    assert index.table.llm_tokens.tolist() == [12, 5 + 2 + 324]
    assert index.table.unit_tokens.tolist() == [1296]
    with pytest.raises(SourceError, match="index of metadata alone"):
        index.check(source=source, shape=demo.shape, tokenizer="")
    with pytest.raises(SourceError, match="holds metadata alone"):
        source.locate()


def test_a_source_without_targets_is_said(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"role": "user", "content": "say it"}
    for name, turns in (("none", [asked]), ("some", [asked, said("it")])):
        source = write_lines(tmp_path / f"{name}.jsonl", [{"messages": turns}])
        model = str(demo.folder / "model")
        index_command(str(source), model=model, out=tmp_path / "i.parquet")
        told = f"{source} has 0 targets: there is nothing to learn from it"
        assert (told in capsys.readouterr().err) == (name == "none")
