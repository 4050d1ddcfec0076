"""How long an audio file lasts, from its header; needs the extra `video`."""

from __future__ import annotations

import av

from dynapar.data.header import unreadable
from dynapar.data.records import MediaFile
from dynapar.errors import SampleError


def audio_seconds(item: MediaFile) -> float:
    """The length of an audio clip, in seconds.

    Raises:
        SampleError: The file is missing, has no audio, or does not say how long it lasts.
    """
    try:
        with item.open() as file, av.open(file, "r") as container:
            if not container.streams.audio:
                raise SampleError(
                    f"{item.name} in {item.path} has no audio stream. Remove the sample."
                )
            stream = container.streams.audio[0]
            if stream.duration is not None and stream.time_base is not None:
                return float(stream.duration * stream.time_base)
            if container.duration is not None:
                return float(container.duration) / av.time_base
    except (OSError, av.FFmpegError) as error:
        raise unreadable(item, error) from None
    raise SampleError(
        f"{item.name} in {item.path} does not say how long it lasts. Convert it, to WAV or FLAC."
    )
