"""Sizes of media from their headers, and the pixels of images.

Sizes are those after the rotation that EXIF asks for. Videos are in `dynapar.data.video`, audio
clips in `dynapar.data.audio`; both need the extra `video`.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Sequence

import numpy as np
from PIL import Image

from dynapar.data.header import MediaSize, Pixels, unreadable
from dynapar.data.records import MediaFile
from dynapar.errors import SourceError
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what makes the picture upright; from 5 on, height and width change places."""


def media_size(item: MediaFile) -> MediaSize:
    """Read an item's header.

    Raises:
        SampleError: The file is missing, or no image, video or audio clip that can be read.
        SourceError: A video or an audio clip, and package av is not installed.
    """
    if item.kind == IMAGE_KIND:
        return _image_size(item)
    _require_av(item)
    if item.kind == AUDIO_KIND:
        from dynapar.data.audio import audio_seconds

        return MediaSize(0, 0, 0, 0.0, False, audio_seconds(item))
    from dynapar.data import video

    return video.video_size(item)


def _image_size(item: MediaFile) -> MediaSize:
    try:
        with item.open() as file, Image.open(file) as image:
            width, height = image.size
            turned = _orientation(image) >= 5
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        raise unreadable(item, error) from None
    return MediaSize(*((width, height) if turned else (height, width)), 1, 0.0, False)


def _orientation(image: Image.Image) -> int:
    # Pillow turns a TIFF itself, and decodes a whole PNG in search of EXIF data behind its pixels;
    # such data are left alone.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))


def decode_image(item: MediaFile) -> Pixels:
    """The pixels of an image, upright, in colours; transparency becomes white.

    Raises:
        SampleError: The file is missing or cannot be decoded.
    """
    try:
        with item.open() as file, Image.open(file) as image:
            turn = _TURNS.get(_orientation(image))
            image.load()
            upright = image if turn is None else image.transpose(turn)
            if "A" in image.getbands() or image.info.get("transparency") is not None:
                paper = Image.new("RGBA", upright.size, (255, 255, 255, 255))
                upright = Image.alpha_composite(paper, upright.convert("RGBA"))
            return np.asarray(upright.convert("RGB"))
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        raise unreadable(item, error) from None


def decode_frames(item: MediaFile, frames: Sequence[int]) -> dict[int, Pixels]:
    """Some frames of a video; see `dynapar.data.video.decode_frames`.

    Raises:
        SampleError: The file is missing, cannot be decoded, or ends before the last frame.
        SourceError: Package av is not installed.
    """
    _require_av(item)
    from dynapar.data import video

    return video.decode_frames(item, frames)


def _require_av(item: MediaFile) -> None:
    if importlib.util.find_spec("av") is None:
        raise SourceError(
            f"{item.name} in {item.path} is a video or an audio clip, and package 'av' is not "
            "installed; these need it. Run: pip install 'dynapar[video]'"
        )
