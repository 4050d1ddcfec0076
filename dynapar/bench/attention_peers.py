"""Other ring attentions that run on a CPU over gloo, where they are installed.

All of them take one causal sequence whose length the ring divides; that is what they are measured
on. What a peer cannot do it says, and an answer that is not attention is told apart from a slow one
by comparing it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dynapar.bench.one_device import Packed


class PeerRefusedError(RuntimeError):
    """A peer is not installed, or cannot run what it was asked for."""


@dataclass(frozen=True, slots=True)
class OneSequence:
    """One causal sequence, alike on all ranks."""

    q: Tensor
    """[1, heads, tokens, width], like `k` and `v`, which may have fewer heads."""
    k: Tensor
    v: Tensor
    grad: Tensor
    """Of the output."""

    @classmethod
    def of(cls, given: Packed) -> OneSequence:
        """The only sequence of a packed microbatch."""
        tensors = (given.q, given.k, given.v, given.grad)
        return cls(*(x.transpose(0, 1).unsqueeze(0) for x in tensors))


Run = Callable[[], Tensor]
"""Forward and backward of this rank's rows; gives its output, [1, heads, rows, width]."""


def contiguous_rows(tokens: int, rank: int, degree: int) -> Tensor:
    """Where each rank has one run of the sequence."""
    each = tokens // degree
    return torch.arange(rank * each, (rank + 1) * each)


def head_tail_rows(tokens: int, rank: int, degree: int) -> Tensor:
    """Where each rank has a run from the front and one from the end."""
    chunks = torch.arange(tokens).chunk(2 * degree)
    return torch.cat([chunks[rank], chunks[2 * degree - 1 - rank]])


def torch_context_parallel(given: OneSequence, rank: int, degree: int) -> Run:
    """PyTorch's experimental `context_parallel` around `scaled_dot_product_attention`."""
    module = _imported("torch.distributed.tensor.experimental")
    mesh = dist.device_mesh.init_device_mesh("cpu", (degree,))
    grad = given.grad[:, :, head_tail_rows(given.q.shape[2], rank, degree)]

    def run() -> Tensor:
        buffers = [x.clone() for x in (given.q, given.k, given.v)]
        with module.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            q, k, v = (x.clone().requires_grad_() for x in buffers)
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out.backward(grad)
        found: Tensor = out.detach()
        return found

    return run


def ring_attention_pytorch(given: OneSequence, rank: int, degree: int) -> Run:
    """`ring_flash_attn` of ring-attention-pytorch, which forwards all rows around the ring."""
    attend = _imported("ring_attention_pytorch.ring_flash_attention").ring_flash_attn
    rows = contiguous_rows(given.q.shape[2], rank, degree)
    kv_heads = given.k.shape[1]

    def theirs(x: Tensor, heads: int) -> Tensor:
        # Query heads of one key/value head do not stand together there.
        ordered = x[:, :, rows].unflatten(1, (heads, -1)).transpose(1, 2).flatten(1, 2)
        found: Tensor = ordered.transpose(1, 2).contiguous()
        return found

    leaves = [theirs(x, kv_heads).requires_grad_() for x in (given.q, given.k, given.v)]
    grad = theirs(given.grad, kv_heads)

    def run() -> Tensor:
        out = attend(*leaves, causal=True, bucket_size=512, ring_reduce_col=True, ring_size=degree)
        out.backward(grad)
        ordered = out.detach().transpose(1, 2).unflatten(1, (-1, kv_heads))
        found: Tensor = ordered.transpose(1, 2).flatten(1, 2)
        return found

    return run


def ringmaster(given: OneSequence, rank: int, degree: int) -> Run:
    """`ring_p2p_attention` of axolotl-ringmaster: all rows forwarded, softmax written out."""
    attend = _imported("ringmaster.ring.p2p_attn").ring_p2p_attention
    rows = contiguous_rows(given.q.shape[2], rank, degree)
    leaves = [x[:, :, rows].clone().requires_grad_() for x in (given.q, given.k, given.v)]
    grad = given.grad[:, :, rows].transpose(1, 2).contiguous()

    def run() -> Tensor:
        out: Tensor = attend(*leaves, group=dist.group.WORLD, causal=True, scaling=None)
        out.backward(grad)
        return out.detach().transpose(1, 2)

    return run


@dataclass(frozen=True, slots=True)
class Peer:
    """Another ring attention."""

    prepare: Callable[[OneSequence, int, int], Run]
    """Of the sequence, this rank and the degree; raises `PeerRefusedError` if not installed."""
    rows: Callable[[int, int, int], Tensor]
    """Of the tokens, a rank and the degree: the rows that the rank holds."""


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "torch context_parallel": Peer(torch_context_parallel, head_tail_rows),
        "ring-attention-pytorch": Peer(ring_attention_pytorch, contiguous_rows),
        "axolotl-ringmaster": Peer(ringmaster, contiguous_rows),
    }
)


def prepare(name: str, given: OneSequence, rank: int, degree: int) -> Run:
    """A peer that has run once and gave the right output.

    Args:
        name: One of `PEERS`.
        given: The sequence.
        rank: This one.
        degree: Ranks of the default group, all of which call this.

    Raises:
        PeerRefusedError: It is not installed, cannot run here, or its output is wrong. It must be
            so on all ranks.
    """
    peer, tokens = PEERS[name], given.q.shape[2]
    if tokens % (2 * degree):
        raise PeerRefusedError(f"it needs a length divisible by {2 * degree}, not {tokens}")
    try:
        run = peer.prepare(given, rank, degree)
        got = run()
    except (RuntimeError, NotImplementedError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, PeerRefusedError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise PeerRefusedError(f"{type(error).__name__}: {reason}") from error
    want = functional.scaled_dot_product_attention(
        given.q, given.k, given.v, is_causal=True, enable_gqa=True
    )[:, :, peer.rows(tokens, rank, degree)]
    apart = float((got - want).abs().max() / want.abs().max())
    if not apart < 1e-2:
        raise PeerRefusedError(f"its output is {apart:.2g} apart from attention")
    return run


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerRefusedError(f"it is not installed ({error})") from error
