"""Attention of a packed microbatch that two ranks share, against attention by the book in float64.

Shape suffixes: T tokens of the microbatch, N query heads, G key/value heads, H head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType

import torch
from torch import Tensor

from dynapar.attention.api import attend
from dynapar.attention.bands import causal
from dynapar.attention.exchange import Transport
from dynapar.attention.plan import plan_attention
from dynapar.verify.spawn import run_on_ranks

DEGREE = 2
LENGTHS = (37, 5, 130)
HEADS = (4, 2, 2, 4)
"""Of queries, keys, values and the output."""
HEAD_DIM = 16

TOLERANCE: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-12, "float32": 5e-6, "bfloat16": 2e-2}
)
"""The largest error by dtype, relative to the largest value of a tensor."""


def measure(*, timeout: timedelta = timedelta(minutes=2)) -> dict[str, float]:
    """Start two gloo ranks and compare; the largest relative error of any of them, by dtype.

    Raises:
        DynaparError: What a rank raised.
        RuntimeError: A rank ended otherwise.
    """
    dtypes = ("float64", "float32")
    found = run_on_ranks(_on_rank, dtypes, ranks=DEGREE, timeout=timeout)
    return {dtype: max(errors[dtype] for errors in found) for dtype in dtypes}


def _on_rank(rank: int, dtypes: Sequence[str]) -> dict[str, float]:
    transport = Transport()
    transport.warm_up()
    return {dtype: compare(transport, degree=DEGREE, dtype=dtype) for dtype in dtypes}


def compare(transport: Transport, *, degree: int, dtype: str, device: str = "cpu") -> float:
    """Output and gradients of this rank's shard: the largest relative error.

    Args:
        transport: Whose first ranks are the ring.
        degree: Ranks of the ring, this one among them.
        dtype: Of q, k and v; a key of `TOLERANCE`.
        device: Where to compute.
    """
    kind: torch.dtype = getattr(torch, dtype)
    whole = _inputs(kind)
    plan = plan_attention(LENGTHS, degree=degree, bands=[causal(n) for n in LENGTHS])
    bound = plan.bind(ranks=range(degree), transport=transport)
    index = torch.from_numpy(plan.index(bound.position))
    q_TNH, k_TGH, v_TGH, grad_TNH = (x[index].to(device, kind) for x in whole)
    leaves = [x.requires_grad_() for x in (q_TNH, k_TGH, v_TGH)]
    out_TNH = attend(q_TNH, k_TGH, v_TGH, bound)
    got = [out_TNH.detach(), *torch.autograd.grad(out_TNH, leaves, grad_TNH)]
    return max(
        float((mine.cpu().double() - want[index]).abs().max() / want.abs().max())
        for mine, want in zip(got, _dense(whole), strict=True)
    )


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output in float64, with values that `dtype` has."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, HEAD_DIM) for heads in HEADS]
    return [torch.randn(s, generator=rng, dtype=torch.float64).to(dtype).double() for s in shapes]


def _dense(whole: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients of q, k and v over the whole microbatch, pair by pair."""
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    q_TNH = leaves[0]
    k_TNH, v_TNH = (x.repeat_interleave(HEADS[0] // HEADS[1], 1) for x in leaves[1:])
    logits_NTT = torch.einsum("qnh,knh->nqk", q_TNH, k_TNH) / math.sqrt(HEAD_DIM)
    sequence_T = torch.repeat_interleave(torch.tensor(LENGTHS))
    place_T = torch.arange(len(sequence_T))
    seen_TT = (sequence_T[:, None] == sequence_T) & (place_T[:, None] >= place_T)
    weights_NTT = logits_NTT.masked_fill(~seen_TT, -math.inf).softmax(-1)
    out_TNH = torch.einsum("nqk,knh->qnh", weights_NTT, v_TNH)
    return [out_TNH.detach(), *torch.autograd.grad(out_TNH, leaves, whole[3])]
