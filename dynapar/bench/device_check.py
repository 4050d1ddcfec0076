"""Hold every attention kernel that a device has to a dense float64 oracle, and time it.

Each check runs packed sequences of odd lengths through a kernel, forward and backward, on a rank
alone or on all positions of a ring in one process, and compares output and gradients. Made for the
first minutes on a GPU; runs on a CPU too, where it checks the CPU's kernels.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dynapar.attention import staged, ulysses
from dynapar.attention.bands import Bands, causal, full, spans, window
from dynapar.attention.calls import Call, Kernel, Request
from dynapar.attention.kernels import KERNELS
from dynapar.attention.plan import plan_attention
from dynapar.attention.select import select
from dynapar.bench.loopback import LoopbackTransport, run_loopback
from dynapar.bench.one_device import dense, seen

LENGTHS = (300, 1, 65, 128, 2, 17)

MASKS: dict[str, Callable[[int], Bands]] = {
    "causal": causal,
    "full": full,
    "window": lambda length: window(length, width=17),
    "pictures": lambda length: spans(
        length, [(a, a + 24) for a in range(8, length - 24, 60)], width=21, beyond_width=True
    ),
}

LIMITS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the relative error, by dtype, in the norm of a tensor."""

RATIO = 1.5
"""Of the error in bfloat16 on a ring over that of a rank alone, of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One kernel on one packed microbatch."""

    kernel: str
    dtype: torch.dtype
    mask: str = "causal"
    degree: int = 1
    scheme: str = "auto"
    stages: int | None = None
    heads: tuple[int, int, int] = (8, 2, 64)
    """Query heads, key/value heads, width."""
    softcap: float | None = None

    @property
    def name(self) -> str:
        """What a row of a table says."""
        how = f"degree {self.degree}" + ("" if self.scheme == "auto" else f" {self.scheme}")
        how += f" S={self.stages}" if self.stages else ""
        how += f" softcap {self.softcap:g}" if self.softcap else ""
        return f"{self.mask}, {how}, heads {':'.join(map(str, self.heads))}"

    @property
    def alone(self) -> Check:
        """The same on a rank alone."""
        return replace(self, degree=1, scheme="auto", stages=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a check found."""

    check: Check
    errors: tuple[float, ...] = ()
    """Of output, dq, dk and dv: relative, in the norm."""
    limit: float
    ratio: float | None = None
    """The largest of these over that of a rank alone; None where that is not asked for."""
    failed: str | None = None
    """What the kernel raised."""

    @property
    def right(self) -> bool:
        """Whether all errors are within the limit, and within `RATIO` of those of a rank alone."""
        within = all(error <= self.limit for error in self.errors)
        return self.failed is None and within and (self.ratio is None or self.ratio <= RATIO)


def checks(device: str) -> Iterator[Check]:
    """Those of all kernels that can run on a device, the quickest to tell first."""
    for name, kernel in KERNELS.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            base = Check(kernel=name, dtype=dtype)
            if _unusable(kernel, device, base):
                continue
            for mask in MASKS:
                plain = replace(base, mask=mask)
                yield from (plain, replace(plain, degree=4))
                if mask in ("causal", "pictures"):
                    yield from (
                        replace(plain, degree=degree, scheme=scheme)
                        for degree, scheme in ((3, "ulysses"), (4, "ulysses"), (4, "hybrid"))
                    )
            yield replace(base, degree=4, stages=1)
            yield from (
                replace(base, heads=heads, degree=degree)
                for heads in ((4, 4, 72), (8, 2, 80), (4, 2, 256), (7, 1, 128))
                for degree in (1, 3)
                if not _unusable(kernel, device, replace(base, heads=heads))
            )
            # Fewer key/value heads than ranks, and query heads that do not divide.
            yield from (
                replace(base, heads=(7, 1, 128), degree=degree, scheme=scheme)
                for degree, scheme in ((3, "ulysses"), (4, "hybrid"))
                if not _unusable(kernel, device, replace(base, heads=(7, 1, 128)))
            )
            if not _unusable(kernel, device, capped := replace(base, softcap=5.0)):
                yield from (capped, replace(capped, degree=3))


def unusable(device: str) -> dict[str, str]:
    """Kernels that cannot run on a device in any of the dtypes, and why."""
    reasons = {}
    for name, kernel in KERNELS.items():
        why = [
            _unusable(kernel, device, Check(kernel=name, dtype=dtype))
            for dtype in (torch.bfloat16, torch.float32)
        ]
        if all(why):
            reasons[name] = str(why[0])
    return reasons


def _unusable(kernel: Kernel, device: str, check: Check) -> str | None:
    return kernel.unusable(
        Request(
            device=device,
            dtype=check.dtype,
            head_dim=check.heads[2],
            softcap=check.softcap is not None,
        )
    )


def run(check: Check, device: str, *, alone: Found | None = None) -> Found:
    """Run a check; what a kernel raises is reported, not raised.

    Args:
        check: What to run.
        device: "cuda" or "cpu".
        alone: What `check.alone` found, to hold errors in bfloat16 to.
    """
    limit = LIMITS[check.dtype]
    try:
        errors = _errors(check, device)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return Found(check=check, limit=limit, failed=reason)
    ratio = None
    if alone is not None and alone.errors and check.dtype == torch.bfloat16:
        ratio = max(many / one for many, one in zip(errors, alone.errors, strict=True))
    return Found(check=check, errors=errors, limit=limit, ratio=ratio)


def run_all(planned: Iterable[Check], device: str) -> Iterator[Found]:
    """Run checks, each held to that of a rank alone among those before it."""
    alone: dict[Check, Found] = {}
    for check in planned:
        found = run(check, device, alone=alone.get(check.alone))
        if check == check.alone:
            alone[check] = found
        yield found


@functools.lru_cache(maxsize=8)
def _problem(
    mask: str,
    heads: tuple[int, int, int],
    softcap: float | None,
    dtype: torch.dtype,
    device: str,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """q, k, v and the output's gradient; the output and gradients of q, k, v by the oracle.

    Checks of one mask and width follow each other, and the oracle takes longer than most kernels.
    """
    query_heads, kv_heads, width = heads
    rng = torch.Generator().manual_seed(0)
    *qkv, grad = (
        torch.randn(sum(LENGTHS), count, width, generator=rng).to(device, dtype)
        for count in (query_heads, kv_heads, kv_heads, query_heads)
    )
    visible = _visible([MASKS[mask](length) for length in LENGTHS]).to(device)
    leaves = [x.double().clone().requires_grad_() for x in qkv]
    out = dense(*leaves, visible=visible, softcap=softcap)
    return (*qkv, grad), (out.detach(), *torch.autograd.grad(out, leaves, grad.double()))


def _errors(check: Check, device: str) -> tuple[float, ...]:
    given, wants = _problem(check.mask, check.heads, check.softcap, check.dtype, device)
    bands = [MASKS[check.mask](length) for length in LENGTHS]
    scheme = select(check.degree, name=check.scheme, share=2 if check.scheme == "hybrid" else None)
    plan = plan_attention(LENGTHS, degree=check.degree, bands=bands, scheme=scheme)
    whole = tuple(torch.zeros_like(x) for x in wants)

    def position(transport: LoopbackTransport) -> None:
        ranks = range(check.degree)
        bound = plan.bind(
            ranks=ranks, transport=transport, stages=check.stages, kernel=check.kernel
        )
        rows = torch.from_numpy(plan.index(bound.position)).to(device)
        setting = staged.Setting(
            plan=bound,
            kernel=KERNELS[check.kernel],
            scale=check.heads[2] ** -0.5,
            softcap=check.softcap,
        )
        scheme = ulysses if bound.scheme.share > 1 else staged
        q, k, v, dout = (x[rows] for x in given)
        out, lse = scheme.forward(q, k, v, None, setting)
        dq, dk, dv, _ = scheme.backward(dout, q, k, v, None, out, lse, setting)
        for total, part in zip(whole, (out, dq, dk, dv), strict=True):
            total[rows] = part.to(total.dtype)

    run_loopback(check.degree, position)
    return tuple(_distance(got, want) for got, want in zip(whole, wants, strict=True))


def _visible(bands: Sequence[Bands]) -> Tensor:
    blocks = [seen(length, mask) for length, mask in zip(LENGTHS, bands, strict=True)]
    visible: Tensor = torch.block_diag(*blocks).bool()
    return visible


def _distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def rows_without_keys(name: str, device: str, dtype: torch.dtype) -> float:
    """The log-sum-exp that a varlen kernel gives, through its adapter, for a row without keys.

    dynapar never launches such rows; the value tells whether the adapter knows its kernel.
    """
    starts = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3], [0, 1]))
    call = Call(
        q_rows=slice(0, 3), k_rows=slice(0, 1), queries=(3,), keys=(1,), left=-1, right=0,
        starts=(starts[0], starts[1]),
    )  # fmt: skip
    q, k = (torch.ones(n, 2, 64, device=device, dtype=dtype) for n in (3, 1))
    _, lse = KERNELS[name].forward(q, k, k, call, scale=1.0, softcap=None)
    return float(lse[0, 0])


def seconds(fn: Callable[[], object], device: str, *, repeats: int = 5) -> float:
    """The least time of a call, on the device."""
    fn()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        fn()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
