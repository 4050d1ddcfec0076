"""One sample as its source tells it: turns of text and media, and where the media lie.

Placeholders and media are matched here, so whatever comes out is consistent: the k-th `<image>` (or
image part) of a sample is the k-th entry of its `images`, likewise for videos and audio clips
(`<audio>`, `audios`), and `Record.media` is in the order of the placeholders.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from dynapar.errors import SampleError
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, VIDEO_KIND

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
"""How a role may be written, and what the chat format calls it."""

_PLACEHOLDER = re.compile("(<image>|<video>|<audio>)")
_KINDS = {"image": IMAGE_KIND, "video": VIDEO_KIND, "audio": AUDIO_KIND}


class Member(NamedTuple):
    """A file inside a shard."""

    name: str
    """What follows the sample's key, such as "0.png"."""
    offset: int
    """First byte inside the shard."""
    size: int
    """Bytes."""


class Locator(NamedTuple):
    """Where a sample lies in its source; what the index keeps to reach it at random."""

    file: int
    """Which of the source's files."""
    number: int
    """Line of a text file, from 1, or place in a shard, from 0."""
    offset: int
    """First byte of the sample's text in the file; -1 when it has none."""
    size: int
    """Bytes of it."""
    key: str
    """Key of a sample in a shard; empty elsewhere."""
    members: tuple[Member, ...]
    """Media and other files of the sample in a shard."""


class MediaFile(NamedTuple):
    """An image, a video or an audio clip, as a file or a part of one."""

    kind: int
    """IMAGE_KIND, VIDEO_KIND or AUDIO_KIND."""
    name: str
    """Field and name, for messages: "images[0] 'media/a.png'"."""
    path: Path
    offset: int
    """First byte in `path`."""
    size: int
    """Bytes, or -1: the whole file."""

    def open(self) -> BinaryIO:
        """A seekable binary file over just this item; raises OSError."""
        file = self.path.open("rb")
        if self.size < 0:
            return file
        return cast(BinaryIO, io.BufferedReader(_Part(file, self.offset, self.size), 16384))


