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
from dynapar.data.rendered import BoolArray, IntArray, Rendered
from dynapar.data.template import ChatTemplate, Said, Written
from dynapar.errors import ModelError, SampleError
from dynapar.families.spelling import SPELLINGS, placeholder
from dynapar.shapes import MediaTokens, ModelShape


class _Tokens(NamedTuple):
    """(n,) int64 each."""

    ids: IntArray
    starts: IntArray
    """First character of the text that each stands for, ascending."""
    ends: IntArray


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
        special = [id for id, token in added.items() if token.special]
        self._special = np.array(special, np.int64)
        names = sorted((added[id].content for id in special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        # As processors do: what a template does not begin itself, the tokenizer begins.
        self._begins = shape.has_media
        self._first = "".join(tokenizer.encode("", add_special_tokens=True).tokens[:1])
        self._pads: dict[int, str] = {}
        self._spellings = dict(SPELLINGS.get(shape.family.name, {}))
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

    def render(self, record: Record, media: Sequence[MediaTokens]) -> Rendered:
        """See `ChatTokenizer.render`."""
        written, runs = self._spell(self._template.write(record), record, media)
        found = self._encode(written)
        learnt = self._learnt(found, written.said)
        kinds, lengths = np.zeros(len(found.ids), np.int64), np.ones(len(found.ids), np.int64)
        if runs:
            places = np.searchsorted(found.starts, np.array(list(runs), np.int64), "right") - 1
            kinds[places] = [run.kind for run in runs.values()]
            lengths[places] = [run.length for run in runs.values()]
        return Rendered(
            np.repeat(found.ids, lengths), np.repeat(kinds, lengths), np.repeat(learnt, lengths)
        )

    def _learnt(self, found: _Tokens, said: Sequence[Said]) -> BoolArray:
        """Which tokens hold something of what the assistant said, or end it."""
        if not said:
            return np.zeros(len(found.ids), np.bool_)
        starts, ends = (np.array([part[i] for part in said], np.int64) for i in (0, 1))
        ours, last = (np.array([part[i] for part in said], np.bool_) for i in (2, 3))
        place = np.searchsorted(starts, np.maximum(found.starts, found.ends - 1), "right") - 1
        real = (place >= 0) & (found.starts < found.ends) & ours[place]
        inside = found.starts < ends[place]
        closing = (found.starts == ends[place]) & last[place] & np.isin(found.ids, self._special)
        learnt: BoolArray = real & (inside | closing)
        return learnt

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

    def _encode(self, written: Written) -> _Tokens:
        begins = self._begins and not (self._first and written.text.startswith(self._first))
        forged = any(self._names.search(written.text, s.start, s.end) for s in written.said)
        if not forged:
            return _tokens(self._tokenizer.encode(written.text, add_special_tokens=begins), 0)
        parts = [_tokens(self._tokenizer.encode("", add_special_tokens=begins), 0)]
        done = 0
        for found in self._outside(written):
            parts += self._plainly(written.text, done, found.start())
            span = np.array([[found.start()], [found.end()]])
            id = self._tokenizer.token_to_id(found.group())
            parts.append(_Tokens(np.array([id]), span[0], span[1]))
            done = found.end()
        parts += self._plainly(written.text, done, len(written.text))
        return _Tokens(*map(np.concatenate, zip(*parts, strict=True)))

    def _plainly(self, text: str, start: int, end: int) -> Iterator[_Tokens]:
        """Tokens of a stretch in which special tokens are ordinary characters."""
        if start < end:
            encoding = self._literal.encode(text[start:end], add_special_tokens=False)
            yield _tokens(encoding, start)

    @cached_property
    def _literal(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer


def _tokens(encoding: Encoding, shift: int) -> _Tokens:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + shift
    return _Tokens(np.array(encoding.ids, np.int64), offsets[:, 0], offsets[:, 1])
