"""The attention of a packed microbatch as one device computes it without dynapar.

Once for each sequence, from packed tensors to packed tensors: sequences are cut by views, and what
comes back is joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dynapar.attention.bands import Bands, causal, full

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Packed:
    """A microbatch."""

    q: Tensor
    """[tokens, heads, width], like `k` and `v`, which may have fewer heads."""
    k: Tensor
    v: Tensor
    grad: Tensor
    """Of the output."""
    lengths: tuple[int, ...]
    bands: Sequence[Bands]


def sdpa(given: Packed) -> Callable[[], None]:
    """Forward and backward by `scaled_dot_product_attention`.

    Masks other than causal and full are dense, as people pass them: it then computes hidden pairs
    too.
    """
    leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    masks = [
        None if _is_plain(length, mask) else seen(length, mask)
        for length, mask in zip(given.lengths, given.bands, strict=True)
    ]

    def run() -> None:
        parts = zip(*(_split(x, given.lengths) for x in leaves), strict=True)
        outs = [
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=bands == causal(length), enable_gqa=True
            )
            for (q, k, v), mask, bands, length in zip(
                parts, masks, given.bands, given.lengths, strict=True
            )
        ]
        torch.autograd.grad(_joined(outs), leaves, given.grad)

    return run


def cpu_op(given: Packed) -> Callable[[], None] | None:
    """Forward and backward by the op that dynapar calls too; None if it lacks one of the masks."""
    plain = [
        _is_plain(length, mask) for length, mask in zip(given.lengths, given.bands, strict=True)
    ]
    if not all(plain):
        return None
    flags = [
        mask == causal(length) for length, mask in zip(given.lengths, given.bands, strict=True)
    ]

    def run() -> None:
        tensors = (given.q, given.k, given.v, given.grad)
        q, k, v, grad = (_split(x, given.lengths) for x in tensors)
        results = [_forward(*parts, 0.0, flag) for *parts, flag in zip(q, k, v, flags, strict=True)]
        _joined([out for out, _ in results])
        gradients = [
            _backward(dout, *parts, *result, 0.0, flag)
            for dout, *parts, result, flag in zip(grad, q, k, v, results, flags, strict=True)
        ]
        for parts in zip(*gradients, strict=True):
            _joined(parts)

    return run


def seen(length: int, mask: Bands) -> Tensor:
    """(length, length) bool, the pairs that a mask shows."""
    visible = torch.zeros(length, length, dtype=torch.bool)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    for q0, q1, k0, k1, lo, hi in mask:
        part = distance[q0:q1, k0:k1]
        visible[q0:q1, k0:k1] |= (part >= max(lo, -length)) & (part <= min(hi, length))
    return visible


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor, softcap: float | None = None
) -> Tensor:
    """Attention by the book, q [T, N, H] and k, v [T, G, H] under a (T, T) mask; any dtype."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = torch.softmax(logits.masked_fill(~visible, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def _is_plain(length: int, mask: Bands) -> bool:
    return mask in (causal(length), full(length))


def _split(x: Tensor, lengths: tuple[int, ...]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = x.transpose(0, 1).unsqueeze(0).split(lengths, 2)
    return parts


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.transpose(1, 2) for x in parts], 1)[0]
