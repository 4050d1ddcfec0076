"""What a model's own chat template makes of a conversation, and which of it the turns said.

The template is the one that transformers would take: `chat_template.jinja` of the model folder,
else `chat_template.json`, else `chat_template` in tokenizer_config.json. Marks put around what the
turns say show where it ends up; without them the result must be the same, so a template that reads
or rewrites what is said is refused, not guessed at. The date that some templates print is always
the one below, so that two runs count alike.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynapar.data.records import Record
from dynapar.errors import ModelError, SampleError
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, VIDEO_KIND

TODAY = datetime.date(2024, 7, 26)
"""What `strftime_now` of a template says."""
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
"""Marks, of the characters that Unicode leaves to private use."""
_NAMES = {IMAGE_KIND: "image", VIDEO_KIND: "video", AUDIO_KIND: "audio"}


class Said(NamedTuple):
    """A part of a turn's text, where the template put it."""

    start: int
    end: int
    """Characters of the rendered text."""
    assistant: bool
    """Whether it is to be learnt."""
    last: bool
    """Whether it is the last part of its turn, media counted."""


class Written(NamedTuple):
    """A conversation as a template writes it, media as marks of the family."""

    text: str
    said: tuple[Said, ...]
    """In the order of `text`; parts do not overlap."""


class ChatTemplate:
    """The chat template of a model folder; thread-safe."""

    def __init__(self, source: str, *, place: str, tokens: Mapping[str, str], listed: bool) -> None:
        """Compile it.

        Args:
            source: Of the template.
            place: Its file, for messages.
            tokens: Special tokens by name, such as "bos_token".
            listed: Whether turns are first tried as lists of parts; else as texts.

        Raises:
            ModelError: It is no template.
        """
        self.source = source
        self._place, self._tokens = place, dict(tokens)
        self._listed = listed
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = TODAY.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"{place} is no chat template: {error}. Take the model's own."
            ) from None

    def write(self, record: Record) -> Written:
        """Write a conversation.

        Raises:
            SampleError: The template refuses it, or changes what the turns say.
        """
        spoken = [part for turn in record.turns for part in turn.parts if isinstance(part, str)]
        if any(mark in part for part in spoken for mark in (_OPEN, _CLOSE)):
            raise SampleError(
                f"{record.place}: its text has the private characters U+F0000 or U+F0001, which "
                "mark text in chat templates; expected text without. Remove them."
            )
        forms = (self._listed, not self._listed) if not record.media else (True,)
        refusals = []
        for listed in forms:
            try:
                written = self._found(record, listed)
            except SampleError as error:
                refusals.append(error)
                continue
            if written is not None:
                return written
        if len(refusals) == len(forms):
            raise refusals[0]
        raise SampleError(
            f"{record.place}: the chat template of {self._place} leaves out or changes what a turn "
            "says; expected one that writes it as it stands. Change the sample or the template."
        )

    def _found(self, record: Record, listed: bool) -> Written | None:
        plain = self._run(record, listed, marked=False)
        marked = self._run(record, listed, marked=True)
        parts = _marked_parts(record)
        if marked.count(_OPEN) != len(parts) or marked.count(_CLOSE) != len(parts):
            return None
        pieces: list[str] = []
        said: list[Said] = []
        length = 0
        for number, piece in enumerate(marked.split(_OPEN)):
            inside, closed, outside = piece.partition(_CLOSE)
            if bool(number) != bool(closed):
                return None
            if number:
                part = parts[number - 1]
                tail = part.tail if outside.startswith(part.tail) else ""
                end = length + len(inside) + len(tail)
                said.append(Said(length, end, part.assistant, part.last))
            pieces += [inside, outside]
            length += len(inside) + len(outside)
        text = "".join(pieces)
        return Written(text, tuple(said)) if text == plain else None

    def _run(self, record: Record, listed: bool, *, marked: bool) -> str:
        messages = []
        for turn in record.turns:
            parts: list[dict[str, str]] = []
            for part in turn.parts:
                if isinstance(part, int):
                    name = _NAMES[record.media[part].kind]
                    parts.append({"type": name, name: name})
                else:
                    parts.append({"type": "text", "text": _mark(part) if marked else part})
            content = parts if listed else "".join(part["text"] for part in parts)
            messages.append({"role": turn.role, "content": content})
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=False, tools=None, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise SampleError(
                f"{record.place}: the chat template of {self._place} refuses it: {error}. Change "
                "the turns or the template."
            ) from None


class _Part(NamedTuple):
    """A text of a turn that bears marks."""

    tail: str
    """White space after the closing mark."""
    assistant: bool
    last: bool


def _marked_parts(record: Record) -> list[_Part]:
    found = []
    for turn in record.turns:
        texts = [part for part in turn.parts if isinstance(part, str) and part.strip()]
        for number, text in enumerate(texts):
            tail = text[len(text.rstrip()) :]
            last = number == len(texts) - 1 and not isinstance(turn.parts[-1], int)
            found.append(_Part(tail, turn.role == "assistant", last))
    return found


def _mark(text: str) -> str:
    """Marks go inside white space, since templates strip it."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{_OPEN}{core}{_CLOSE}{text[start + len(core) :]}"


class _Generation(Extension):
    """`{% generation %}`, transformers' own mark of answers, is written like any other text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def read_template(folder: Path, *, listed: bool) -> ChatTemplate | None:
    """The chat template of a model folder, or None where it has none.

    Args:
        folder: The model's.
        listed: See `ChatTemplate`.

    Raises:
        ModelError: A file cannot be read, or holds no template.
    """
    settings = _json(folder / "tokenizer_config.json")
    tokens = dict(_special(settings)) | dict(_special(_json(folder / "special_tokens_map.json")))
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return ChatTemplate(
            jinja.read_text(encoding="utf-8"), place=str(jinja), tokens=tokens, listed=listed
        )
    own = folder / "chat_template.json"
    for path, values in ((own, _json(own)), (folder / "tokenizer_config.json", settings)):
        source = values.get("chat_template")
        if isinstance(source, list):
            named = {str(item.get("name")): item.get("template") for item in source}
            source = named.get("default")
        if isinstance(source, str):
            return ChatTemplate(source, place=str(path), tokens=tokens, listed=listed)
    return None


def _json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    return cast("dict[str, object]", values) if isinstance(values, dict) else {}


def _special(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Special tokens by name, as texts or as objects with their content."""
    for key, value in values.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(content, str):
            yield key, content
