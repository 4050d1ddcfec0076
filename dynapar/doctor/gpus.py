"""Which GPUs torch sees, and whether they suit attention kernels and each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dynapar.doctor.finding import Finding, fail, ok, warn
from dynapar.doctor.place import Place

FLASH = (8, 0)
"""The least compute capability that flash attention and bfloat16 run on."""
DRIVER = Path("/proc/driver/nvidia/version")
"""Is there where the NVIDIA driver is loaded."""


class Gpu(NamedTuple):
    """A GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes."""
    peers: tuple[int, ...]
    """Numbers of the GPUs of this machine whose memory it reaches directly."""


def find_gpus() -> list[Gpu]:
    """The GPUs that torch sees.

    Raises:
        ImportError: torch is not installed.
        OSError: torch cannot be loaded.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for number in range(count):
        facts = torch.cuda.get_device_properties(number)
        peers = tuple(
            other
            for other in range(count)
            if other != number and torch.cuda.can_device_access_peer(number, other)
        )
        found.append(Gpu(facts.name, (facts.major, facts.minor), facts.total_memory, peers))
    return found


def check_gpus(
    gpus: Sequence[Gpu], place: Place, *, driver: bool, build: str, nccl: bool
) -> list[Finding]:
    """Judge the GPUs for the ranks of a place.

    Args:
        gpus: From `find_gpus`.
        place: From `find_place`.
        driver: Whether the NVIDIA driver is loaded.
        build: Of torch: the version of CUDA that it was built for, or "CPU".
        nccl: Whether that build has NCCL.
    """
    if not gpus:
        if driver:
            return [
                warn(
                    "GPUs",
                    f"torch ({build} build) sees none, but the NVIDIA driver is loaded: a run "
                    "would train on the CPU",
                    "install the CUDA build of torch, or look at CUDA_VISIBLE_DEVICES",
                )
            ]
        return [ok("GPUs", f"none; torch ({build} build) trains on the CPU over gloo")]
    kinds = dict.fromkeys(f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB" for gpu in gpus)
    rows = [ok("GPUs", f"{len(gpus)}: {'; '.join(kinds)}")]
    if place.local_ranks > len(gpus):
        rows = [
            fail(
                "GPUs",
                f"{len(gpus)} for {place.local_ranks} ranks: each rank needs one of its own",
                "start fewer ranks, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU",
            )
        ]
    elif len(kinds) > 1:
        rows = [
            warn(
                "GPUs",
                f"of several kinds: {'; '.join(kinds)}; plans take all ranks for equally fast and "
                "large until measured speeds say otherwise",
                "run on GPUs of one kind, or let capacity follow the smallest",
            )
        ]
    if place.ranks > 1 and not nccl:
        rows.append(
            fail(
                "NCCL",
                f"this build of torch ({build}) has none: ranks on GPUs cannot meet",
                "install a build of torch with NCCL, as its CUDA wheels for Linux are",
            )
        )
    return rows + _old(gpus) + _apart(gpus)


def _old(gpus: Sequence[Gpu]) -> list[Finding]:
    old = [
        f"GPU {number} ({gpu.name}) has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        for number, gpu in enumerate(gpus)
        if gpu.capability < FLASH
    ]
    if not old:
        return []
    found = f"{'; '.join(old)}; flash attention and bfloat16 want 8.0 or more"
    return [warn("flash attention", found, "use newer GPUs; else attention takes plain products")]


def _apart(gpus: Sequence[Gpu]) -> list[Finding]:
    apart = [
        f"{one}-{two}"
        for one, gpu in enumerate(gpus)
        for two in range(one + 1, len(gpus))
        if two not in gpu.peers
    ]
    if len(gpus) < 2:
        return []
    if not apart:
        return [ok("peer access", f"between all {len(gpus)} GPUs")]
    pairs = ", ".join(apart[:6]) + (", ..." if len(apart) > 6 else "")
    return [
        warn(
            "peer access",
            f"{len(apart)} pairs of GPUs do not reach each other directly ({pairs}): their rows "
            "go through the machine's memory",
            "look at nvidia-smi topo -m; keep max_degree within GPUs that do",
        )
    ]
