"""Environment variables that hurt a run: what they do to it, and who says so.

dynapar's steps differ in shape from one to the next, exchange rows while attention computes, and
meet all ranks on gloo as well as on NCCL. What an environment carries over from debugging, or from
other trainers, often takes one of these away without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dynapar.doctor.finding import Finding, Status, fail, ok, warn
from dynapar.doctor.place import Place

_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TORCH_NCCL = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_TORCH_CUDA = "https://docs.pytorch.org/docs/stable/cuda_environment_variables.html"
_MEMORY = "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management"
_CUDA = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables"
_DISTRIBUTED = "https://docs.pytorch.org/docs/stable/distributed.html"
_NUMBA = "https://numba.readthedocs.io/en/stable/reference/envvars.html"
_OPENMP = "https://gcc.gnu.org/onlinedocs/libgomp/OMP_005fPROC_005fBIND.html"
_TOKENIZERS = "https://github.com/huggingface/transformers/issues/5486"

SYSTEM = Path("/etc/nccl.conf")

Where = Callable[[Place], bool]
"""On which machines a setting matters."""


def _gpu(place: Place) -> bool:
    return place.gpus > 0


def _ring(place: Place) -> bool:
    return place.gpus > 0 and place.local_ranks > 1


def _network(place: Place) -> bool:
    return place.gpus > 0 and place.several_machines


def _shared(place: Place) -> bool:
    return place.local_ranks > 1


def _anywhere(place: Place) -> bool:
    return True


class Setting(NamedTuple):
    """A variable, the values that hurt, and why."""

    name: str
    hurts: Callable[[str], bool]
    where: Where
    why: str
    source: str
    status: Status = "warn"


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _but(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() not in ("", *values)


SETTINGS = (
    Setting(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _on,
        _gpu,
        "every tensor is asked of the driver, which waits for the GPU each time",
        _TORCH_CUDA,
    ),
    Setting(
        "CUDA_LAUNCH_BLOCKING",
        _on,
        _gpu,
        "each kernel is waited for, so no exchange runs beside attention",
        _CUDA,
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _is("1"),
        _gpu,
        "work of all streams queues in one place, so an exchange waits behind attention; only "
        "tensor parallelism that counts on the order of launches wants it",
        _CUDA,
    ),
    Setting(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        _on,
        _gpu,
        "float32 is multiplied in TF32: gradients then agree with one process to about 1e-3",
        _TORCH_CUDA,
    ),
    Setting(
        "NCCL_P2P_DISABLE",
        _on,
        _ring,
        "rows between the GPUs of a machine go through its memory instead of NVLink or PCI",
        _NCCL,
    ),
    Setting(
        "NCCL_P2P_LEVEL",
        _is("loc", "0"),
        _ring,
        "no pair of GPUs is near enough to exchange directly: rows go through the machine's memory",
        _NCCL,
    ),
    Setting(
        "NCCL_SHM_DISABLE",
        _on,
        _ring,
        "GPUs that cannot reach each other exchange over the network instead of shared memory",
        _NCCL,
    ),
    Setting(
        "NCCL_IB_DISABLE",
        _on,
        _network,
        "rings and reductions between machines use IP sockets instead of InfiniBand or RoCE",
        _NCCL,
    ),
    Setting(
        "TORCH_NCCL_BLOCKING_WAIT",
        _on,
        _gpu,
        "a rank stops at each wait for a message until it is there, so no exchange runs beside "
        "attention",
        _TORCH_NCCL,
    ),
    Setting(
        "NCCL_BLOCKING_WAIT",
        _on,
        _gpu,
        "the old name of TORCH_NCCL_BLOCKING_WAIT: a rank stops at each wait for a message",
        _TORCH_NCCL,
    ),
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _is("0"),
        _gpu,
        "a message that never comes is never noticed: a rank that is gone leaves the others "
        "hanging, whatever timeout_seconds says",
        _TORCH_NCCL,
        "fail",
    ),
    Setting(
        "NCCL_ASYNC_ERROR_HANDLING",
        _is("0"),
        _gpu,
        "the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING: a rank that is gone leaves the others "
        "hanging",
        _TORCH_NCCL,
        "fail",
    ),
    Setting(
        "TORCH_DISTRIBUTED_DEBUG",
        _is("detail"),
        _anywhere,
        "every collective is checked by further ones before it runs",
        _DISTRIBUTED,
    ),
    Setting(
        "NUMBA_DISABLE_JIT",
        _on,
        _anywhere,
        "the planner runs as plain Python, a thousand times slower: steps wait for their plans",
        _NUMBA,
        "fail",
    ),
    Setting(
        "NUMBA_OPT",
        _but("3", "max"),
        _anywhere,
        "the planner is compiled with less optimization than numba's default of 3",
        _NUMBA,
    ),
    Setting(
        "NUMBA_BOUNDSCHECK",
        _on,
        _anywhere,
        "the planner checks every index",
        _NUMBA,
    ),
    Setting(
        "OMP_PROC_BIND",
        _but("false", "0"),
        _shared,
        "OpenMP binds the threads of each rank, all ranks from the same first core on",
        _OPENMP,
    ),
    Setting(
        "GOMP_CPU_AFFINITY",
        _but(),
        _shared,
        "the threads of all ranks are bound to the same cores",
        "https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fCPU_005fAFFINITY.html",
    ),
    Setting(
        "TOKENIZERS_PARALLELISM",
        _is("1", "true", "yes", "on", "t", "y"),
        _anywhere,
        "a data loader that forks its workers can hang in a tokenizer that has threads already; "
        "dynapar's own loader does not fork",
        _TOKENIZERS,
    ),
)


def nccl_files(environ: Mapping[str, str], *, home: Path, system: Path = SYSTEM) -> dict[str, str]:
    """What NCCL reads beside the environment: its files' settings, those it meets first.

    The file that NCCL_CONF_FILE names, else the user's own, and then the system's
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).

    Args:
        environ: The environment variables, which win over files.
        home: The user's folder.
        system: The system's file.
    """
    given = environ.get("NCCL_CONF_FILE")
    found: dict[str, str] = {}
    for path in (Path(given) if given else home / ".nccl.conf", system):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and not name.lstrip().startswith("#"):
                found.setdefault(name.strip(), value.strip())
    return {name: value for name, value in found.items() if name not in environ}


def check_settings(
    environ: Mapping[str, str],
    place: Place,
    *,
    cores: int,
    files: Mapping[str, str] = MappingProxyType({}),
) -> list[Finding]:
    """Name every variable that hurts a run at this place.

    Args:
        environ: The environment variables.
        place: From `find_place`.
        cores: That this process may run on.
        files: From `nccl_files`.

    Returns:
        A finding for the allocator, one for each variable that hurts, and one that says how many
        were looked at where none does.
    """
    hurting = [
        finding for setting in SETTINGS if (finding := _judge(setting, environ, place)) is not None
    ]
    for setting in SETTINGS:
        if setting.name.startswith("NCCL_") and (finding := _judge(setting, files, place)):
            name = setting.name
            do = f"take {name} out of NCCL's files"
            hurting.append(replace(finding, check=f"{name} in a file", do=do))
    if (threads := _threads(environ, place, cores)) is not None:
        hurting.append(threads)
    looked = f"{len(SETTINGS) + 1} variables looked at, none hurts"
    return [_allocator(environ, place), *(hurting or [ok("environment", looked)])]


def _judge(setting: Setting, environ: Mapping[str, str], place: Place) -> Finding | None:
    value = environ.get(setting.name)
    if value is None or not setting.where(place) or not setting.hurts(value):
        return None
    make = fail if setting.status == "fail" else warn
    found = f"{value}: {setting.why}"
    return make(setting.name, found, f"unset {setting.name}", source=setting.source)


def _threads(environ: Mapping[str, str], place: Place, cores: int) -> Finding | None:
    """OMP_NUM_THREADS, of which torchrun makes 1 where it is not set."""
    value = environ.get("OMP_NUM_THREADS", "")
    threads = int(value) if value.isdecimal() else 1
    if threads > 1 and threads * place.local_ranks > cores:
        ranks = f"each of {place.local_ranks} ranks" if place.local_ranks > 1 else "one rank"
        return warn(
            "OMP_NUM_THREADS",
            f"{threads} threads for {ranks} on {cores} cores: they take turns, and measured times "
            "mean little",
            f"set OMP_NUM_THREADS to {max(1, cores // place.local_ranks)}",
            source="https://docs.pytorch.org/docs/stable/elastic/run.html",
        )
    return None


def _allocator(environ: Mapping[str, str], place: Place) -> Finding:
    if not place.gpus:
        return ok("allocator", "no GPU: nothing to set")
    name = "PYTORCH_ALLOC_CONF"
    if name not in environ and "PYTORCH_CUDA_ALLOC_CONF" in environ:
        name = "PYTORCH_CUDA_ALLOC_CONF"  # its alias, and the only name before torch 2.10
    value = environ.get(name, "")
    options = dict(
        (key.strip(), setting.strip())
        for key, _, setting in (part.partition(":") for part in value.split(","))
    )
    if options.get("expandable_segments", "").lower() == "true":
        return ok("allocator", f"{name} is {value}")
    kept = "".join(f",{part.strip()}" for part in value.split(",") if _keeps(part))
    return warn(
        "allocator",
        f"{name} is {value!r} without expandable_segments: shapes change with every step, so "
        "blocks of other sizes pile up until memory runs out early",
        f"set {name}=expandable_segments:True{kept}",
        source=_MEMORY,
    )


def _keeps(part: str) -> bool:
    return bool(part.strip()) and not part.strip().startswith("expandable_segments")
