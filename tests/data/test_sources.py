from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dynapar.data.records import Record
from dynapar.data.sources import Source, expand, open_source
from dynapar.errors import SampleError, SourceError
from tests.data.small import noise, said, write_lines

ASKED = {"role": "user", "content": "<image>What?"}


def records(source: Source) -> list[Record]:
    return [source.record(locator) for locator in source.locate()]


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_lines_are_read_at_random(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [said(f"\u00fc{n}")]} for n in range(9)])
    path.write_text("\n" + path.read_text() + "\n\n")
    source = open_source(str(path))
    places = source.locate()
    found = [source.record(places[n]) for n in (7, 2, 8)]
    assert [r.turns[0].parts for r in found] == [("\u00fc7",), ("\u00fc2",), ("\u00fc8",)]
    assert [r.id for r in found] == ["a-9", "a-4", "a-10"]
    assert "line 9 " in found[0].place


def test_a_list_and_older_names_of_fields_and_roles(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<video>\n?"}, {"from": "gpt", "value": "!"}]
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps([{"id": 3, "conversations": turns, "video": "v/x.mp4", "system": "S"}])
    )
    [record] = records(open_source(str(path)))
    assert [(t.role, t.parts) for t in record.turns] == [
        ("system", ("S",)),
        ("user", (0, "\n?")),
        ("assistant", ("!",)),
    ]
    assert (record.id, record.media[0].path) == ("3", tmp_path / "v/x.mp4")


def test_media_are_in_the_order_of_placeholders(tmp_path: Path) -> None:
    content = "<video>a<image>b<image>"
    sample = {"images": ["1.png", "2.png"], "videos": ["v.mp4"]}
    sample["messages"] = [{"role": "user", "content": content}]  # type: ignore[list-item]
    [record] = records(open_source(str(write_lines(tmp_path / "a.jsonl", [sample]))))
    assert [item.path.name for item in record.media] == ["v.mp4", "1.png", "2.png"]
    assert record.turns[0].parts == (0, "a", 1, "b", 2)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ([], r"line 1: a sample is list"),
        ({"text": "a"}, r"line 1 \(sample 'a-1'\): 'conversations' is None; expected 'messages'"),
        ({"messages": []}, r"'messages' is \[\]"),
        ({"messages": ["a"]}, r"messages\[0\] is 'a'"),
        ({"messages": [{"role": "robot", "content": ""}]}, r"messages\[0\] has role 'robot'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has content None"),
        (
            {"messages": [{"role": "user", "content": [{"type": "sound"}]}]},
            r"part \{'type': 'sound'\}; expected type text, image, video or audio",
        ),
        ({"messages": [ASKED]}, r"<image> number 1, but 'images' has 0 entries"),
        (
            {"id": "q", "messages": [ASKED], "images": ["a", "b"]},
            r"sample 'q'\): 1 <image> placeholders, but 'images' has 2 entries",
        ),
        ({"messages": [ASKED], "images": [1]}, r"'images' is \[1\]; expected a list of paths"),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}],
                "images": ["y"],
            },
            r"names 'x' itself, and 'images' is given",
        ),
        (
            {"messages": [said("a")], "audios": ["a.wav"]},
            r"0 <audio> placeholders, but 'audios' has 1 entries",
        ),
    ],
)
def test_malformed_samples_are_named(tmp_path: Path, sample: object, said: str) -> None:
    source = open_source(str(write_lines(tmp_path / "a.jsonl", [sample])))
    with pytest.raises(SampleError, match=said):
        records(source)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [\n')
    with pytest.raises(SampleError, match=r"a\.jsonl line 1 is not JSON"):
        records(open_source(str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes('[{"messages": "caf\xe9 "}]\n'.encode("latin-1"))
    said = r"is not utf-8 text: byte 0xe9 at \d+; expected JSON in UTF-8\. Convert the file"
    with pytest.raises((SampleError, SourceError), match=said):
        records(open_source(str(tmp_path / name)))


def write_shards(folder: Path) -> str:
    sample = {"messages": [ASKED, said("A")], "images": ["0.png"]}
    for number in range(3):
        picture = io.BytesIO()
        noise(20 + number, 30).save(picture, "png")
        members = {
            f"k{number}/a.json": json.dumps(sample).encode(),
            f"k{number}/a.0.png": picture.getvalue(),
            f"k{number}/b.0.png": picture.getvalue(),
            f"k{number}/b.json": json.dumps(sample | {"id": f"own-{number}"}).encode(),
            f"k{number}/c.txt": b"words",
            f"k{number}/c.jpg": picture.getvalue(),
        }
        write_tar(folder / f"s-{number:03d}.tar", members)
    return str(folder / "s-{000..002}.tar")


def test_shards_are_read_at_random(tmp_path: Path) -> None:
    source = open_source(write_shards(tmp_path))
    places = source.locate()
    assert len(places) == 9
    found = [source.record(places[n]) for n in (7, 3, 2)]
    assert [record.id for record in found] == ["own-2", "k1/a", "k0/c"]
    assert found[2].turns[1].parts == ("words",)
    for record, number in zip(found, (2, 1, 0), strict=True):
        with record.media[0].open() as file:
            assert file.read()[:4] == b"\x89PNG"
        assert record.media[0].path.name == f"s-00{number}.tar"


def test_globs_and_braces_are_the_same_shards(tmp_path: Path) -> None:
    braces = expand(write_shards(tmp_path))
    assert expand(str(tmp_path / "s-*.tar")) == braces
    assert expand(str(tmp_path / "s-00{0,1}.tar")) == braces[:2]
    assert (
        open_source(str(tmp_path / "s-*.tar")).fingerprint()
        == open_source(write_shards(tmp_path)).fingerprint()
    )


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"a.json": b"{"}, r"key 'a': its json member is not JSON"),
        ({"a.png": b"", "a.jpg": b"", "a.txt": b""}, r"members \['jpg', 'png', 'txt'\]"),
        (
            {"a.json": json.dumps({"messages": [ASKED], "images": ["1.png"]}).encode()},
            r"images\[0\] is '1\.png', which is no member of the sample",
        ),
    ],
)
def test_malformed_members_are_named(
    tmp_path: Path, members: Mapping[str, bytes], said: str
) -> None:
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(SampleError, match=said):
        records(open_source(str(path)))


