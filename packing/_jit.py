"""The one way in which kernels are compiled.

numba keeps compiled code on disk and notices that a file changed, but not that a file from which
it inlined something did: a rank could go on planning with yesterday's costs. So each kernel's
cache is stamped with all sources of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


@cache
def sources_stamp() -> tuple[str, int]:
    """A digest of every source file of this package, in the form of numba's own stamps."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest(), 0


def kernel(fn: Callable[P, R]) -> Callable[P, R]:
    """Compile `fn` once, keep it on disk, and release the GIL while it runs.

    Never with fastmath: equal input must give equal output on every rank.
    """
    dispatcher = numba.njit(cache=True, nogil=True)(fn)
    dispatcher._cache._cache_file._source_stamp = sources_stamp()
    return cast(Callable[P, R], dispatcher)
