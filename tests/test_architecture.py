"""Imports point one way, light modules stay light, and what is public is documented.

Each check is a function over a folder, so that it can be seen to fail on a planted mistake.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = ("packing", "attention")

FLOORS = (
    ("errors", "config"),
    ("shapes", "modelfiles", "families", "catalog", "flops", "cluster", "rings"),
    ("costs", "schemes", "devices", "prefixes", "meta", "workloads", "memory", "plan"),
    ("speeds", "planner", "inspection", "simulate", "control"),
    ("data", "runtime"),
    ("real_counts", "real_lengths", "planning", "console"),
    (
        "memory_command",
        "index_command",
        "plan_check",
        "plan_command",
        "simulate_command",
        "inspect_command",
        "verify_lengths",
        "order_command",
    ),
    ("train", "verify", "calibrate", "integrations", "report", "bench", "doctor"),
    (
        "cli_options",
        "cli_lengths",
        "cli_bench",
        "cli_doctor",
        "cli_report",
        "cli_calibrate",
        "cli",
        "__main__",
    ),
)
"""The parts of `dynapar`, from the ground up; a part may also import what stands to its left."""

COMMANDS = ("cli", "console", *FLOORS[6], *FLOORS[-2])
"""What people meet, and so may print."""

ORDER = {part: place for place, part in enumerate(part for floor in FLOORS for part in floor)}
"""Rank of each part: it may import the parts of a lower rank."""

NUMPY_ONLY = ("__init__", "bands", "evenly", "heads", "prices", "select", "shards", "trees")
"""Modules of `attention` that the planner may load; they import each other and numpy alone."""

LIGHT = (
    "dynapar",
    "dynapar.attention",
    "dynapar.attention.bands",
    "dynapar.attention.evenly",
    "dynapar.attention.select",
    "dynapar.attention.shards",
    "dynapar.attention.trees",
    "dynapar.catalog",
    "dynapar.cli",
    "dynapar.cluster",
    "dynapar.config",
    "dynapar.costs",
    "dynapar.data.index",
    "dynapar.data.sampler",
    "dynapar.data.sources",
    "dynapar.families.presets",
    "dynapar.flops",
    "dynapar.inspect_command",
    "dynapar.meta",
    "dynapar.packing",
    "dynapar.plan",
    "dynapar.plan_command",
    "dynapar.planner",
    "dynapar.rings",
    "dynapar.schemes",
    "dynapar.workloads",
)
HEAVY = ("torch", "transformers")


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a file, also inside functions."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def modules(root: Path, folder: str) -> list[Path]:
    """Python files of a folder, in order, without those behind its links."""
    found = [
        Path(where) / name
        for where, _, names in os.walk(root / folder)
        for name in names
        if name.endswith(".py")
    ]
    return sorted(found)


def wrong_imports(root: Path) -> list[str]:
    """Every import that points up or across, as "file:line imports name"."""
    wrong = []
    for folder in (*LEAVES, "dynapar"):
        for path in modules(root, folder):
            for line, name in imports(path, root):
                if not _allowed(path.relative_to(root), name):
                    wrong.append(f"{path.relative_to(root)}:{line} imports {name}")
    return wrong


def _allowed(path: Path, name: str) -> bool:
    folder, top = path.parts[0], name.split(".")[0]
    if folder in LEAVES:
        if folder == "attention" and path.stem in NUMPY_ONLY:
            inner = name.split(".")[1:2]
            return top == "numpy" or _standard(top) or (top == folder and inner[0] in NUMPY_ONLY)
        heavy = folder == "packing" and top in HEAVY
        return not heavy and top not in {"dynapar", *LEAVES} - {folder}
    if top in LEAVES:
        return False
    parts = name.split(".")
    if top != "dynapar" or len(parts) == 1 or parts[1] in (*LEAVES, "__version__"):
        return True
    part = path.parts[1].removesuffix(".py")
    # An unknown part is refused: give it a place in FLOORS.
    return part in ORDER and parts[1] in ORDER and ORDER[parts[1]] <= ORDER[part]


def _standard(top: str) -> bool:
    return top in sys.stdlib_module_names


def undocumented(root: Path) -> list[str]:
    """Public modules, classes, functions and methods without a docstring."""
    missing = []
    for folder in (*LEAVES, "dynapar"):
        for path in modules(root, folder):
            where = path.relative_to(root)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if ast.get_docstring(tree) is None:
                missing.append(f"{where}: the module")
            missing += [f"{where}:{line}: {name}" for line, name in _bare(tree.body, "")]
    return missing


def _bare(body: list[ast.stmt], prefix: str) -> Iterator[tuple[int, str]]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") or _is_overload(node):
            continue
        if ast.get_docstring(node) is None:
            yield node.lineno, prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _bare(node.body, f"{prefix}{node.name}.")


def _is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list)


def prints(root: Path) -> list[str]:
    """Calls of `print` outside of what people meet."""
    return [
        f"{path.relative_to(root)}:{node.lineno}"
        for folder in (*LEAVES, "dynapar")
        for path in modules(root, folder)
        if folder != "dynapar" or path.relative_to(root / folder).parts[0] not in _MAY_PRINT
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


_MAY_PRINT = {name for part in COMMANDS for name in (part, f"{part}.py")}


def heavy_after(code: str) -> list[str]:
    """What of HEAVY a fresh interpreter has loaded after running `code`."""
    check = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    command = [sys.executable, "-c", f"{code}\n{check}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources in which a mistake can be planted."""
    for folder in (*LEAVES, "dynapar"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    return tmp_path


def test_imports_point_one_way() -> None:
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("packing/ticks.py", "import torch"),
        ("packing/ticks.py", "from dynapar.errors import PlanError"),
        ("packing/ticks.py", "def late():\n    from attention import shards"),
        ("attention/shards.py", "import torch"),
        ("attention/shards.py", "from .api import attend"),
        ("attention/shards.py", "from dynapar import packing"),
        ("dynapar/errors.py", "from dynapar.plan import StepPlan"),
        ("dynapar/plan.py", "from dynapar import planner"),
        ("dynapar/control.py", "import dynapar.runtime.order"),
        ("dynapar/data/samples.py", "from ..runtime import executor"),
        ("dynapar/train/__init__.py", "import dynapar.cli"),
        ("dynapar/meta.py", "import packing"),
        ("dynapar/meta.py", "import dynapar.helpers"),
    ],
)
def test_a_planted_import_is_found(copy: Path, path: str, line: str) -> None:
    before = wrong_imports(copy)
    with (copy / path).open("a") as file:
        file.write(f"\n{line}\n")
    (found,) = set(wrong_imports(copy)) - set(before)
    assert found.startswith(f"{path}:")


