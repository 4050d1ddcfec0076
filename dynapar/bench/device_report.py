"""`scripts/gpu_check`: check and time the attention kernels of a device, and print two tables."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dynapar.attention import staged, ulysses
from dynapar.attention.api import attend
from dynapar.attention.bands import causal
from dynapar.attention.calls import Request
from dynapar.attention.kernels import KERNELS
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.attention.select import select
from dynapar.bench.device_check import (
    RATIO,
    Found,
    checks,
    rows_without_keys,
    run_all,
    seconds,
    unusable,
)
from dynapar.bench.loopback import ReadyTransport

SIZES = {"cuda": ((16_384,), (2_048,) * 8, (128,) * 128), "cpu": ((512,), (16,) * 20)}
HEADS = {"cuda": (32, 8, 128), "cpu": (4, 2, 32)}
SCHEMES = ("staged", "ulysses", "hybrid")
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Forward and backward of one packed causal microbatch."""

    kernel: str
    lengths: tuple[int, ...]
    milliseconds: float
    """Of `attend`, a rank alone."""
    sdpa: float
    """Milliseconds of `scaled_dot_product_attention`, called once for each sequence."""
    at_degree_4: tuple[float, ...]
    """By scheme: time of the slowest position of 4, exchange left out, over a quarter of a rank
    alone's."""
    tflops: float


