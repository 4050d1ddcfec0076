"""Small sources written by tests: pictures, clips and conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image


def noise(height: int, width: int, seed: int = 0, channels: int = 3) -> Image.Image:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def write_clip(path: Path, frames: int, *, height: int = 64, width: int = 96, fps: int = 8) -> None:
    """Frames that get brighter, so that each one can be told from its neighbours."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(fps))
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = height, width, "yuv420p", 12
        for number in range(frames):
            pixels = np.full((height, width, 3), 5 + 240 * number // frames, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def write_lines(path: Path, samples: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path
