from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dynapar.data.index import build_index, read_index
from dynapar.data.materialize import Materializer
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.data.sources import open_source
from dynapar.errors import SourceError
from tests.data.conftest import Demo
from tests.data.small import noise, said, write_clip, write_lines


def everything(materializer: Materializer, demo: Demo, row: int) -> LoadedSample:
    units = len(demo.index.table.units(row))
    return materializer.load(row, units=frozenset(range(units)))


def assert_as_planned(sample: LoadedSample, demo: Demo, row: int) -> None:
    table = demo.index.table
    assert len(sample.input_ids) == len(sample.kinds) == table.llm_tokens[row]
    assert sample.positions.shape == (3, table.llm_tokens[row])
    assert int((sample.kinds == 0).sum()) == table.text_tokens[row]
    assert [len(sample.units[n]) for n in range(len(sample.units))] == list(table.units(row))
    assert sum(m.llm_tokens for m in sample.media) == int((sample.kinds > 0).sum())
    assert sample.targets[-1] == IGNORE


def test_what_is_loaded_is_what_was_planned(demo: Demo) -> None:
    materializer = Materializer(demo.shape, demo.source, demo.index)
    for row in range(0, len(demo.index), 9):
        sample = everything(materializer, demo, row)
        assert (sample.stub, sample.id) == ("", demo.index.table.ids[row])
        assert_as_planned(sample, demo, row)
        learnt = sample.targets != IGNORE
        assert int(learnt.sum()) == demo.index.table.label_tokens[row]
        assert torch.equal(sample.targets[:-1][learnt[:-1]], sample.input_ids[1:][learnt[:-1]])


def test_shards_hold_the_same_samples(demo: Demo, tmp_path: Path) -> None:
    source = open_source(str(demo.folder / "shards" / "shards-*.tar"))
    build_index(source, demo.shape, tmp_path / "i.parquet")
    shards = Materializer(demo.shape, source, read_index(tmp_path / "i.parquet"))
    files = Materializer(demo.shape, demo.source, demo.index)
    for row in range(0, len(demo.index), 25):
        ours, theirs = everything(shards, demo, row), everything(files, demo, row)
        for name in ("input_ids", "targets", "kinds", "positions"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert ours.media == theirs.media
        assert all(torch.equal(ours.units[n], theirs.units[n]) for n in theirs.units)


def small(demo: Demo, folder: Path, **settings: object) -> Materializer:
    """One sample of a picture, a clip and a picture."""
    noise(100, 90).save(folder / "a.png")
    noise(60, 70, 1).save(folder / "b.png")
    write_clip(folder / "v.mp4", 21)
    content = "<image>one<video><image>"
    sample = {
        "id": "s",
        "messages": [{"role": "user", "content": content}, said("Yes")],
        "images": ["a.png", "b.png"],
        "videos": ["v.mp4"],
    }
    source = open_source(str(write_lines(folder / "a.jsonl", [sample])))
    build_index(source, demo.shape, folder / "i.parquet")
    index = read_index(folder / "i.parquet")
    return Materializer(demo.shape, source, index, **settings)  # type: ignore[arg-type]


def test_only_asked_units_are_decoded(demo: Demo, tmp_path: Path) -> None:
    materializer = small(demo, tmp_path)
    whole = materializer.load(0, units=frozenset(range(5)))
    assert [item.units for item in whole.media] == [1, 2, 1]
    for units in (frozenset(), frozenset({2}), frozenset({0, 1}), frozenset({3})):
        part = materializer.load(0, units=units)
        assert set(part.units) == units
        assert all(torch.equal(part.units[n], whole.units[n]) for n in units)
        assert torch.equal(part.positions, whole.positions)
    for name in ("a.png", "v.mp4"):
        (tmp_path / name).unlink()
    assert not materializer.load(0, units=frozenset({3})).stub


def test_pictures_are_the_processors(demo: Demo, tmp_path: Path) -> None:
    sample = small(demo, tmp_path).load(0, units=frozenset({0}))
    processor = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056)
    with Image.open(tmp_path / "a.png") as image:
        theirs = processor(images=image, return_tensors="pt")["pixel_values"]
    assert torch.equal(sample.units[0], theirs)