def test_what_is_public_is_documented() -> None:
    assert undocumented(ROOT) == []


def test_a_bare_method_is_found(copy: Path) -> None:
    (copy / "packing" / "bare.py").write_text("class Plan:\n    def run(self): ...\n")
    expected = {
        "packing/bare.py: the module",
        "packing/bare.py:1: Plan",
        "packing/bare.py:2: Plan.run",
    }
    assert expected <= set(undocumented(copy))


def test_only_commands_print(copy: Path) -> None:
    assert prints(ROOT) == []
    (copy / "dynapar" / "data" / "loud.py").write_text("def f():\n    print('x')\n")
    assert prints(copy) == ["dynapar/data/loud.py:2"]


@pytest.mark.parametrize("module", LIGHT)
def test_imports_without_torch(module: str) -> None:
    assert heavy_after(f"import {module}") == []


def test_the_check_for_torch_can_fail() -> None:
    assert heavy_after("import dynapar.attention.api") == ["torch"]


@pytest.mark.parametrize("folder", LEAVES)
def test_the_linked_folders_are_relative_links(folder: str) -> None:
    link = ROOT / "dynapar" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    done = subprocess.run(
        ["git", "ls-files", "--stage", f"dynapar/{folder}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    # In an unpacked archive there is no git to ask.
    assert done.returncode != 0 or done.stdout.startswith("120000 ")
