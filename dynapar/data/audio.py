"""How long an audio file lasts, from its header, and its sound; needs the extra `video`."""

from __future__ import annotations

import av
import numpy as np
import numpy.typing as npt
from av.audio.stream import AudioStream
from av.container import InputContainer

from dynapar.data.header import unreadable
from dynapar.data.records import MediaFile
from dynapar.errors import SampleError

FloatArray = npt.NDArray[np.float32]
_ESTIMATED = ("aac",)
"""Formats without a header of the whole, whose length libav guesses from the first packets."""


def audio_seconds(item: MediaFile) -> float:
    """The length of an audio clip, in seconds; nothing is decoded.

    Raises:
        SampleError: The file is missing, has no audio, or does not say how long it lasts.
    """
    try:
        with item.open() as file, av.open(file, "r") as container:
            stream = _stream(item, container)
            if container.format.name in _ESTIMATED:
                packets = (packet.duration or 0 for packet in container.demux(stream))
                return float(sum(packets) * (stream.time_base or 0))
            if stream.duration is not None and stream.time_base is not None:
                return float(stream.duration * stream.time_base)
            if container.duration is not None:
                return float(container.duration) / av.time_base
    except (OSError, av.FFmpegError) as error:
        raise unreadable(item, error) from None
    raise SampleError(
        f"{item.name} in {item.path} does not say how long it lasts. Convert it, to WAV or FLAC."
    )


def decode_audio(item: MediaFile, rate: int) -> FloatArray:
    """The sound of a clip, its channels made one.

    Args:
        item: The clip.
        rate: Samples in one second, afterwards.

    Returns:
        (samples,) float32, from -1 to 1.

    Raises:
        SampleError: The file is missing, has no audio, or cannot be decoded.
    """
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    found: list[FloatArray] = []
    try:
        with item.open() as file, av.open(file, "r") as container:
            for frame in container.decode(_stream(item, container)):
                found += [part.to_ndarray()[0] for part in resampler.resample(frame)]
        found += [part.to_ndarray()[0] for part in resampler.resample(None)]
    except (OSError, ValueError, av.FFmpegError) as error:
        raise unreadable(item, error) from None
    return np.concatenate([np.zeros(0, np.float32), *found]).astype(np.float32)


def _stream(item: MediaFile, container: InputContainer) -> AudioStream:
    if not container.streams.audio:
        raise SampleError(f"{item.name} in {item.path} has no audio stream. Remove the sample.")
    return container.streams.audio[0]
