"""A sample as token ids, and how it is put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Rendered(NamedTuple):
    """A sample of L tokens."""

    ids: IntArray
    """(L,) token ids."""
    kinds: IntArray
    """(L,) 0 text, 1 placeholder of an image, 2 of a video, 3 of an audio clip."""
    learnt: BoolArray
    """(L,) whether the token itself is to be predicted."""

    @property
    def label_tokens(self) -> int:
        """Targets: learnt tokens that are not at position 0."""
        return int(self.learnt[1:].sum())


class Pieces:
    """Parts of a rendered sample, joined once at the end."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._ids: list[IntArray] = []
        self._kinds: list[IntArray] = []
        self._learnt: list[BoolArray] = []

    def add(self, ids: Sequence[int] | IntArray, kind: int, learnt: bool | BoolArray) -> None:
        """Add tokens of one kind; `learnt` is for all of them or for each."""
        self._ids.append(np.asarray(ids, np.int64))
        self._kinds.append(np.full(len(ids), kind, np.int64))
        self._learnt.append(np.broadcast_to(np.asarray(learnt, np.bool_), len(ids)))

    def joined(self) -> Rendered:
        """All of it."""
        return Rendered(
            np.concatenate(self._ids), np.concatenate(self._kinds), np.concatenate(self._learnt)
        )