def damage(folder: Path, fault: str) -> str:
    """Change the source behind the index's back; what the stub says."""
    if fault == "absent":
        (folder / "a.png").unlink()
        return r"images\[0\] 'a\.png': .*a\.png does not exist"
    if fault == "cut":
        data = (folder / "a.png").read_bytes()
        (folder / "a.png").write_bytes(data[: len(data) // 2])
        return r"images\[0\] 'a\.png' in .* cannot be read"
    if fault == "size":
        noise(101, 90).save(folder / "a.png")
        return "is 101 x 90 pixels, but 100 x 90 in its index row"
    if fault == "short":
        write_clip(folder / "v.mp4", 5)
        return r"'v\.mp4' in .* has no frame 5;"
    text = (folder / "a.jsonl").read_text()
    (folder / "a.jsonl").write_text(text.replace("{", "[", 1))
    return "line 1 is not JSON"


@pytest.mark.parametrize("fault", ["absent", "cut", "size", "short", "json"])
def test_samples_that_cannot_be_loaded_become_stubs(demo: Demo, tmp_path: Path, fault: str) -> None:
    materializer = small(demo, tmp_path, quarantine=tmp_path / "q" / "bad.jsonl")
    units = frozenset(range(4))
    good = materializer.load(0, units=units)
    reason = damage(tmp_path, fault)
    stub = materializer.load(0, units=units)
    assert stub.media == good.media
    assert stub.input_ids.shape == good.input_ids.shape
    assert stub.positions.shape == good.positions.shape
    assert (stub.targets == IGNORE).all()
    assert int((stub.kinds == 2).sum()) == int((good.kinds == 2).sum())
    assert {n: x.shape for n, x in stub.units.items()} == {
        n: x.shape for n, x in good.units.items()
    }
    assert not any(x.any() for x in stub.units.values())
    [line] = (tmp_path / "q" / "bad.jsonl").read_text().splitlines()
    assert {"id": "s", "row": 0}.items() <= json.loads(line).items()
    assert re.search(reason, stub.stub)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("one", "o q", r"tokens \d+, but \d+ in its index row"),
        ('"id": "s"', '"id": "t"', "id 't', but 's' in its index row"),
        ("<video><image>", "<image><video>", r"media kinds \[1, 1, 2\], but \[1, 2, 1\]"),
        ("assistant", "user     ", "has role 'user     '"),
    ],
)
def test_numbers_that_differ_from_the_index_are_named(
    demo: Demo, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    """A changed source is refused when it is opened; here it changes after that."""
    materializer = small(demo, tmp_path)
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text.replace(old, new))
    stub = materializer.load(0, units=frozenset()).stub
    assert re.search(reason, stub)


def test_other_roles_with_as_many_tokens_make_a_stub(demo: Demo, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "What is it?"}
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [asked, said("It is a red apple.")]}])
    source = open_source(str(path))
    build_index(source, demo.shape, tmp_path / "i.parquet")
    index = read_index(tmp_path / "i.parquet")
    materializer = Materializer(demo.shape, source, index)
    swap = {"user": "assistant", "assistant": "user"}
    text = path.read_text()
    path.write_text(re.sub("user|assistant", lambda match: swap[match[0]], text))
    stub = materializer.load(0, units=frozenset())
    planned = int(index.table.label_tokens[0])
    assert re.search(rf"targets \d+, but {planned} in its index row", stub.stub)
    assert len(stub.input_ids) == index.table.llm_tokens[0]


def test_stubs_of_all_demo_samples_have_the_planned_form(demo: Demo) -> None:
    materializer = Materializer(demo.shape, demo.source, demo.index)
    for row in range(0, len(demo.index), 7):
        units = frozenset(range(len(demo.index.table.units(row))))
        stub = materializer.stub(row, units=units, reason="why")
        assert stub.stub == "why"
        assert_as_planned(stub, demo, row)
        assert (stub.targets == IGNORE).all()


def test_an_index_of_another_source_is_refused(demo: Demo, tmp_path: Path) -> None:
    small(demo, tmp_path)
    source = open_source(str(tmp_path / "a.jsonl"))
    with pytest.raises(SourceError, match="source has changed"):
        Materializer(demo.shape, source, demo.index)


def test_frames_between_are_not_needed(demo: Demo, tmp_path: Path) -> None:
    """Only the frames of the asked group decide what its patches are."""
    materializer = small(demo, tmp_path)
    first, second = (materializer.load(0, units=frozenset({n})).units[n] for n in (1, 2))
    assert float(first.mean()) < float(second.mean())
