"""Which versions are installed, and whether dynapar works with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from dynapar.doctor.finding import Finding, fail, ok, warn

PYTHON = "3.11"
"""The least version of Python."""


class Package(NamedTuple):
    """A package, and what dynapar needs it for."""

    name: str
    least: str
    """The least version that dynapar is tested with."""
    use: str
    """What does not work without it; empty for a package that dynapar always needs."""
    extra: str = ""
    """The extra of dynapar that installs it."""


PACKAGES = (
    Package("numpy", "1.26", ""),
    Package("numba", "0.61", ""),
    Package("torch", "2.10", ""),
    Package("datasets", "3", ""),
    Package("webdataset", "0.2.100", ""),
    Package("tokenizers", "0.21", ""),
    Package("transformers", "5.10", "train, verify and calibrate", "hf"),
    Package("flash-attn", "2.7", "the kernel flash_attn_2 on GPUs", "flash"),
    Package("av", "13", "videos and audio", "video"),
    Package("tensorboard", "2.14", "checkpoint.tensorboard", "tensorboard"),
)
"""The limits are those of pyproject.toml; a test holds them together."""


def installed() -> dict[str, str | None]:
    """The version of each of `PACKAGES`, None where it is not installed; imports none of them."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package.name] = version(package.name)
        except PackageNotFoundError:
            found[package.name] = None
    return found


def check_versions(found: Mapping[str, str | None], *, python: str) -> list[Finding]:
    """Judge the versions of Python and of `PACKAGES`.

    Args:
        found: Version by name of package; None, or no entry, where it is not installed.
        python: Of the interpreter.
    """
    rows = [
        ok("python", f"{python} (>= {PYTHON})")
        if _reaches(python, PYTHON)
        else fail("python", f"{python}; expected {PYTHON} or newer", "make a newer environment")
    ]
    return rows + [_judge(package, found.get(package.name)) for package in PACKAGES]


def _judge(package: Package, found: str | None) -> Finding:
    name, install = package.name, f"pip install '{package.name}>={package.least}'"
    if package.extra:
        install = f"pip install 'dynapar[{package.extra}]'"
    if found is None:
        if not package.use:
            return fail(name, f"not installed; expected {package.least} or newer", install)
        missing = f"not installed; needed for {package.use}"
        return warn(name, missing, install) if name == "transformers" else ok(name, missing)
    if not _reaches(found, package.least):
        return fail(name, f"{found}; expected {package.least} or newer", install)
    return ok(name, f"{found} (>= {package.least})")


def _reaches(found: str, least: str) -> bool:
    return _numbers(found) >= _numbers(least)


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version: what follows it (rc1, +cpu) does not count.

    >>> _numbers("2.13.0rc1+cpu")
    (2, 13, 0)
    """
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release.group().split("."))) if release else ()
