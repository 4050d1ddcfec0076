"""A tiny run over samples that share pictures, clips and first turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynapar.catalog import load_model_shape
from dynapar.data.index import build_index
from dynapar.data.sources import open_source
from tests.data.small import noise, said, write_clip, write_lines
from tests.train.tiny import write_config, write_model

COLOURS = ("red", "green", "blue", "red green blue " * 9)


def asked(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def write_run(folder: Path, *, named: bool = True, **changes: Any) -> Path:
    """Four answers about one picture, three about one clip, three to one text, two alone.

    The text's first answers are learnt in all three samples, so that targets of the prefix count
    three times. One answer about the picture comes with a picture of its own.
    """
    media = folder / "data" / "media"
    media.mkdir(parents=True)
    noise(40, 32, seed=0).save(media / "0.png")
    noise(24, 24, seed=1).save(media / "1.png")
    write_clip(media / "clip.mp4", 12, height=24, width=32)
    samples: list[dict[str, object]] = []
    for number, colour in enumerate(COLOURS):
        more = "<image>" if number == 2 else ""
        samples.append(
            {
                "id": f"image{number}",
                "messages": [asked("<image>what is it"), said(colour), asked(more), said("ja")],
                "images": ["media/0.png", "media/1.png"][: 1 + len(more) // 7],
                "prefix": "picture",
            }
        )
        if number < 3:
            turns = [asked("say it"), said("red red red"), asked("again"), said(colour)]
            samples.append({"id": f"text{number}", "messages": turns, "prefix": "talk"})
            turns = [asked("<video>and then"), said(f"{colour} blue")]
            samples.append(
                {
                    "id": f"video{number}",
                    "messages": turns,
                    "videos": ["media/clip.mp4"],
                    "prefix": "clip",
                }
            )
    samples.append({"id": "alone0", "messages": [asked("hm"), said("green " * 40)]})
    samples.append({"id": "alone1", "messages": [asked("hm"), said("red")], "prefix": "only one"})
    if not named:
        samples = [{key: each[key] for key in each if key != "prefix"} for each in samples]
    source = write_lines(folder / "data" / "data.jsonl", samples)
    model = write_model(folder / "model")
    build_index(open_source(str(source)), load_model_shape(str(model)), folder / "index.parquet")
    return write_config(
        folder,
        **{
            "planner": {"capacity": 150, "encoder_capacity": 300},
            "batch": {"samples": 12, "group_by": "prefix"},
            "verify": {"steps": 1, "plans": 2},
            **changes,
        },
    )
