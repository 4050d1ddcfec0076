"""The command `dynapar index`: lengths from headers, written to a file, summed up in a row."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from dynapar.catalog import load_model_shape
from dynapar.console import Cell, progress, show_json, show_table
from dynapar.data.index import IndexSummary, build_index
from dynapar.data.sources import open_source


def index_command(
    source: str, *, model: str, out: Path, skip_bad: bool = False, json: bool = False
) -> None:
    """Index a source and print one row about it; notes and bad samples go to standard error.

    Args:
        source: A conversation file or webdataset shards.
        model: A model's folder, with its tokenizer.
        out: The Parquet file to write.
        skip_bad: Leave out samples that cannot be read, and name them, instead of stopping.
        json: Print JSON instead of a table.

    Raises:
        DynaparError: The source, a sample or the model cannot be used.
    """
    shape = load_model_shape(model)
    began = time.perf_counter()
    with progress(f"indexing {source}") as advance:
        found = build_index(open_source(source), shape, out, advance, skip_bad=skip_bad)
    seconds = time.perf_counter() - began
    for line in (*found.notes, *(f"left out: {reason}" for reason in found.skipped)):
        print(line, file=sys.stderr)
    if not found.label_tokens:
        print(f"{source} has 0 targets: there is nothing to learn from it", file=sys.stderr)
    if json:
        show_json({"source": source, "out": str(out), "seconds": seconds, **asdict(found)})
    else:
        show_table(f"{source}: index written to {out}", [_row(found, seconds)])


def _row(found: IndexSummary, seconds: float) -> dict[str, Cell]:
    return {
        "samples": found.samples,
        **found.kinds,
        "LLM tokens": found.llm_tokens,
        "targets": found.label_tokens,
        "encoder tokens": found.encoder_tokens,
        "left out": len(found.skipped),
        "seconds": round(seconds, 2),
    }