def _sources(folder: Path) -> Sequence[tuple[str, str]]:
    (folder / "packed.tar").write_bytes(gzip.compress(b"x" * 2000))
    (folder / "odd.csv").write_text("a")
    (folder / "empty.jsonl").write_text("\n")
    (folder / "object.json").write_text("{}")
    write_tar(folder / "none.tar", {})
    return [
        ("absent.jsonl", "does not exist"),
        (".", r"is a folder; expected a file in it, or a pattern such as '.*shards-\*\.tar'"),
        ("s-{0..2}.tar", r"s-0\.tar does not exist; .*numbers between the braces"),
        ("*.tar.gz", "compressed shards cannot be read at random"),
        ("packed.tar", "gzip-compressed; unpack it"),
        ("x*.tar", "no file matches"),
        ("odd.csv", "no known kind"),
        ("empty.jsonl", "has no samples"),
        ("object.json", "holds dict"),
        ("none.tar", "has no samples"),
    ]


@pytest.mark.parametrize("case", range(10))
def test_sources_that_cannot_be_opened(tmp_path: Path, case: int) -> None:
    name, said = _sources(tmp_path)[case]
    with pytest.raises(SourceError, match=said):
        open_source(str(tmp_path / name)).locate()


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [said("a" * 200_000)]}])
    before = open_source(str(path)).fingerprint()
    data = bytearray(path.read_bytes())
    assert open_source(str(path)).fingerprint() == before
    data[150_000] ^= 1
    path.write_bytes(data)
    assert open_source(str(path)).fingerprint() != before
