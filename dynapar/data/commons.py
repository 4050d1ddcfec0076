"""Find what samples of one prefix have in common, while their source is indexed.

A conversation says which prefix it shares (`"prefix": "img7"`), not how long it is. The prefix is
the longest run of first tokens, with the same media files behind their placeholders, that all its
samples have, short of the end of the shortest, and of a media item that it would cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynapar.data.records import MediaFile
from dynapar.data.rendered import IntArray, Rendered
from dynapar.shapes import MediaTokens


class _Span(NamedTuple):
    """A media item among a sample's tokens."""

    begin: int
    end: int
    """After the last of its placeholders."""
    file: MediaFile
    units: int


@dataclass(slots=True)
class _Common:
    """What the samples of one prefix have in common so far."""

    ids: IntArray
    kinds: IntArray
    spans: list[_Span]


class Commons:
    """Collects samples, in the order of the source."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._names: list[str] = []
        self._common: dict[str, _Common] = {}

    def add(
        self,
        name: str,
        rendered: Rendered,
        files: Sequence[MediaFile],
        media: Sequence[MediaTokens],
    ) -> None:
        """One sample.

        Args:
            name: Of its prefix; empty for none.
            rendered: The sample.
            files: Its media.
            media: What each of them becomes.
        """
        self._names.append(name)
        if not name:
            return
        spans = _spans(rendered, files, media)
        size = len(rendered.ids) - 1
        known = self._common.get(name)
        if known is None:
            self._common[name] = _Common(rendered.ids[:size], rendered.kinds[:size], spans)
            return
        size = min(size, len(known.ids))
        differs = np.flatnonzero(known.ids[:size] != rendered.ids[:size])
        size = int(differs[0]) if len(differs) else size
        for one, other in zip(known.spans, spans, strict=False):
            # Names say in which field of the sample a file stood.
            if one.file._replace(name="") != other.file._replace(name=""):
                size = min(size, one.begin)
        known.ids, known.kinds = known.ids[:size], known.kinds[:size]

    def columns(self) -> list[dict[str, object]] | None:
        """For each sample its columns in the index; None where none shares anything."""
        if not self._common:
            return None
        found = {name: _columns(name, common) for name, common in self._common.items()}
        return [found.get(name, NOTHING) for name in self._names]


def _spans(
    rendered: Rendered, files: Sequence[MediaFile], media: Sequence[MediaTokens]
) -> list[_Span]:
    places = {item.kind: np.flatnonzero(rendered.kinds == item.kind) for item in media}
    used = dict.fromkeys(places, 0)
    spans = []
    for file, item in zip(files, media, strict=True):
        begin = used[item.kind]
        used[item.kind] = begin + item.llm_tokens
        own = places[item.kind][begin : begin + item.llm_tokens]
        if len(own):
            spans.append(_Span(int(own[0]), int(own[-1]) + 1, file, item.units))
    return spans


def _columns(name: str, common: _Common) -> dict[str, object]:
    size = len(common.ids)
    while cut := [span.begin for span in common.spans if span.begin < size < span.end]:
        size = min(cut)
    if not size:
        return NOTHING
    return {
        "prefix_id": name,
        "prefix_tokens": size,
        "prefix_text_tokens": int((common.kinds[:size] == 0).sum()),
        "prefix_units": sum(span.units for span in common.spans if span.end <= size),
    }


NOTHING: dict[str, object] = {
    "prefix_id": "",
    "prefix_tokens": 0,
    "prefix_text_tokens": 0,
    "prefix_units": 0,
}
"""Of a sample that shares nothing."""
