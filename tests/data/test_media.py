from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import av
import iscc_samples  # type: ignore[import-untyped]
import numpy as np
import pytest
from PIL import Image, ImageOps

from dynapar.data.header import MediaSize, Pixels
from dynapar.data.media import decode_frames, decode_image, media_size
from dynapar.data.records import MediaFile
from dynapar.errors import SampleError
from tests.data.conftest import Demo
from tests.data.small import noise, write_clip


def picture(path: Path) -> MediaFile:
    return MediaFile(1, f"images[0] {path.name!r}", path, 0, -1)


def film(path: Path) -> MediaFile:
    return MediaFile(2, f"videos[0] {path.name!r}", path, 0, -1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_pictures_are_upright(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    noise(20, 31).save(path, exif=exif)
    with Image.open(path) as image:
        upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert media_size(picture(path))[:2] == upright.shape[:2]
    np.testing.assert_array_equal(decode_image(picture(path)), upright)


def test_sizes_come_from_the_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    noise(300, 200).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert media_size(picture(path)) == MediaSize(300, 200, 1, 0.0, False)
    with pytest.raises(SampleError, match=r"images\[0\] 'a\.png' in .*cannot be read"):
        decode_image(picture(path))


def test_transparency_becomes_white(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGBA", (4, 4), (200, 0, 0, 0)).save(path)
    assert decode_image(picture(path)).tolist() == np.full((4, 4, 3), 255).tolist()


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("content", [b"", b"no medium at all", None])
def test_bad_files_are_named(tmp_path: Path, kind: int, content: bytes | None) -> None:
    path = tmp_path / "broken.png"
    if content is not None:
        path.write_bytes(content)
    reason = "does not exist" if content is None else "cannot be read"
    with pytest.raises(SampleError, match=rf"field.*broken\.png {reason}"):
        media_size(MediaFile(kind, "field", path, 0, -1))


def test_a_part_of_a_file_is_a_file(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", 24)
    noise(20, 30).save(tmp_path / "b.png")
    clip, image = ((tmp_path / name).read_bytes() for name in ("a.mp4", "b.png"))
    whole = tmp_path / "whole"
    whole.write_bytes(b"head" + clip + image + b"tail")
    inside = MediaFile(2, "clip", whole, 4, len(clip))
    assert media_size(inside) == media_size(film(tmp_path / "a.mp4"))
    assert media_size(inside) == MediaSize(64, 96, 24, 8.0, False)
    np.testing.assert_array_equal(
        decode_frames(inside, [20])[20], decode_frames(film(tmp_path / "a.mp4"), [20])[20]
    )
    assert media_size(MediaFile(1, "image", whole, 4 + len(clip), len(image)))[:2] == (20, 30)


def in_order(path: Path) -> list[Pixels]:
    with av.open(str(path), "r") as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]  # type: ignore[misc]


FORMATS = ["mp4", "mkv", "webm", "avi", "flv", "mpg", "mov"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_frames_are_those_decoded_from_the_start(tmp_path: Path, suffix: str) -> None:
    found = {path.suffix[1:]: path for path in map(Path, iscc_samples.videos())}
    path = tmp_path / f"a.{suffix}"
    shutil.copyfile(found[suffix], path)
    frames = in_order(path)
    size = media_size(film(path))
    assert size[:4] == (144, 176, 1443 if suffix == "avi" else len(frames), 24.0)
    assert size.counted == (suffix in ("mkv", "webm", "flv", "mpg"))
    asked: Sequence[Sequence[int]] = ([0], [1440], [700, 701, 1200], [3, 5, 1000])
    for wanted in asked:
        got = decode_frames(film(path), wanted)
        assert sorted(got) == sorted(wanted)
        for number in wanted:
            np.testing.assert_array_equal(got[number], frames[number])


def test_a_video_that_ends_early_is_named(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", 12)
    with pytest.raises(SampleError, match=r"'a\.mp4' in .* has no frame 12; .*promises 12"):
        decode_frames(film(tmp_path / "a.mp4"), [3, 12])


def test_a_cover_picture_is_no_video() -> None:
    [path] = [Path(p) for p in iscc_samples.audios() if "withcover" in str(p)]
    with pytest.raises(SampleError, match=r"withcover\.mp3 has no video stream"):
        media_size(film(path))


def test_demo_clips_need_no_counting(demo: Demo) -> None:
    for path in (demo.folder / "data" / "media").glob("*.mp4"):
        assert not media_size(film(path)).counted
