"""`dynapar bench step`: compare layouts of the same steps, and show what was found."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import torch
import transformers

import dynapar
from dynapar.bench.step import compare_layouts
from dynapar.console import show_json, show_table
from dynapar.train.config import read_run_config


def step_command(
    config: Path, *, steps: int, repeats: int, ranks: int, seed: int, json: bool
) -> None:
    """Compare dynapar's plan, the best single degree and padded batches; print a table or JSON.

    Args:
        config: Of a run.
        steps: To compare.
        repeats: How often each layout of a step runs.
        ranks: Processes.
        seed: Of the samples' order.
        json: Print one JSON value a layout.
    """
    run = dataclasses.replace(read_run_config(config), seed=seed)
    found = compare_layouts(run, steps=steps, repeats=repeats, ranks=ranks)
    if not json:
        show_table(
            f"busy CPU time of the slowest rank over {found.steps} steps of {ranks} ranks; "
            f"{found.same} with equal plans",
            [
                {
                    "layout": result.layout,
                    "busy s": round(result.busy_seconds, 2),
                    "x dynapar": round(result.ratio, 3),
                    "95 % from": round(result.interval[0], 3),
                    "to": round(result.interval[1], 3),
                    "LLM tokens": result.tokens,
                    "encoder tokens": result.encoder_tokens,
                }
                for result in found.results
            ],
        )
        return
    versions = {
        "dynapar": dynapar.__version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "cpu": platform.machine(),
    }  # fmt: skip
    case = {"steps": found.steps, "repeats": repeats, "ranks": ranks,
            "seed": seed, "steps_with_equal_plans": found.same}  # fmt: skip
    for result in found.results:
        row = dataclasses.asdict(result)
        row |= {key: round(row[key], 3) for key in ("busy_seconds", "wall_seconds", "ratio")}
        row["interval"] = [round(end, 3) for end in result.interval]
        show_json({"bench": "step", **row, **case, **versions})
