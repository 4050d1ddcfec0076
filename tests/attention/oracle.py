"""Attention by the book in float64, over the whole packed microbatch and pair by pair."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynapar.attention.bands import Bands, causal, chunked, full, prefix, spans, window
from dynapar.attention.trees import tree


@dataclass(frozen=True)
class Mask:
    """A mask for sequences of any length: as bands, and by the rule for a query and a key."""

    bands: Callable[[int], Bands]
    sees: Callable[[int, int, int], bool]
    """(query, key, length)"""

    def dense(self, length: int) -> Tensor:
        """(length, length) bool, pair by pair."""
        rows = [[self.sees(q, k, length) for k in range(length)] for q in range(length)]
        return torch.tensor(rows, dtype=torch.bool)


WIDTH = 7
CHUNK = 11
PARENTS = (-1, 0, 1, 1, 0, 4)


def images(length: int) -> list[tuple[int, int]]:
    """Two adjacent spans and one alone."""
    return [
        (length // 5, length // 2),
        (length // 2, 2 * length // 3),
        (5 * length // 6, length - 1),
    ]


def nodes(length: int) -> list[int]:
    """Tokens of up to six nodes of a tree."""
    ends = sorted({length * n // 10 for n in (3, 5, 6, 7, 9, 10)} - {0})
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _node(token: int, length: int) -> tuple[int, int]:
    """The node that holds a token, and where in it."""
    for node, tokens in enumerate(nodes(length)):
        if token < tokens:
            return node, token
        token -= tokens
    raise AssertionError


def _on_path(q: int, k: int, length: int) -> int | None:
    """How far a key is behind a query on the query's way to the root; None if it is not on it."""
    (here, inside), (there, at) = _node(q, length), _node(k, length)
    distance = inside
    while here != there:
        here = PARENTS[here]
        if here < 0:
            return None
        distance += nodes(length)[here]
    return distance - at if distance >= at else None


def _one_image(q: int, k: int, length: int) -> bool:
    return any(a <= q < b and a <= k < b for a, b in images(length))


MASKS: Mapping[str, Mask] = {
    "causal": Mask(causal, lambda q, k, n: k <= q),
    "full": Mask(full, lambda q, k, n: True),
    "window": Mask(lambda n: window(n, width=WIDTH), lambda q, k, n: 0 <= q - k < WIDTH),
    "chunks": Mask(
        lambda n: chunked(n, width=CHUNK), lambda q, k, n: k <= q and q // CHUNK == k // CHUNK
    ),
    "prefix": Mask(
        lambda n: prefix(n, tokens=n // 3), lambda q, k, n: k <= q or (q < n // 3 and k < n // 3)
    ),
    "images": Mask(lambda n: spans(n, images(n)), lambda q, k, n: k <= q or _one_image(q, k, n)),
    "images in a window": Mask(
        lambda n: spans(n, images(n), width=WIDTH),
        lambda q, k, n: q - k < WIDTH and (k <= q or _one_image(q, k, n)),
    ),
    "images beyond a window": Mask(
        lambda n: spans(n, images(n), width=WIDTH, beyond_width=True),
        lambda q, k, n: 0 <= q - k < WIDTH or _one_image(q, k, n),
    ),
    "tree": Mask(
        lambda n: tree(nodes(n), PARENTS[: len(nodes(n))]),
        lambda q, k, n: _on_path(q, k, n) is not None,
    ),
    "tree in a window": Mask(
        lambda n: tree(nodes(n), PARENTS[: len(nodes(n))], width=WIDTH),
        lambda q, k, n: (_on_path(q, k, n) or 0) < WIDTH and _on_path(q, k, n) is not None,
    ),
}
"""Every mask that can be described, by its name."""


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
