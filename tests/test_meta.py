from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dynapar.catalog import load_model_shape
from dynapar.errors import SampleError, SourceError
from dynapar.meta import AUDIO, IMAGE, VIDEO, read_metadata_jsonl
from tests.samples import table


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_take_and_draw_keep_units_with_their_samples() -> None:
    samples = table([10, 20, 30], [[4, 5], [], [6]])
    taken = samples.take(np.array([2, 0]))
    assert taken.ids == ("s2", "s0")
    assert taken.unit_tokens.tolist() == [6, 4, 5]
    assert taken.units(1).tolist() == [4, 5]
    drawn = samples.draw(np.array([0, 1, 0, 0]))
    assert drawn.ids == ("s0", "s1", "s0#2", "s0#3")
    assert drawn.encoder_tokens.tolist() == [9, 0, 9, 9]


def test_tokens_given_outright_need_no_model(tmp_path: Path) -> None:
    video = {"kind": "video", "llm_tokens": 40, "encoder_tokens": 90, "encoder_units": [60, 30]}
    path = write(
        tmp_path / "m.jsonl",
        {"id": "a", "text_tokens": 12, "label_tokens": 5, "media": [video]},
        {"id": "b", "text_tokens": 7},
        {
            "id": "c",
            "text_tokens": 3,
            "media": [{"kind": "audio", "llm_tokens": 2, "encoder_tokens": 8}],
        },
    )
    read = read_metadata_jsonl(path)
    assert read.ids == ("a", "b", "c")
    assert read.llm_tokens.tolist() == [52, 7, 5]
    assert read.text_tokens.tolist() == [12, 7, 3]
    assert read.label_tokens.tolist() == [5, 6, 2]
    assert read.modalities.tolist() == [VIDEO, 0, AUDIO]
    assert [read.units(i).tolist() for i in range(3)] == [[60, 30], [], [8]]


def test_sizes_become_tokens_by_the_model(tmp_path: Path) -> None:
    shape = load_model_shape("qwen2.5-vl-7b")
    image = {"kind": "image", "height": 512, "width": 512}
    video = {"kind": "video", "frames": 64, "fps": 2, "height": 360, "width": 640}
    path = write(tmp_path / "m.jsonl", {"id": "a", "text_tokens": 10, "media": [image, video]})
    read = read_metadata_jsonl(path, shape)
    one, other = shape.image(512, 512), shape.video(64, 2.0, 360, 640)
    assert read.text_tokens.tolist() == [14]
    assert read.label_tokens.tolist() == [9]
    assert read.llm_tokens.tolist() == [14 + one.llm_tokens + other.llm_tokens]
    assert read.unit_tokens.tolist() == [one.unit_tokens] + [other.unit_tokens] * other.units
    assert read.modalities.tolist() == [IMAGE | VIDEO]


IMAGE_SIZE = {"kind": "image", "height": 5, "width": 5}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], r"line 1 is not an object"),
        ({"text_tokens": 3}, r"line 1 has id None; expected a text"),
        ({"id": "a", "text_tokens": -1}, r"has text_tokens -1; expected a whole number, 0 or"),
        ({"id": "a", "text_tokens": True}, r"has text_tokens True; expected a whole number"),
        ({"id": "a", "text_tokens": 0}, r"'a' has 0 tokens and 0 targets; expected 1 or more"),
        ({"id": "a", "text_tokens": 3, "label_tokens": 3}, r"3 tokens and 3 targets"),
        ({"id": "a", "txt_tokens": 3}, r"has 'txt_tokens'; expected some of"),
        ({"id": "a", "text_tokens": 3, "media": "x"}, r"has media 'x'; expected a list"),
        ({"id": "a", "text_tokens": 3, "media": [{"kind": "smell"}]}, r"has kind 'smell'"),
        ({"id": "a", "text_tokens": 3, "media": [IMAGE_SIZE]}, r"name the model .*--model"),
        (
            {
                "id": "a",
                "text_tokens": 3,
                "media": [
                    {"kind": "image", "llm_tokens": 1, "encoder_tokens": 4, "encoder_units": [3]}
                ],
            },
            r"encoder_units \[3\]; expected whole numbers above 0 that add up to .* 4",
        ),
    ],
)
def test_bad_lines_are_named(row: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=message):
        read_metadata_jsonl(write(tmp_path / "m.jsonl", row))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"kind": "audio", "seconds": 3}, r"model 'qwen2.5-vl-7b' takes no audio"),
        ({"kind": "image", "height": 0, "width": 5}, r"has height 0; expected a whole number, 1"),
        ({"kind": "video", "height": 5, "width": 5, "frames": 3}, r"has fps None; expected"),
    ],
)
def test_bad_sizes_are_named(item: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", {"id": "a", "text_tokens": 3, "media": [item]})
    with pytest.raises(SampleError, match=message):
        read_metadata_jsonl(path, load_model_shape("qwen2.5-vl-7b"))


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none.jsonl: No such file"):
        read_metadata_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(SourceError, match=r"has no samples"):
        read_metadata_jsonl(write(tmp_path / "empty.jsonl"))
    with pytest.raises(SourceError, match=r"is a conversation, not metadata; index the file"):
        read_metadata_jsonl(write(tmp_path / "c.jsonl", {"id": "a", "messages": []}))
    rows = [{"id": "a", "text_tokens": 3}] * 2
    with pytest.raises(SampleError, match=r"id 'a' stands 2 times"):
        read_metadata_jsonl(write(tmp_path / "two.jsonl", *rows))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    with pytest.raises(SampleError, match=r"bad.jsonl, line 1 is not JSON"):
        read_metadata_jsonl(bad)


def test_media_bring_their_own_boundary_tokens(tmp_path: Path) -> None:
    image = {"kind": "image", "height": 480, "width": 640}
    lines = [
        ({"kind": "audio", "seconds": 5}, "qwen2.5-omni-7b", 125, 2, [250]),
        (image, "pixtral-12b", 1200, 30, [1200]),
        (image, "llama-4-scout", 720, 7, [577] * 5),
        (image, "llava-onevision-7b", 2929, 0, [729] * 5),
    ]
    for item, model, llm, boundary, units in lines:
        path = write(tmp_path / "m.jsonl", {"id": "a", "text_tokens": 3, "media": [item]})
        table = read_metadata_jsonl(path, load_model_shape(model))
        assert (table.text_tokens[0], table.llm_tokens[0]) == (3 + boundary, 3 + boundary + llm)
        assert table.units(0).tolist() == units


def test_several_images_of_a_sample_are_not_tiled_by_llava(tmp_path: Path) -> None:
    image = {"kind": "image", "height": 480, "width": 640}
    path = write(tmp_path / "m.jsonl", {"id": "a", "text_tokens": 3, "media": [image, image]})
    table = read_metadata_jsonl(path, load_model_shape("llava-onevision-7b"))
    assert (table.llm_tokens[0], table.units(0).tolist()) == (3 + 2 * 730, [729, 729])
