"""What scripts take from the package is there: no test runs all of them."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python_scripts() -> list[Path]:
    found = [path for path in (ROOT / "scripts").rglob("*") if path.is_file()]
    texts = [path for path in found if path.suffix in ("", ".py")]
    return sorted(path for path in texts if path.suffix or "python3" in path.read_text()[:40])


@pytest.mark.parametrize("path", python_scripts(), ids=lambda path: path.name)
def test_imports_resolve(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dynapar":
            module = importlib.import_module(node.module or "")
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{path.name} takes {missing} from {node.module}"
