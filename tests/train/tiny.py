"""A tiny model folder, a tiny source with its index, and a run's configuration over them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from dynapar.catalog import load_model_shape
from dynapar.data.index import build_index
from dynapar.data.sources import open_source

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

PLANNER = {"capacity": 400, "encoder_capacity": 400}
"""One rank holds any sample."""


def write_model(folder: Path, **text: Any) -> Path:
    """A Qwen2.5-VL of some ten thousand parameters whose tokens are bytes."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(name) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            },
            **text,
        },
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    }
    pixels = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


def write_source(folder: Path, *, samples: int, seed: int = 0) -> Path:
    """Conversations of 80 to 400 tokens, every third with a picture."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(samples):
        question, images = "say it", []
        if number % 3 == 0:
            pixels = np.random.default_rng(number).integers(0, 256, (24, 32, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            question, images = "<image>what is it", [f"{number}.png"]
        answer = " ".join(draw.choices(["red", "green", "blue"], k=draw.choice([2, 5, 60])))
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        rows.append({"id": f"s{number}", "messages": turns, "images": images})
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run(folder: Path, *, samples: int = 20, **changes: Any) -> Path:
    """Model, source, index and configuration; `changes` replace whole keys of the latter."""
    model = write_model(folder / "model")
    source = write_source(folder / "data", samples=samples)
    build_index(open_source(str(source)), load_model_shape(str(model)), folder / "index.parquet")
    return write_config(folder, **changes)


def write_config(folder: Path, name: str = "config.yaml", **changes: Any) -> Path:
    """A configuration over the files that `write_run` left in a folder."""
    values = {
        "model": "model",
        "source": "data/data.jsonl",
        "index": "index.parquet",
        "planner": {"capacity": 160, "encoder_capacity": 64},
        "batch": {"samples": 6},
        "optimizer": {"lr": 1e-2},
        "steps": 4,
        "checkpoint": {"folder": "run"},
        "timeout_seconds": 60.0,
    }
    path = folder / name
    path.write_text(yaml.safe_dump({**values, **changes}))
    return path
