"""A stand-in for flash_attn.flash_attn_interface with the signatures of 2.8 that runs the math."""

import itertools
import math

import torch
from torch import Tensor


def _segments(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> list[tuple[slice, slice]]:
    assert cu_q.dtype == cu_k.dtype == torch.int32
    q, k = cu_q.tolist(), cu_k.tolist()
    assert max_q == max(b - a for a, b in itertools.pairwise(q))
    assert max_k == max(b - a for a, b in itertools.pairwise(k))
    return [
        (slice(q[i], q[i + 1]), slice(k[i], k[i + 1]))
        for i in range(len(q) - 1)
        if q[i + 1] > q[i] and k[i + 1] > k[i]
    ]


def _logits(
    q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float
) -> Tensor:
    if causal:
        right = 0
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    rows = torch.arange(len(q))[:, None] + len(k) - len(q)
    ahead = torch.arange(len(k))[None] - rows
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(hidden, -math.inf)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert dropout_p == 0
    assert all(x.is_contiguous() for x in (q, k, v))
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], len(q)), math.inf, dtype=torch.float32)
    for rows, keys in _segments(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        logits = _logits(
            q[rows], k[keys], softmax_scale, causal, window_size_left, window_size_right, softcap
        )
        sums = torch.logsumexp(logits, -1)
        lse[:, rows] = sums.masked_fill(sums == -math.inf, math.inf)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1).nan_to_num(0.0), values)
    return out, lse, torch.empty(0), torch.empty(0)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    assert dropout_p == 0
    assert softmax_lse.dtype == torch.float32
    assert all(x.is_contiguous() for x in (dout, q, k, v, out, softmax_lse))
    group = q.shape[1] // k.shape[1]
    for x in (dq, dk, dv):
        x.zero_()
    for rows, keys in _segments(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        logits = _logits(
            q[rows], k[keys], softmax_scale, causal, window_size_left, window_size_right, softcap
        )
        wide_k, wide_v = (x[keys].repeat_interleave(group, 1) for x in (k, v))
        weights = torch.exp(logits - softmax_lse[:, rows, None])
        delta = (dout[rows] * out[rows]).sum(-1).t()[..., None]
        dlogits = weights * (torch.einsum("qhd,khd->hqk", dout[rows], wide_v) - delta)
        if softcap:
            seen = logits.masked_fill(logits == -math.inf, 0.0)
            dlogits = dlogits * (1 - (seen / softcap).square())
        dlogits = dlogits * softmax_scale
        dq[rows] = torch.einsum("hqk,khd->qhd", dlogits, wide_k)
        dk_wide = torch.einsum("hqk,qhd->khd", dlogits, q[rows])
        dv_wide = torch.einsum("hqk,qhd->khd", weights, dout[rows])
        dk[keys] = dk_wide.unflatten(1, (-1, group)).sum(2)
        dv[keys] = dv_wide.unflatten(1, (-1, group)).sum(2)
    return torch.empty(0)
