from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "packing"

PROGRAM = """
from {package} import moldable
from {package}.ticks import Coefficients
costs = Coefficients(1.0, 5, 0.0, 0.0, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 7, 0, 0, 1)
print(moldable.overhead(1, costs))
"""


def run(folder: Path) -> str:
    program = PROGRAM.format(package=folder.name)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    """numba alone would go on with the cached code: the caller's own file is the same."""
    folder = tmp_path / "kernels"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(folder) == "12"
    ticks = folder / "ticks.py"
    text = ticks.read_text()
    changed = text.replace("costs.hop * (degree - 1) + 0.5", "costs.hop * (degree - 1) + 100.5")
    assert changed != text
    ticks.write_text(changed)
    assert run(folder) == "112"
