"""Audio clips in samples: their length from headers, their tokens from the catalog's formulas."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import av
import iscc_samples  # type: ignore[import-untyped]
import numpy as np
import pytest
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from dynapar.catalog import load_model_shape
from dynapar.data.audio import audio_seconds, decode_audio
from dynapar.data.index import build_index, read_index
from dynapar.data.indexfile import Index, Medium
from dynapar.data.materialize import Materializer
from dynapar.data.media import media_size
from dynapar.data.records import MediaFile
from dynapar.data.sources import open_source
from dynapar.errors import ModelError, SampleError
from dynapar.inspect_command import inspect_command
from dynapar.shapes import AUDIO_KIND
from tests.data.folders import write_family
from tests.data.small import noise, said, write_clip, write_lines


def clip(path: Path) -> MediaFile:
    return MediaFile(AUDIO_KIND, "audios[0]", path, 0, -1)


def write_tone(path: Path, samples: int, *, rate: int = 16000) -> Path:
    tone = (9000 * np.sin(np.arange(samples) / 9)).astype("<i2")
    if path.suffix == ".wav":
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(tone.tobytes())
        return path
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(path.suffix[1:], rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return path


@pytest.mark.parametrize("suffix", ["wav", "flac"])
@pytest.mark.parametrize("rate", [16000, 44100])
def test_length_is_that_of_the_header(tmp_path: Path, suffix: str, rate: int) -> None:
    path = write_tone(tmp_path / f"a.{suffix}", 3 * rate + 777, rate=rate)
    seconds = audio_seconds(clip(path))
    assert seconds == pytest.approx(3 + 777 / rate, abs=1e-6)
    size = media_size(clip(path))
    assert (size.seconds, size.frames, size.height) == (seconds, 0, 0)
    assert len(decode_audio(clip(path), 16000)) == pytest.approx(16000 * seconds, abs=64)


def test_real_files_are_as_long_as_their_header_says() -> None:
    """Packed sound carries up to 0.1 s of padding."""
    paths = [Path(path) for path in iscc_samples.audios()]
    assert {path.suffix for path in paths} >= {".aac", ".wav", ".mp3", ".ogg", ".opus"}
    for path in paths:
        seconds = audio_seconds(clip(path))
        assert len(decode_audio(clip(path), 16000)) / 16000 == pytest.approx(seconds, abs=0.1)


@pytest.fixture
def indexed(tmp_path: Path) -> Index:
    write_tone(tmp_path / "a.wav", 3 * 16000)
    write_tone(tmp_path / "b.flac", 441_000, rate=44100)
    write_clip(tmp_path / "v.mp4", 24)
    noise(512, 512).save(tmp_path / "p.png")
    asked = {"role": "user", "content": "<audio>Hi<image><audio><video>"}
    sample: dict[str, object] = {"id": "s", "messages": [asked, said("yes")]}
    sample |= {"audios": ["a.wav", "b.flac"], "images": ["p.png"], "videos": ["v.mp4"]}
    parts = [{"type": "audio", "audio": "b.flac"}, {"type": "text", "text": "what"}]
    other = {"id": "t", "messages": [{"role": "user", "content": parts}, said("it")]}
    source = open_source(str(write_lines(tmp_path / "a.jsonl", [sample, other])))
    shape = load_model_shape(str(write_family(tmp_path / "model", "qwen2.5-omni-3b")))
    summary = build_index(source, shape, tmp_path / "i.parquet")
    assert summary.kinds == {"image + video + audio": 1, "audio": 1}
    return read_index(tmp_path / "i.parquet")


def test_clips_of_a_sample_become_their_tokens(indexed: Index) -> None:
    """3 s are 75 LLM tokens of 150 encoder tokens, 10 s are 250 of 500."""
    table = indexed.table
    assert table.modalities.tolist() == [7, 4]
    assert table.units(1).tolist() == [500]
    assert table.units(0).tolist()[:3] == [150, 36 * 36, 500]
    video = indexed.media(0)[3].tokens(load_model_shape("qwen2.5-omni-3b"))
    media = table.llm_tokens - table.text_tokens
    assert media.tolist() == [75 + 324 + 250 + video.llm_tokens, 250]
    assert indexed.media(0)[2] == Medium(AUDIO_KIND, 0, 0, 0, 0.0, 10.0)


def test_the_extractor_makes_as_many_of_a_decoded_file(tmp_path: Path) -> None:
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=300)
    shape = load_model_shape("qwen2.5-omni-3b")
    for samples in (4711, 16000, 160 * 77):
        path = write_tone(tmp_path / "a.flac", samples)
        made = extractor(
            decode_audio(clip(path), 16000),
            sampling_rate=16000,
            padding="max_length",
            return_attention_mask=True,
        )
        item = shape.audio(audio_seconds(clip(path)))
        assert item.size[1] == int(made["attention_mask"].sum())


def test_a_sample_of_the_index_is_explained(
    indexed: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = indexed.path.parent / "model"
    inspect_command("t", model=str(folder), index=indexed.path, json=True)
    (item,) = json.loads(capsys.readouterr().out)["media"]
    assert (item["source"], item["llm_tokens"]) == ("audio of 10 seconds", 250)


def test_media_that_cannot_be_trained_on_are_named(indexed: Index) -> None:
    folder = indexed.path.parent
    shape = load_model_shape(str(folder / "model"))
    said = r"family 'qwen2_5_omni', whose media cannot be loaded for training; expected one of"
    with pytest.raises(ModelError, match=said):
        Materializer(shape, open_source(str(folder / "a.jsonl")), indexed)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.wav", r"audios\[0\] 'absent\.wav': .* does not exist; expected a file"),
        ("bad.wav", r"audios\[0\] 'bad\.wav' in .* cannot be read"),
        ("silent.mp4", r"audios\[0\] 'silent\.mp4' in .* has no audio stream"),
    ],
)
def test_clips_that_cannot_be_read_are_named(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    write_clip(tmp_path / "silent.mp4", 4)
    sample = {"messages": [{"role": "user", "content": "<audio>"}], "audios": [name]}
    source = open_source(str(write_lines(tmp_path / "a.jsonl", [sample])))
    shape = load_model_shape(str(write_family(tmp_path / "model", "qwen2.5-omni-3b")))
    with pytest.raises(SampleError, match=rf"line 1 \(sample 'a-1'\): {said}"):
        build_index(source, shape, tmp_path / "i.parquet")
