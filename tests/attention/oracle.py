"""Attention by the book in float64, over the whole packed microbatch and pair by pair."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dynapar.attention.bands import Bands


def dense_mask(lengths: Sequence[int], bands: Sequence[Bands]) -> Tensor:
    """(tokens, tokens) bool over the packed microbatch; refuses bands that overlap."""
    total = sum(lengths)
    seen = torch.zeros(total, total, dtype=torch.int32)
    start = 0
    for length, mask in zip(lengths, bands, strict=True):
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        block = seen[start : start + length, start : start + length]
        for q0, q1, k0, k1, lo, hi in mask:
            block[q0:q1, k0:k1] += ((distance >= lo) & (distance <= hi))[q0:q1, k0:k1]
        start += length
    assert int(seen.max()) <= 1, "bands overlap: a pair would be counted twice"
    return seen.bool()


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, N, H], k and v [T, G, H] to [T, N, H]; a row that sees nothing gives 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    nothing = (logits == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return torch.einsum("hqk,khd->qhd", weights[..., : len(k)], v)
