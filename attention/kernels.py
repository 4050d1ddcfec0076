"""The table of attention kernels, and the choice of one.

In order of preference: flash-attn 2 and torch's own flash op on CUDA, torch's flash op on the CPU,
plain matrix products anywhere. A kernel that cannot run says why; what "auto" took is logged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from types import MappingProxyType

from .calls import AttentionError, Kernel, Request
from .kernels_cpu import CpuFlash
from .kernels_cuda import CudaFlash
from .kernels_flash2 import Flash2
from .kernels_math import Math

log = logging.getLogger(__name__)

KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {kernel.name: kernel for kernel in (Flash2(), CudaFlash(), CpuFlash(), Math())}
)


class KernelError(AttentionError, ValueError):
    """A kernel does not exist, or cannot run what it was asked for."""


@functools.lru_cache
def choose(request: Request, *, name: str = "auto") -> Kernel:
    """Find the kernel for a request.

    Args:
        request: What must be run.
        name: One of `KERNELS`, or "auto" for the first that can run it.

    Raises:
        KernelError: No such kernel, or it cannot run this; says why and which can.
    """
    reasons = {kernel: KERNELS[kernel].unusable(request) for kernel in KERNELS}
    usable = [kernel for kernel, reason in reasons.items() if reason is None]
    if name == "auto" and usable:
        refused = "; ".join(f"{k}: {reason}" for k, reason in reasons.items() if reason)
        log.info("attention kernel %s for %s (%s)", usable[0], request, refused or "first choice")
        return KERNELS[usable[0]]
    if name in usable:
        return KERNELS[name]
    why = "there is no such kernel" if name not in KERNELS else reasons[name]
    if name == "auto":
        why = "; ".join(f"{k}: {reason}" for k, reason in reasons.items())
    raise KernelError(
        f"attention kernel {name!r} cannot run {request}: {why}; expected one of {usable}: "
        "use one of these, or 'auto'"
    )