class _Part(io.RawIOBase):
    """A read-only view of a range of a file; closes the file with itself."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._place = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(f"seek to byte {start + offset} of a part")
        self._place = start + offset
        return self._place

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._offset + self._place)
        wanted = max(min(len(buffer), self._size - self._place), 0)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class Turn(NamedTuple):
    """What one side says."""

    role: str
    parts: tuple[str | int, ...]
    """Text, or the index of a media item of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A sample before it is tokenised."""

    id: str
    place: str
    """File and line or shard and key, for messages."""
    turns: tuple[Turn, ...]
    media: tuple[MediaFile, ...]
    """In the order of the placeholders."""
    prefix: str = ""
    """Id of the prefix that it shares with others; empty for none."""


FindMedia = Callable[[int, str, str], MediaFile]
"""(kind, field, name in the sample) -> file; raises SampleError when there is none."""


def parse_conversation(sample: object, *, default_id: str, place: str, find: FindMedia) -> Record:
    """Read one sample: `messages` or `conversations`, with `images`, `videos` and `audios`.

    Args:
        sample: A JSON object. Content is a string with <image>, <video> and <audio> in it, or a
            list of parts {"type": "text" | "image" | "video" | "audio", ...}.
        default_id: Its id where it has none of its own.
        place: File and line, for messages.
        find: Finds media by the names that stand in the sample.

    Raises:
        SampleError: A field is missing or of a wrong type, a role is unknown, or the placeholders
            are not as many as the media; names the place, the id, the field and both counts.
    """
    if not isinstance(sample, dict):
        raise SampleError(f"{place}: a sample is {type(sample).__name__}; expected a JSON object")
    id = str(sample.get("id", default_id))
    place = f"{place} (sample {id!r})"
    reader = _Reader(place=place, find=find, media=[], named=_named_media(sample, place))
    turns = tuple(reader.turns(sample))
    for kind, names in reader.named.items():
        used = sum(1 for item in reader.media if item.kind == _KINDS[kind])
        if names is not None and used != len(names):
            raise SampleError(
                f"{place}: {used} <{kind}> placeholders, but '{kind}s' has {len(names)} entries; "
                f"expected as many. Add or remove placeholders in the text."
            )
    prefix = sample.get("prefix", "")
    if not isinstance(prefix, str):
        raise SampleError(
            f"{place}: 'prefix' is {prefix!r}; expected the id of a prefix, a text. How long it is "
            f"follows from the samples that have it"
        )
    return Record(id=id, place=place, turns=turns, media=tuple(reader.media), prefix=prefix)


def not_json(error: ValueError) -> str:
    """What is wrong with bytes that `json.loads` refuses, to go after their place."""
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return (
            f"is not {error.encoding} text: byte 0x{byte:02x} at {error.start}; expected JSON in "
            "UTF-8. Convert the file, for example with iconv."
        )
    return f"is not JSON: {error}"


def _named_media(sample: Mapping[str, object], place: str) -> dict[str, list[str] | None]:
    """The entries of `images`, `videos` and `audios`; None where the field is absent."""
    named: dict[str, list[str] | None] = {}
    for kind in _KINDS:
        value = sample.get(f"{kind}s", sample.get(kind))
        if isinstance(value, str):
            value = [value]
        if value is not None and not (
            isinstance(value, list) and all(isinstance(name, str) for name in value)
        ):
            raise SampleError(f"{place}: '{kind}s' is {value!r}; expected a list of paths")
        named[kind] = value
    return named


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Walks through one sample and collects its media."""

    place: str
    find: FindMedia
    media: list[MediaFile]
    named: dict[str, list[str] | None]

    def turns(self, sample: Mapping[str, object]) -> Iterator[Turn]:
        field = "messages" if "messages" in sample else "conversations"
        messages = sample.get(field)
        if not isinstance(messages, list) or not messages:
            raise SampleError(
                f"{self.place}: {field!r} is {messages!r}; expected 'messages' or 'conversations' "
                "with a list of at least one turn"
            )
        if isinstance(system := sample.get("system"), str) and system:
            yield Turn("system", (system,))
        for number, message in enumerate(messages):
            where = f"{field}[{number}]"
            if not isinstance(message, dict):
                raise SampleError(f"{self.place}: {where} is {message!r}; expected an object")
            role = message.get("role", message.get("from"))
            if role not in ROLES:
                raise SampleError(
                    f"{self.place}: {where} has role {role!r}; expected one of {sorted(ROLES)}"
                )
            content = message.get("content", message.get("value"))
            yield Turn(ROLES[role], tuple(self.parts(content, where)))

    def parts(self, content: object, where: str) -> Iterator[str | int]:
        if isinstance(content, str):
            for piece in _PLACEHOLDER.split(content):
                if _PLACEHOLDER.fullmatch(piece):
                    yield self.item(piece[1:-1], None, where)
                elif piece:
                    yield piece
            return
        if not isinstance(content, list):
            raise SampleError(
                f"{self.place}: {where} has content {content!r}; expected text or parts"
            )
        for part in content:
            type = part.get("type") if isinstance(part, dict) else None
            if type == "text" and isinstance(part.get("text"), str):
                if part["text"]:
                    yield part["text"]
            elif type in _KINDS:
                own = part.get(type, part.get("path"))
                yield self.item(type, own if isinstance(own, str) else None, where)
            else:
                raise SampleError(
                    f"{self.place}: {where} has part {part!r}; expected type text, image, video or "
                    "audio"
                )

    def item(self, kind: str, name: str | None, where: str) -> int:
        """Take the next medium of this kind, or the one that the part itself names."""
        place = sum(1 for item in self.media if item.kind == _KINDS[kind])
        field = f"{where} {kind}"
        if name is None:
            names = self.named[kind] or []
            if place >= len(names):
                raise SampleError(
                    f"{self.place}: {where} has <{kind}> number {place + 1}, but '{kind}s' has "
                    f"{len(names)} entries; expected as many. Write literal text as a text part."
                )
            name, field = names[place], f"{kind}s[{place}]"
        elif self.named[kind] is not None:
            raise SampleError(
                f"{self.place}: {where} names {name!r} itself, and '{kind}s' is given; expected one"
            )
        self.media.append(self.find(_KINDS[kind], field, name))
        return len(self.media) - 1
