"""`verify-lengths` with the processors of every family, on real files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynapar.catalog import load_model_shape
from dynapar.data.index import build_index
from dynapar.data.sources import open_source
from dynapar.errors import CheckFailedError
from dynapar.verify_lengths import verify_lengths_command
from tests.data.folders import FAMILIES, LIKE_LLAMA, write_family, write_text_family
from tests.data.small import noise, said, write_clip, write_lines
from tests.data.test_audio import write_tone

SIZES = [(40, 90), (300, 200), (500, 500), (700, 260), (336, 1344)]


def write_pictures(folder: Path) -> Path:
    """Samples of one image, of two, and of text."""
    samples: list[dict[str, object]] = [
        {"id": "text", "messages": [{"role": "user", "content": "Hi"}, said("yes")]}
    ]
    for number, (high, wide) in enumerate(SIZES):
        noise(high, wide, number).save(folder / f"{number}.png")
        images = [f"{number}.png"] if number < 3 else [f"{number}.png", "0.png"]
        asked = {"role": "user", "content": "<image>" * len(images) + "what"}
        samples.append({"id": f"s{number}", "messages": [asked, said("that")], "images": images})
    return write_lines(folder / "a.jsonl", samples)


def report(capsys: pytest.CaptureFixture[str], source: Path, model: Path) -> dict[str, object]:
    verify_lengths_command(str(source), model=str(model), json=True)
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


EQUAL = {"samples": 6, "compared": 8, "differences": 0, "not compared": 0, "left": {}, "list": []}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama-4-scout"])
def test_images_and_text_of_every_family_are_compared(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, model = write_pictures(tmp_path), write_family(tmp_path / "model", name)
    assert report(capsys, source, model) == EQUAL


TORCHVISION = """
from enum import Enum
import torch
from torch.nn import functional

class InterpolationMode(Enum):
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(7)

def resize(image, size, interpolation=None, antialias=True):
    flat = image.reshape(-1, *image.shape[-3:]).float()
    made = functional.interpolate(flat, size=tuple(size), mode="bilinear")
    return made.reshape(*image.shape[:-2], *size).to(image.dtype)

def pad(image, padding, fill=0, padding_mode="constant"):
    left, top, right, bottom = padding
    flat = image.reshape(-1, *image.shape[-3:])
    made = functional.pad(flat, (left, right, top, bottom))
    return made.reshape(*image.shape[:-2], *made.shape[-2:])

def normalize(image, mean, std, inplace=False):
    return image

def grayscale_to_rgb(image):
    return image

def to_dtype(image, dtype, scale=False):
    return image.to(dtype)

def pil_to_tensor(image):
    import numpy
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)

def to_image(image):
    return pil_to_tensor(image)