def report(device: str, *, budget: float = 200.0) -> bool:
    """Check and time a device's kernels, print what was found.

    Args:
        device: "cuda" or "cpu".
        budget: Seconds after which nothing new is begun; what is left out is said.

    Returns:
        Whether something ran, and all that ran was right.
    """
    began = time.monotonic()
    print(f"torch {torch.__version__} on {_device_name(device)}")
    for name, reason in unusable(device).items():
        print(f"{name} is left out: {reason}")
    planned = list(checks(device))
    begun = itertools.takewhile(lambda _: time.monotonic() - began < 0.6 * budget, planned)
    found = list(run_all(begun, device))
    _print_checks(found)
    for name in ("flash_attn_2", "cuda_flash"):
        if any(f.check.kernel == name and f.right for f in found):
            lse = rows_without_keys(name, device, DTYPE[device])
            print(f"{name}: log-sum-exp of a row without keys is {lse} (expected -inf)")
    if left := len(planned) - len(found):
        print(f"{left} of {len(planned)} checks were left out: {budget:.0f} s were given")
    print(
        f"\n{'kernel':14} {'causal sequences':>18} {'ms':>9} {'x sdpa':>7} {'TFLOP/s':>8} "
        f"{'degree 4 / quarter: ' + ', '.join(SCHEMES):>45}"
    )
    for timing in _timings(device):
        if time.monotonic() - began > budget:
            print("the other timings were left out: no time")
            break
        size = f"{len(timing.lengths)} of {timing.lengths[0]:,}"
        print(
            f"{timing.kernel:14} {size:>18} {timing.milliseconds:9.2f} "
            f"{timing.sdpa / timing.milliseconds:7.2f} {timing.tflops:8.1f} "
            f"{' '.join(f'{ratio:.2f}' for ratio in timing.at_degree_4):>45}",
            flush=True,
        )
    wrong = sum(not f.right for f in found)
    print(f"\n{len(found) - wrong} of {len(found)} checks are right; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    return bool(found) and not wrong


def _device_name(device: str) -> str:
    if device == "cpu":
        return "the CPU"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"


def _print_checks(found: Sequence[Found]) -> None:
    """One line for each kernel and dtype, and one for each check that is wrong."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for each in found:
        dtype = str(each.check.dtype).removeprefix("torch.")
        groups.setdefault((each.check.kernel, dtype), []).append(each)
    print(
        f"\n{'kernel':14} {'dtype':9} {'right':>9}  worst relative error of "
        f"{'out':>8} {'dq':>8} {'dk':>8} {'dv':>8}  limit  x degree 1"
    )
    for (kernel, dtype), members in groups.items():
        right = sum(each.right for each in members)
        ran = [each.errors for each in members if each.errors]
        worst = [max(column) for column in zip(*ran, strict=True)]
        ratios = [each.ratio for each in members if each.ratio is not None]
        ratio = f"{max(ratios):10.2f}" if ratios else f"{'-':>10}"
        print(
            f"{kernel:14} {dtype:9} {right:4} of {len(members):2}  {'':23} "
            f"{' '.join(f'{error:8.1e}' for error in worst)}  {members[0].limit:.0e} {ratio}"
        )
    for each in found:
        if not each.right:
            errors = ", ".join(f"{error:.1e}" for error in each.errors)
            if each.ratio is not None and each.ratio > RATIO:
                errors += f", {each.ratio:.2f} times those of degree 1 (at most {RATIO:g})"
            print(f"WRONG {each.check.kernel} {each.check.dtype} {each.check.name}: "
                  f"{each.failed or errors}")  # fmt: skip


def _timings(device: str) -> Iterator[Timing]:
    dtype, width = DTYPE[device], HEADS[device][2]
    request = Request(device=device, dtype=dtype, head_dim=width)
    for lengths in SIZES[device]:
        for name, kernel in KERNELS.items():
            # The math kernel is an oracle: slow, and large in memory.
            if name != "math" and not kernel.unusable(request):
                yield _timing(name, lengths, device)


def _timing(kernel: str, lengths: tuple[int, ...], device: str) -> Timing:
    query_heads, kv_heads, width = HEADS[device]
    q, k, v, grad = (
        torch.randn(sum(lengths), heads, width, device=device, dtype=DTYPE[device])
        for heads in (query_heads, kv_heads, kv_heads, query_heads)
    )
    bands = [causal(n) for n in lengths]
    one = plan_attention(lengths, degree=1, bands=bands)
    fours = [
        plan_attention(
            lengths,
            degree=4,
            bands=bands,
            scheme=select(4, name=scheme, share=2 if scheme == "hybrid" else None),
        )
        for scheme in SCHEMES
    ]
    alone = seconds(lambda: _attend(q, k, v, grad, one, kernel), device)
    slowest = [
        max(seconds(partial(_position, q, k, v, grad, four, at, kernel), device) for at in range(4))
        for four in fours
    ]
    return Timing(
        kernel=kernel,
        lengths=lengths,
        milliseconds=alone * 1e3,
        sdpa=seconds(lambda: _sdpa(q, k, v, grad, lengths), device) * 1e3,
        at_degree_4=tuple(position / alone * 4 for position in slowest),
        tflops=3.5 * 4 * sum(one.work) * query_heads * width / alone / 1e12,
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, plan: AttentionPlan, kernel: str
) -> None:
    bound = plan.bind(ranks=(0,), transport=ReadyTransport(0), kernel=kernel)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(attend(leaves[0], leaves[1], leaves[2], bound), leaves, grad)


def _position(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, plan: AttentionPlan, at: int, kernel: str
) -> None:
    bound = plan.bind(ranks=range(plan.degree), transport=ReadyTransport(at), kernel=kernel)
    setting = staged.Setting(
        plan=bound, kernel=KERNELS[kernel], scale=q.shape[-1] ** -0.5, softcap=None
    )
    q, k, v, grad = (x[: bound.tokens] for x in (q, k, v, grad))
    scheme = ulysses if plan.scheme.share > 1 else staged
    with torch.no_grad():
        out, lse = scheme.forward(q, k, v, None, setting)
        scheme.backward(grad, q, k, v, None, out, lse, setting)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lengths: tuple[int, ...]) -> None:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, 2) for x in leaves), strict=True)
    outs = [
        functional.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
        for a, b, c in parts
    ]
    out = torch.cat([x.transpose(1, 2) for x in outs], 1)[0]
    torch.autograd.grad(out, leaves, grad)
