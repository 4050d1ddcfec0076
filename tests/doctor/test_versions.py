from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dynapar.doctor.finding import Finding
from dynapar.doctor.versions import PACKAGES, PYTHON, check_versions, installed

ROOT = Path(__file__).parents[2]
GOOD: dict[str, str | None] = {package.name: package.least for package in PACKAGES}


def found(name: str, changes: dict[str, str | None], python: str = "3.12.1") -> Finding:
    (row,) = [row for row in check_versions(GOOD | changes, python=python) if row.check == name]
    return row


def test_the_limits_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    for package in PACKAGES:
        assert f"{package.name}>={package.least}" in needed
        if package.extra:
            assert f"{package.name}>={package.least}" in extras[package.extra]
        else:
            assert f"{package.name}>={package.least}" in project["dependencies"]
    assert project["requires-python"] == f">={PYTHON}"


def test_least_versions_do_and_this_environment_too() -> None:
    for versions in (GOOD, installed()):
        rows = check_versions(versions, python="3.11.0")
        assert [row.check for row in rows] == ["python", *(p.name for p in PACKAGES)]
        assert {row.status for row in rows} == {"ok"}


@pytest.mark.parametrize(
    ("name", "version", "status", "text", "do"),
    [
        ("torch", None, "fail", "not installed; expected 2.10 or newer", "'torch>=2.10'"),
        ("torch", "2.9.1+cu128", "fail", "2.9.1+cu128; expected 2.10 or newer", "'torch>=2.10'"),
        ("torch", "2.10.0a0+git12", "ok", "2.10.0a0+git12 (>= 2.10)", ""),
        ("numba", "0.7", "fail", "0.7; expected 0.61 or newer", "'numba>=0.61'"),
        ("webdataset", "1.0", "ok", "1.0 (>= 0.2.100)", ""),
        ("transformers", "5.9.0", "fail", "5.9.0; expected 5.10 or newer", "'dynapar[hf]'"),
        (
            "transformers",
            None,
            "warn",
            "not installed; needed for train, verify and calibrate",
            "'dynapar[hf]'",
        ),
        (
            "flash-attn",
            None,
            "ok",
            "not installed; needed for the kernel flash_attn_2 on GPUs",
            "",
        ),
        ("flash-attn", "2.6.3", "fail", "2.6.3; expected 2.7 or newer", "'dynapar[flash]'"),
    ],
)
def test_versions_are_judged(
    name: str, version: str | None, status: str, text: str, do: str
) -> None:
    row = found(name, {name: version})
    assert (row.status, row.found) == (status, text)
    assert row.do == (f"pip install {do}" if do else "")


def test_an_old_python_is_named() -> None:
    row = found("python", {}, python="3.10.14")
    assert (row.status, row.found) == ("fail", "3.10.14; expected 3.11 or newer")