"""
"""Of torchvision, what decides or needs sizes; colours are left as they are."""


def write_torchvision(folder: Path) -> Path:
    """A package that stands for torchvision, whose own wheels are built for CUDA."""
    v2 = folder / "torchvision" / "transforms" / "v2"
    v2.mkdir(parents=True)
    (v2 / "functional.py").write_text(TORCHVISION)
    (v2 / "__init__.py").write_text("from . import functional\n")
    (v2.parent / "functional.py").write_text("from .v2.functional import *\n")
    mode = "from .v2.functional import InterpolationMode\nfrom . import v2\n"
    (v2.parent / "__init__.py").write_text(mode)
    (v2.parents[1] / "__init__.py").write_text("__version__ = '0.25.0'\nfrom . import transforms\n")
    (v2.parents[1] / "io.py").write_text("")
    meta = folder / "torchvision-0.25.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.25.0\n")
    return folder


VIDEO_FAMILIES = (
    *("qwen2.5-vl-3b", "qwen3-vl-2b", "qwen2.5-omni-3b", "internvl3-1b"),
    *("llava-onevision-0.5b", "smolvlm-256m"),
)


def test_videos_and_llama_4_are_compared_where_there_is_torchvision(tmp_path: Path) -> None:
    """In one process of its own, since transformers looks for torchvision once."""
    source = write_pictures(tmp_path)
    samples = []
    for number, (frames, fps) in enumerate([(24, 8), (70, 10), (9, 5)]):
        write_clip(tmp_path / f"{number}.mp4", frames, height=96, width=160, fps=fps)
        asked = {"role": "user", "content": "<video>what"}
        samples.append({"messages": [asked, said("it")], "videos": [f"{number}.mp4"]})
    videos = write_lines(tmp_path / "videos.jsonl", samples)
    runs = [(str(source), str(write_family(tmp_path / "llama", "llama-4-scout")))]
    runs += [(str(videos), str(write_family(tmp_path / name, name))) for name in VIDEO_FAMILIES]
    code = (
        "import sys; from dynapar.verify_lengths import verify_lengths_command as verify\n"
        f"for source, model in {runs!r}: verify(source, model=model, json=True)"
    )
    made = write_torchvision(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(made)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found[0] == EQUAL
    for one in found[1:]:
        assert (one["compared"], one["differences"], one["left"]) == (3, 0, {})


def test_audio_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tone(tmp_path / "a.wav", 50_001)
    write_tone(tmp_path / "b.flac", 441_000, rate=44100)
    asked = {"role": "user", "content": "<audio>Hi<audio>"}
    sample = {"messages": [asked, said("yes")], "audios": ["a.wav", "b.flac"]}
    source = write_lines(tmp_path / "a.jsonl", [sample])
    model = write_family(tmp_path / "model", "qwen2.5-omni-3b")
    settings = json.loads((model / "preprocessor_config.json").read_text())
    settings |= {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    found = report(capsys, source, model)
    assert (found["compared"], found["differences"], found["left"]) == (2, 0, {})


def test_text_of_models_without_media_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specials = ("<bos>", "<|start|>", "<|end|>", "<|eot|>")
    model = write_text_family(tmp_path / "m", LIKE_LLAMA, specials, bos_token="<bos>")
    lines = [
        {"messages": [{"role": "user", "content": text}, said("Hi \n yes")]}
        for text in ("Hi", " as\n\n yes ", "<|eot|>")
    ]
    source = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(CheckFailedError, match="1 of 3 items differ"):
        verify_lengths_command(str(source), model=str(model), json=True)
    (item,) = json.loads(capsys.readouterr().out)["list"]
    # transformers lets a turn forge the end of one; here it is text.
    assert (item["id"], item["item"]) == ("a-3", "text")
    assert item["planned"][0] > item["real"][0]
    write_lines(source, lines[:2])
    assert report(capsys, source, model)["compared"] == 2


def test_rows_of_an_index_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_pictures(tmp_path)
    model = write_family(tmp_path / "model", "llava-onevision-0.5b")
    build_index(open_source(str(source)), load_model_shape(str(model)), tmp_path / "i.parquet")
    verify_lengths_command(str(source), model=str(model), index=tmp_path / "i.parquet", json=True)
    assert json.loads(capsys.readouterr().out) == EQUAL


def test_what_cannot_be_compared_is_named_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_pictures(tmp_path)
    llama = write_family(tmp_path / "llama", "llama-4-scout")
    plain = write_family(tmp_path / "plain", "smolvlm-256m")
    (plain / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuch"}')
    (plain / "chat_template.jinja").unlink()
    said = {}
    for model in (llama, plain):
        try:
            verify_lengths_command(str(source), model=str(model), json=True)
        except CheckFailedError as error:
            said[model.name] = str(error)
        left = json.loads(capsys.readouterr().out)["left"]
        said[model.name + " left"] = " | ".join(left)
        assert all("\n" not in reason for reason in left)
    if importlib.util.find_spec("torchvision") is None:
        assert "images of Llama 4 needs torchvision, which is not installed" in said["llama left"]
    assert said["plain"] == "nothing could be compared; see why above"
    assert "no chat template" in said["plain left"]
    assert "its image processor cannot be loaded" in said["plain left"]
