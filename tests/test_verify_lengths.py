from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dynapar.catalog import load_model_shape
from dynapar.data.indexfile import Medium
from dynapar.data.records import MediaFile
from dynapar.errors import CheckFailedError, ModelError
from dynapar.verify_lengths import verify_lengths_command
from tests.data.small import noise, said, write_clip, write_lines
from tests.test_catalog import CONFIG


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    Qwen2VLImageProcessorPil(max_pixels=50176).save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    samples = []
    for number, (high, wide) in enumerate([(40, 90), (300, 200), (500, 500)]):
        noise(high, wide, number).save(tmp_path / f"{number}.png")
        samples.append(
            {
                "id": f"s{number}",
                "messages": [{"role": "user", "content": "<image>what"}, said("that")],
                "images": [f"{number}.png"],
            }
        )
    return write_lines(tmp_path / "a.jsonl", samples)


def test_equal_lengths_are_counted(
    source: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify_lengths_command(str(source), model=str(model), json=True)
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "samples": 3,
        "compared": 3,
        "differences": 0,
        "not compared": 0,
        "left": {},
        "list": [],
    }


def test_a_difference_is_listed_and_fails(
    source: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import dynapar.verify_lengths as module

    shape = load_model_shape(str(model))
    assert shape.image(300, 200).llm_tokens != shape.image(40, 90).llm_tokens
    before = module._medium
    sizes = {"0.png": (300, 200)}

    def wrong(file: MediaFile) -> Medium:
        size = before(file)
        high, wide = sizes.get(file.path.name, (size.height, size.width))
        return size._replace(height=high, width=wide)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_medium", wrong)
        with pytest.raises(CheckFailedError, match="1 of 3 items differ"):
            verify_lengths_command(str(source), model=str(model), json=True)
    (item,) = json.loads(capsys.readouterr().out)["list"]
    assert (item["id"], item["item"]) == ("s0", "images[0] '0.png'")
    assert item["planned"] != item["real"]


def test_videos_without_torchvision_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    write_clip(tmp_path / "v.mp4", 24)
    noise(40, 90).save(tmp_path / "0.png")
    sample = {
        "id": "s",
        "messages": [{"role": "user", "content": "<image><video>what"}, said("that")],
        "images": ["0.png"],
        "videos": ["v.mp4"],
    }
    source = write_lines(tmp_path / "a.jsonl", [sample])
    verify_lengths_command(str(source), model=str(model), json=True)
    found = json.loads(capsys.readouterr().out)
    if found["not compared"]:
        assert (found["compared"], list(found["left"].values())) == (1, [1])
        assert "torchvision" in next(iter(found["left"]))
    else:
        assert found["compared"] == 2


def test_a_preset_has_no_processor_to_run(source: Path) -> None:
    with pytest.raises(ModelError, match="is a preset; expected a model folder"):
        verify_lengths_command(str(source), model="qwen2.5-vl-7b")
