"""The machine's limits: cores, open files, shared memory, and the folder of compiled planners."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import dynapar.packing
from dynapar.doctor.finding import Finding, fail, ok, warn
from dynapar.doctor.place import Place

SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm that NVIDIA asks for."""
_NCCL_MEMORY = (
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/"
    "runtime_and_mpi_issues.html"
)
FILES, FILES_A_RANK = 512, 4
"""Open files that a rank needs: for itself and its sources, and for each other rank (a socket in
each of the three groups that a run makes, one to spare)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operating system gives a process."""

    cores: int
    """That it may run on."""
    files: int
    """That it may have open."""
    shared_memory: int | None
    """Bytes of /dev/shm; None where there is none."""
    locked_memory: int | None
    """Bytes that it may lock; None for any."""
    address: str | None
    """What this machine's name means on it; None where nothing."""


def find_limits() -> Limits:
    """The limits of this process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Limits(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        files=files if files != resource.RLIM_INFINITY else 1 << 62,
        shared_memory=_size(Path("/dev/shm")),
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        address=_address(),
    )


def _cores() -> int:
    return os.cpu_count() or 1


def _size(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def check_limits(limits: Limits, place: Place, environ: Mapping[str, str]) -> list[Finding]:
    """Judge the limits for the ranks of a place.

    Args:
        limits: From `find_limits`.
        place: From `find_place`.
        environ: The environment variables.
    """
    rows = [_files(limits, place)]
    if place.gpus and place.local_ranks > 1:
        rows.append(_shared_memory(limits))
    if place.gpus and place.several_machines:
        rows += _locked_memory(limits)
    if place.several_machines:
        rows.append(_gloo(limits, environ))
    return rows


def _files(limits: Limits, place: Place) -> Finding:
    needed = FILES + FILES_A_RANK * place.ranks
    if limits.files < needed:
        return warn(
            "open files",
            f"at most {limits.files:,}; {place.ranks:,} ranks may need {needed:,} each",
            f"ulimit -n {max(65_536, needed)} in the shell that starts the run",
        )
    return ok("open files", "no limit" if limits.files >> 60 else f"at most {limits.files:,}")


def _shared_memory(limits: Limits) -> Finding:
    size = limits.shared_memory
    if size is None or size < SHARED_MEMORY:
        found = "there is no /dev/shm" if size is None else f"/dev/shm has {size >> 20:,} MiB"
        return warn(
            "shared memory",
            f"{found}; NCCL keeps its messages between the ranks of a machine there",
            "start the container with --shm-size=1g or more, or --ipc=host",
            source=_NCCL_MEMORY,
        )
    return ok("shared memory", f"/dev/shm has {size >> 20:,} MiB")


def _locked_memory(limits: Limits) -> list[Finding]:
    if limits.locked_memory is None:
        return []
    return [
        warn(
            "locked memory",
            f"at most {limits.locked_memory >> 10:,} KiB; network cards that read memory by "
            "themselves need it locked",
            "start the container with --ulimit memlock=-1",
            source=_NCCL_MEMORY,
        )
    ]


def _gloo(limits: Limits, environ: Mapping[str, str]) -> Finding:
    """Ranks agree on steps over gloo, which goes by the machine's name unless told a network."""
    if name := environ.get("GLOO_SOCKET_IFNAME"):
        return ok("gloo's network", f"GLOO_SOCKET_IFNAME is {name}")
    address = limits.address
    if address is None or address.startswith("127."):
        return fail(
            "gloo's network",
            f"this machine's name means {address or 'no address'} on it: ranks of other machines "
            "cannot connect, and a run ends while its ranks meet",
            "set GLOO_SOCKET_IFNAME to the network interface that the machines share",
            source="https://docs.pytorch.org/docs/stable/distributed.html",
        )
    return ok("gloo's network", f"{address}, by the machine's name")


def cache_folders(environ: Mapping[str, str], *, home: Path) -> list[Path]:
    """Where numba would keep what it compiles, in its order.

    The folder that NUMBA_CACHE_DIR names, the package's own, the user's
    (https://numba.readthedocs.io/en/stable/developer/caching.html).

    Args:
        environ: The environment variables.
        home: The user's folder.
    """
    own = Path(str(dynapar.packing.__file__)).parent / "__pycache__"
    cache = environ.get("XDG_CACHE_HOME")
    users = (Path(cache) if cache else home / ".cache") / "numba"
    given = environ.get("NUMBA_CACHE_DIR")
    return [*([Path(given)] if given else []), own, users]


def check_cache(folders: Sequence[Path]) -> Finding:
    """Find the first folder that can be written: without one, the planner cannot be imported."""
    reasons: list[str] = []
    for folder in folders:
        reason = _unwritable(folder)
        if reason is None:
            if not reasons:
                return ok("compiled planner", f"kept in {folder}")
            return warn(
                "compiled planner",
                f"kept in {folder}, since {'; '.join(reasons)}",
                "nothing, if all ranks of the machine see that folder; else set NUMBA_CACHE_DIR "
                "to one that they do",
            )
        reasons.append(reason)
    return fail(
        "compiled planner",
        f"can be kept nowhere: {'; '.join(reasons)}. numba then refuses to load the planner",
        "set NUMBA_CACHE_DIR to a folder that can be written",
        source="https://numba.readthedocs.io/en/stable/developer/caching.html",
    )


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder, which is made where it is missing; or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return None
