"""The one way in which kernels are compiled.

numba keeps compiled code on disk and notices that a file changed, but not that a file from which
it inlined something did: a rank could go on planning with yesterday's arithmetic. And it cannot
read an index that names a class which has moved since. So each kernel's cache bears a version that
covers all sources of this package, which numba compares before it reads anything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


@cache
def sources_version() -> str:
    """The version of numba, and a digest of every source file of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{numba.__version__}+{digest.hexdigest()}"


def kernel(fn: Callable[P, R]) -> Callable[P, R]:
    """Compile `fn` once, keep it on disk, and release the GIL while it runs.

    Never with fastmath: equal input must give equal output on every rank.
    """
    return _compiled(fn, inline="never")


def inlined(fn: Callable[P, R]) -> Callable[P, R]:
    """A kernel that becomes part of those that call it.

    For what runs once a sample: numba counts references to every array of a structure that is
    passed to a call, which takes longer than what such a kernel does.
    """
    return _compiled(fn, inline="always")


def _compiled(fn: Callable[P, R], *, inline: Literal["never", "always"]) -> Callable[P, R]:
    dispatcher = numba.njit(cache=True, nogil=True, inline=inline)(fn)
    dispatcher._cache._cache_file._version = sources_version()  # type: ignore[attr-defined]
    return cast(Callable[P, R], dispatcher)
