"""Which attention kernels run here, and why the others do not, by the kernels' own reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynapar.doctor.finding import Finding, fail, ok, warn

HEAD_DIM = 128
"""Of the models that most people train."""


def refusals(device: str) -> dict[str, str | None]:
    """Why each kernel cannot run bfloat16 on a type of device; None for one that can.

    In the order in which "auto" tries them.

    Raises:
        ImportError: torch is not installed.
        OSError: torch cannot be loaded.
    """
    import torch

    from dynapar.attention.calls import Request
    from dynapar.attention.kernels import KERNELS

    request = Request(device=device, dtype=torch.bfloat16, head_dim=HEAD_DIM)
    return {name: kernel.unusable(request) for name, kernel in KERNELS.items()}


def check_kernels(reasons: Mapping[str, str | None], *, device: str) -> list[Finding]:
    """Judge what "auto" would take.

    Args:
        reasons: From `refusals`.
        device: What they were asked for, "cpu" or "cuda".
    """
    what = f"bfloat16 on {device}"
    usable = [name for name, reason in reasons.items() if reason is None]
    rows = [
        ok(f"kernel {name}", f"runs {what}" if reason is None else f"not for {what}: {reason}")
        for name, reason in reasons.items()
    ]
    return [_chosen(usable, reasons, device), *rows]


def _chosen(usable: Sequence[str], reasons: Mapping[str, str | None], device: str) -> Finding:
    if not usable:
        return fail(
            "attention",
            f"no kernel runs on {device}: {'; '.join(f'{k}: {v}' for k, v in reasons.items())}",
            "install a build of torch for this machine",
        )
    first = usable[0]
    if first == "math":
        return warn(
            "attention",
            f"only plain matrix products run on {device}: several times slower, and memory grows "
            "with the square of a block",
            "install flash-attn (pip install 'dynapar[flash]'), or a build of torch with flash "
            "attention",
        )
    return ok("attention", f"{first} on {device}")
