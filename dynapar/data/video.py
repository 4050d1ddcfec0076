"""Videos through PyAV: sizes from headers, and single frames.

Rotation marks are ignored, as transformers does. Frames are counted from packets where the header
has no count.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from dynapar.data.header import MediaSize, Pixels, unreadable
from dynapar.data.records import MediaFile
from dynapar.errors import SampleError

_SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""Containers whose index leads to the very key frame asked for (MPEG streams miss it)."""


def video_size(item: MediaFile) -> MediaSize:
    """Read a video's header.

    Raises:
        SampleError: The file is missing, is no video, or has no frames or no frame rate.
    """
    try:
        with item.open() as file, av.open(file, "r") as container:
            stream = _video_stream(item, container)
            rate = stream.average_rate or stream.guessed_rate
            frames, counted = stream.frames, False
            if frames <= 0:
                counted = True
                frames = sum(1 for packet in container.demux(stream) if packet.size > 0)
            if not rate or min(frames, stream.height, stream.width) < 1:
                raise SampleError(
                    f"{item.name} in {item.path} cannot be read: it has {frames} frames of "
                    f"{stream.height} x {stream.width} pixels at frame rate {rate}. Repair it or "
                    "remove the sample."
                )
            return MediaSize(stream.height, stream.width, frames, float(rate), counted)
    except (OSError, av.FFmpegError) as error:
        raise unreadable(item, error) from None


def _video_stream(item: MediaFile, container: InputContainer) -> VideoStream:
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise SampleError(
        f"{item.name} in {item.path} has no video stream (a cover picture is none). Remove "
        "the sample."
    )


def decode_frames(item: MediaFile, frames: Sequence[int]) -> dict[int, Pixels]:
    """Some frames of a video.

    Packets are listed first, which costs no decoding; from them follows the key frame to seek to,
    and which time stamp each frame bears. Where a container has no index or no time stamps, frames
    are decoded from the start and counted.

    Args:
        item: The video.
        frames: Indices in order of presentation, ascending.

    Raises:
        SampleError: The file is missing, cannot be decoded, or ends before the last frame.
    """
    try:
        with item.open() as file, av.open(file, "r") as container:
            stream = _video_stream(item, container)
            packets = [(p.pts, p.is_keyframe) for p in container.demux(stream) if p.size]
        with item.open() as file, av.open(file, "r") as container:
            stream = _video_stream(item, container)
            found = _pick(container, stream, packets, frames)
    except (OSError, ValueError, av.FFmpegError) as error:
        raise unreadable(item, error) from None
    if missing := [frame for frame in frames if frame not in found]:
        raise SampleError(
            f"{item.name} in {item.path} has no frame {missing[0]}; its header promises "
            f"{stream.frames or len(packets)}. Remove the sample or repair the file."
        )
    return found


def _pick(
    container: InputContainer,
    stream: VideoStream,
    packets: Sequence[tuple[int | None, bool]],
    frames: Sequence[int],
) -> dict[int, Pixels]:
    """Decode `frames`, jumping to a key frame where that leaves frames out."""
    stamps = sorted(pts for pts, _ in packets if pts is not None)
    keys = sorted(pts for pts, key in packets if key and pts is not None)
    wanted = set(frames)
    stamped = len(set(stamps)) == len(packets) and frames[-1] < len(stamps)
    if not stamped or container.format.name not in _SEEKABLE:
        counted = enumerate(itertools.islice(container.decode(stream), frames[-1] + 1))
        return {number: _pixels(frame) for number, frame in counted if number in wanted}
    place = {stamp: number for number, stamp in enumerate(stamps)}
    found: dict[int, Pixels] = {}
    reached = 0
    for target in frames:
        if target in found:
            continue
        key = max((pts for pts in keys if pts <= stamps[target]), default=stamps[0])
        if place[key] > reached:
            container.seek(key, stream=stream)
        for frame in container.decode(stream):
            number = place.get(frame.pts, -1) if frame.pts is not None else -1
            reached = max(reached, number + 1)
            if number in wanted:
                found[number] = _pixels(frame)
            if number >= target:
                break
    return found


def _pixels(frame: VideoFrame) -> Pixels:
    return np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
