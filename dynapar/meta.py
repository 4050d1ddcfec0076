"""What the planner knows of samples: one row a sample, in columns.

A sample's media are encoded in *encoder units* (an image; a temporal group of a video), each of
which may be encoded by another rank. Units are stored flat: those of sample i are
`unit_tokens[unit_offsets[i]:unit_offsets[i + 1]]`, in the order of the sample's placeholders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

IMAGE, VIDEO, AUDIO = 1, 2, 4
"""Bits of `SampleTable.modalities`; 0 is text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Metadata of n samples; every array is read-only for its users."""

    ids: tuple[str, ...]
    """n unique ids."""
    llm_tokens: IntArray
    """(n,) LLM tokens, 1 or more: text_tokens + LLM tokens of all media."""
    text_tokens: IntArray
    """(n,) LLM tokens that are not placeholders of media."""
    label_tokens: IntArray
    """(n,) targets: positions t >= 1 whose label is not ignored."""
    modalities: ByteArray
    """(n,) bits of the media kinds present."""
    unit_offsets: IntArray
    """(n + 1,) ascending, starts at 0."""
    unit_tokens: IntArray
    """(units,) encoder tokens of each encoder unit, 1 or more."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def encoder_tokens(self) -> IntArray:
        """(n,) encoder tokens of each sample's media."""
        sums = np.concatenate([[0], np.cumsum(self.unit_tokens)]).astype(np.int64)
        return sums[self.unit_offsets[1:]] - sums[self.unit_offsets[:-1]]

    def units(self, sample: int) -> IntArray:
        """(u,) encoder tokens of the units of one sample."""
        return self.unit_tokens[self.unit_offsets[sample] : self.unit_offsets[sample + 1]]

    def take(self, rows: IntArray) -> SampleTable:
        """The samples at `rows`, in that order."""
        counts = np.diff(self.unit_offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        flat = np.repeat(self.unit_offsets[:-1][rows] - offsets[:-1], counts)
        flat += np.arange(offsets[-1])
        return SampleTable(
            ids=tuple(self.ids[row] for row in rows),
            llm_tokens=self.llm_tokens[rows],
            text_tokens=self.text_tokens[rows],
            label_tokens=self.label_tokens[rows],
            modalities=self.modalities[rows],
            unit_offsets=offsets,
            unit_tokens=self.unit_tokens[flat],
        )
