"""A tiny run over text, pictures and clips, for checks that load real files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynapar.catalog import load_model_shape
from dynapar.data.index import build_index
from dynapar.data.sources import open_source
from tests.data.small import noise, said, write_clip, write_lines
from tests.train.tiny import write_config, write_model


def write_small_run(folder: Path, **changes: Any) -> Path:
    """Twelve samples in a batch: five of text, one of them long, five with pictures, two clips.

    Returns:
        The configuration file, over a model of some ten thousand parameters.
    """
    media = folder / "data" / "media"
    media.mkdir(parents=True)
    for number, (height, width) in enumerate([(24, 32), (16, 16), (40, 24), (24, 24)]):
        noise(height, width, seed=number).save(media / f"{number}.png")
    write_clip(media / "clip.mp4", 12, height=24, width=32)
    asked = {"role": "user", "content": "say it"}
    samples: list[dict[str, object]] = [
        {"id": f"text{count}", "messages": [asked, said("red " * count)]}
        for count in (1, 2, 9, 20, 90)
    ]
    for number, names in enumerate([["0"], ["1"], ["2"], ["0", "1"], ["3", "1", "0"]]):
        question = {"role": "user", "content": "<image>" * len(names) + "what is it"}
        samples.append(
            {
                "id": f"image{number}",
                "messages": [question, said("green " * (number + 1))],
                "images": [f"media/{name}.png" for name in names],
            }
        )
    for number in range(2):
        question = {"role": "user", "content": "<video>" + "then " * number}
        samples.append(
            {
                "id": f"video{number}",
                "messages": [question, said("blue")],
                "videos": ["media/clip.mp4"],
            }
        )
    source = write_lines(folder / "data" / "data.jsonl", samples)
    model = write_model(folder / "model")
    build_index(open_source(str(source)), load_model_shape(str(model)), folder / "index.parquet")
    return write_config(
        folder,
        **{
            "planner": {"capacity": 200, "encoder_capacity": 300},
            "batch": {"samples": 12},
            "verify": {"steps": 1, "plans": 3},
            **changes,
        },
    )
