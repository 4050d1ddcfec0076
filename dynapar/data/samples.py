"""What the loader hands to the executor: one sample as tensors, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

IGNORE = -100
"""The target of a position without a loss."""

TEXT_KIND, IMAGE_KIND, VIDEO_KIND = 0, 1, 2
"""Values of `LoadedSample.kinds`, in the numbering of transformers' `mm_token_type_ids`."""


class MediaShape(NamedTuple):
    """One image or video of a sample; known on every rank of the sample, decoded or not."""

    kind: int
    """IMAGE_KIND or VIDEO_KIND."""
    grid: tuple[int, int, int]
    """Encoder patches: temporal groups, rows, columns."""
    llm_tokens: int
    """Placeholders that it fills."""
    units: int
    """Encoder units: 1 for an image, the temporal groups of a video."""
    seconds_per_group: float
    """Time between temporal groups; 0.0 for an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSample:
    """A sample of L tokens.

    Its encoder units are numbered through all its media, in the order of `media`, which is the
    order of the placeholders.
    """

    id: str
    input_ids: Tensor
    """(L,) int64."""
    targets: Tensor
    """(L,) int64: the label of the *next* token, or IGNORE; the last one is always IGNORE. Of a
    tree (k, L): all of a column count, since a token of the prefix has targets of its members."""
    kinds: Tensor
    """(L,) int64: TEXT_KIND, IMAGE_KIND or VIDEO_KIND of each token."""
    positions: Tensor
    """(3, L) int64 with mRoPE, else (1, L): position ids of the whole sample."""
    media: tuple[MediaShape, ...]
    units: Mapping[int, Tensor]
    """For the encoder units that this rank encodes: (encoder tokens, patch width) float32."""
    tree: tuple[tuple[int, int], ...] = ()
    """For a sample whose branches share what comes before them: (tokens, parent) of each node, as
    of `attention.trees.tree`. Empty for a sample of one branch."""
    stub: str = ""
    """Why the sample could not be loaded; its targets are then all IGNORE. Empty when it was."""
