"""Tokens of what a chat template writes: media spelled out, special tokens only where it wrote."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from dynapar.data.records import Record
from dynapar.data.rendered import Pieces, Rendered
from dynapar.data.template import ChatTemplate, Said, Written
from dynapar.errors import ModelError, SampleError
from dynapar.families.spelling import SPELLINGS, Spelling, placeholder
from dynapar.shapes import MediaTokens, ModelShape


class _Token(NamedTuple):
    id: int
    start: int
    end: int
    """Characters of the text that it stands for."""


class _Run(NamedTuple):
    """A placeholder of the text, and how often it is to stand."""

    kind: int
    length: int


class Templated:
    """The format of a model folder with a chat template."""

    def __init__(
        self, shape: ModelShape, tokenizer: Tokenizer, template: ChatTemplate, path: Path
    ) -> None:
        """Check that the tokenizer has the tokens that stand for media.

        Raises:
            ModelError: It has not, or other ones than config.json says.
        """
        self._shape, self._tokenizer, self._template = shape, tokenizer, template
        added = tokenizer.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        names = sorted((added[id].content for id in self._special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        # As processors do: what a template does not begin itself, the tokenizer begins.
        self._begins = shape.has_media
        self._pads: dict[int, str] = {}
        for kind, spelling in self._spellings.items():
            wanted = placeholder(shape, kind)
            pad = tokenizer.id_to_token(wanted)
            if pad is None or tokenizer.token_to_id(spelling.mark) is None:
                missing = f"id {wanted}" if pad is None else repr(spelling.mark)
                raise ModelError(
                    f"{path} has no token {missing}, which config.json or the processor of family "
                    f"{shape.family.name!r} uses for media; expected it. Take both files from one "
                    "model."
                )
            self._pads[kind] = pad

    @property
    def _spellings(self) -> dict[int, Spelling]:
        return dict(SPELLINGS.get(self._shape.family.name, {}))

    def render(self, record: Record, media: Sequence[MediaTokens]) -> Rendered:
        """See `ChatTokenizer.render`."""
        written, runs = self._spell(self._template.write(record), record, media)
        pieces = Pieces()
        starts = [said.start for said in written.said]
        for token in self._encode(written):
            if token.start in runs and token.end > token.start:
                run = runs[token.start]
                pieces.add(np.full(run.length, token.id, np.int64), run.kind, False)
                continue
            pieces.add([token.id], 0, self._is_learnt(token, written.said, starts))
        return pieces.joined()

    def _is_learnt(self, token: _Token, said: Sequence[Said], starts: Sequence[int]) -> bool:
        """Whether it holds something of what the assistant said, or ends it."""
        place = bisect_right(starts, max(token.start, token.end - 1)) - 1
        if place < 0 or token.start == token.end:
            return False
        part = said[place]
        if token.start < part.end:
            return part.assistant
        ends = token.start == part.end and token.id in self._special
        return ends and part.assistant and part.last

    def _spell(
        self, written: Written, record: Record, media: Sequence[MediaTokens]
    ) -> tuple[Written, dict[int, _Run]]:
        """Put media in the place of their marks.

        Returns:
            The text, with one placeholder for each run of them, and the runs by their place in it.
        """
        items = {
            kind: iter([m for f, m in zip(record.media, media, strict=True) if f.kind == kind])
            for kind in self._pads
        }
        kinds = {spelling.mark: kind for kind, spelling in self._spellings.items()}
        runs: dict[int, _Run] = {}
        pieces: list[str] = []
        grown: list[tuple[int, int]] = [(0, 0)]
        done = length = used = 0
        for mark in self._outside(written) if record.media else ():
            if mark.group() not in kinds:
                continue
            kind = kinds[mark.group()]
            item = next(items[kind], None)
            if item is None:
                raise self._uneven(record)
            pieces.append(written.text[done : mark.start()])
            length += mark.start() - done
            for piece in self._spellings[kind].write(self._shape, item):
                if isinstance(piece, int):
                    runs[length] = _Run(kind, piece)
                pieces.append(self._pads[kind] if isinstance(piece, int) else piece)
                length += len(pieces[-1])
            done, used = mark.end(), used + 1
            grown.append((done, length - done))
        if used != len(media):
            raise self._uneven(record)
        pieces.append(written.text[done:])
        places = [place for place, _ in grown]
        said = []
        for part in written.said:
            more = grown[bisect_right(places, part.start) - 1][1]
            said.append(part._replace(start=part.start + more, end=part.end + more))
        return Written("".join(pieces), tuple(said)), runs

    def _uneven(self, record: Record) -> SampleError:
        return SampleError(
            f"{record.place}: the chat template of {self._shape.folder} writes other media than "
            f"the {len(record.media)} of the sample; expected a mark for each. Change the turns or "
            "the template."
        )

    def _outside(self, written: Written) -> Iterator[re.Match[str]]:
        """Special tokens that the template wrote, none that a turn said."""
        starts = [said.start for said in written.said]
        for found in self._names.finditer(written.text):
            place = bisect_right(starts, found.start()) - 1
            if place < 0 or written.said[place].end <= found.start():
                yield found

    def _encode(self, written: Written) -> Iterator[_Token]:
        begins = self._begins and not self._begun(written.text)
        forged = any(self._names.search(written.text, s.start, s.end) for s in written.said)
        if not forged:
            yield from _tokens(self._tokenizer.encode(written.text, add_special_tokens=begins), 0)
            return
        if begins:
            yield from _tokens(self._tokenizer.encode("", add_special_tokens=True), 0)
        done = 0
        for found in self._outside(written):
            yield from self._plainly(written.text, done, found.start())
            id = self._tokenizer.token_to_id(found.group())
            assert id is not None
            yield _Token(id, found.start(), found.end())
            done = found.end()
        yield from self._plainly(written.text, done, len(written.text))

    def _begun(self, text: str) -> bool:
        first = self._tokenizer.encode("", add_special_tokens=True).tokens
        return bool(first) and text.startswith(first[0])

    def _plainly(self, text: str, start: int, end: int) -> Iterator[_Token]:
        """Tokens of a stretch in which special tokens are ordinary characters."""
        if start < end:
            encoding = self._literal.encode(text[start:end], add_special_tokens=False)
            yield from _tokens(encoding, start)

    @cached_property
    def _literal(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer


def _tokens(encoding: Encoding, shift: int) -> Iterator[_Token]:
    for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        yield _Token(id, start + shift, end + shift)
