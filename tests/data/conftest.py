"""The demo data, built once for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynapar.catalog import ModelShape, load_model_shape
from dynapar.data.index import Index, build_index, read_index
from dynapar.data.sources import Source, open_source

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_demo_data"


def build_demo(out: Path) -> str:
    """Run the script; its output."""
    command = [sys.executable, str(SCRIPT), str(out)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Demo:
    folder: Path
    shape: ModelShape
    source: Source
    index: Index


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    out = tmp_path_factory.mktemp("demo")
    build_demo(out)
    shape = load_model_shape(str(out / "model"))
    source = open_source(str(out / "data" / "conversations.jsonl"))
    build_index(source, shape, out / "index.parquet")
    return Demo(out, shape, source, read_index(out / "index.parquet"))
