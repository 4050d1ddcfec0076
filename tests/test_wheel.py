"""A built wheel holds exactly the sources, under the names by which they are imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("packing", "attention", "dynapar")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from, so that no old build folder can take part."""
    root = tmp_path_factory.mktemp("sources")
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, root / name)
    return root


def build(sources: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    return subprocess.run(
        [*command, str(sources)], capture_output=True, text=True, check=False, cwd=out
    )


def test_wheel_holds_the_sources(sources: Path, tmp_path: Path) -> None:
    done = build(sources, tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    expected = {
        str(Path("dynapar", "" if folder == "dynapar" else folder, path.relative_to(root))): (
            path.read_bytes()
        )
        for folder in FOLDERS
        for root in [sources / folder]
        for path in root.rglob("*")
        if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        held = {name: archive.read(name) for name in names}
    assert set(expected) - set(held) == set(), "name these packages or data in pyproject.toml"
    assert set(held) - set(expected) == set()
    assert held == expected


def test_a_lost_link_fails_the_build(sources: Path, tmp_path: Path) -> None:
    """Where a checkout has no links, a wheel short of a package must not come out."""
    broken = tmp_path / "broken"
    shutil.copytree(sources, broken, symlinks=True)
    (broken / "dynapar" / "packing").unlink()
    done = build(broken, tmp_path)
    assert done.returncode != 0
    assert "dynapar/packing" in (done.stdout + done.stderr)
    assert list(tmp_path.glob("*.whl")) == []
