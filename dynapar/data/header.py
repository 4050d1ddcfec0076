"""What the header of a media file says, and the error for a file that cannot be read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.data.records import MediaFile
from dynapar.errors import SampleError

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3)."""


class MediaSize(NamedTuple):
    """What a header says."""

    height: int
    width: int
    frames: int
    """1 for an image."""
    fps: float
    """0.0 for an image."""
    counted: bool
    """The header had no number of frames; its packets were counted, not decoded."""
    seconds: float = 0.0
    """Length of an audio clip, whose height, width and frames are 0; else 0.0."""


def unreadable(item: MediaFile, error: Exception) -> SampleError:
    """The error for a file that its decoder refuses."""
    if isinstance(error, FileNotFoundError):
        return SampleError(f"{item.name}: {item.path} does not exist; expected a file. Restore it.")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SampleError(
        f"{item.name} in {item.path} cannot be read: {reason}. Repair it or remove the sample."
    )
