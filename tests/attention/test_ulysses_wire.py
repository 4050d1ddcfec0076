"""What travels where heads are shared: its bytes, and its precision."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from dynapar.attention import staged, ulysses
from dynapar.attention.bands import causal, full
from dynapar.attention.calls import Call
from dynapar.attention.heads import share_heads
from dynapar.attention.kernels_math import Math
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.attention.prices import Layer, Links, price
from dynapar.attention.select import Scheme, select
from tests.attention.loopback import LoopbackTransport, run_loopback
from tests.attention.test_ulysses import F64, PACK, schemes, whole


def traded(plan: AttentionPlan, heads: tuple[int, int, int], itemsize: int, position: int) -> int:
    """Bytes that a position sends in its group, counted head by head and row by row."""
    share = plan.scheme.share
    first = position - position % share
    held = share_heads(heads[0], heads[1], share)
    mine, width = held[position - first], heads[2]
    sent = 0
    for member, theirs in enumerate(held):
        if first + member == position:
            continue
        for _ in range(plan.tokens[position]):
            sent += theirs.q_heads * width * itemsize * (1 + 3)  # q; q, out and its gradient
            sent += theirs.kv_heads * width * itemsize * (2 + 2)  # k and v, twice
            sent += theirs.q_heads * itemsize  # log-sum-exp
        for _ in range(plan.tokens[first + member]):
            sent += mine.q_heads * (width + 1) * itemsize  # out and log-sum-exp
            sent += (mine.q_heads + 2 * mine.kv_heads) * width * itemsize  # gradients
    return sent


@pytest.mark.parametrize("heads", [(8, 2, 8), (7, 1, 16), (2, 2, 8), (6, 3, 4)])
def test_bytes_on_the_wire_are_those_of_heads_and_needed_rows(heads: tuple[int, int, int]) -> None:
    lengths, bands = PACK
    data = whole(sum(lengths), heads, torch.float32)
    for degree in (2, 3, 4, 6):
        for scheme in schemes(degree):
            plan = plan_attention(lengths, degree=degree, bands=bands, scheme=scheme)

            def rank(transport: LoopbackTransport, plan: AttentionPlan = plan) -> int:
                data.on(plan, list(range(plan.degree)), transport, torch.float32)
                return transport.sent

            held = share_heads(heads[0], heads[1], scheme.share)
            rows = [plan.prepare(p).send_rows for p in range(degree)]
            fetched = [plan.prepare(p).fetch for p in range(degree)]
            expected = [
                traded(plan, heads, 4, p)
                # Rows for others in forward and backward, and gradients of those fetched.
                + (2 * sum(rows[p]) + sum(fetched[p]))
                * 2 * held[p % scheme.share].kv_heads * heads[2] * 4
                for p in range(degree)
            ]  # fmt: skip
            assert run_loopback(degree, rank) == expected


def test_the_price_counts_the_bytes_that_are_sent() -> None:
    """Full masks and even shards: then the formula has no average in it."""
    data = whole(240, (8, 2, 16), torch.float32)
    for scheme in (select(4), *schemes(4)):
        plan = plan_attention([240], degree=4, bands=[full(240)], scheme=scheme)

        def rank(transport: LoopbackTransport, plan: AttentionPlan = plan) -> int:
            data.on(plan, [0, 1, 2, 3], transport, torch.float32)
            return transport.sent

        layer = Layer(
            q_heads=8, kv_heads=2, head_dim=16, itemsize=4, tokens=60, pairs=60 * 240, needed=1.0
        )
        links = Links(nodes=(0,) * 4, flops=1e9, bytes_per_s_in_node=1e9, bytes_per_s_across=1e9)
        found = price(layer, links, share=scheme.share, stages=scheme.stages)
        assert max(run_loopback(4, rank)) == found.bytes


def test_work_is_counted_by_heads() -> None:
    lengths, bands = PACK
    pairs = plan_attention(lengths, degree=1, bands=bands).work[0]
    for scheme in (select(2, name="ulysses"), select(4, name="hybrid", share=2)):
        plan = plan_attention(lengths, degree=scheme.degree, bands=bands, scheme=scheme)
        assert abs(sum(plan.work) - pairs) < scheme.degree
        assert len(set(plan.work[: scheme.share])) == 1


def errors(degree: int, scheme: Scheme) -> list[float]:
    """Relative RMS error in bfloat16 of the output and each gradient, over all ranks."""
    lengths = (300, 131, 40)
    bands = [causal(n) for n in lengths]
    data = whole(sum(lengths), (8, 2, 16), torch.bfloat16)
    want = data.dense(lengths, bands)[:4]
    plan = plan_attention(lengths, degree=degree, bands=bands, scheme=scheme)

    def rank(transport: LoopbackTransport) -> list[float]:
        got, index = data.on(plan, list(range(degree)), transport, torch.bfloat16)
        return [float((a - b[index]).square().sum()) for a, b in zip(got, want, strict=False)]

    squares = torch.tensor(run_loopback(degree, rank)).sum(0)
    return [math.sqrt(s / float(w.square().sum())) for s, w in zip(squares, want, strict=True)]


def test_bfloat16_error_does_not_grow_with_the_degree() -> None:
    alone = errors(1, select(1))
    assert max(alone) < 1e-2
    for degree in (2, 3, 4):
        for scheme in schemes(degree):
            for one, many in zip(alone, errors(degree, scheme), strict=True):
                assert many < 1.5 * one, (scheme, one, many)


class LowMath(Math):
    """Reads and gives bfloat16 as flash-attn does, which rounds gradients of k and v for each query
    head before it adds them up."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(
        self,
        q_TNH: Tensor,
        k_SGH: Tensor,
        v_SGH: Tensor,
        call: Call,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(
            q_TNH.float(), k_SGH.float(), v_SGH.float(), call, scale=scale, softcap=softcap
        )
        return out.to(q_TNH.dtype), lse

    def backward(
        self,
        grad_TNH: Tensor,
        q_TNH: Tensor,
        k_SGH: Tensor,
        v_SGH: Tensor,
        out_TNH: Tensor,
        lse_TN: Tensor,
        call: Call,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        low, each = q_TNH.dtype, q_TNH.shape[1] // k_SGH.shape[1]
        k, v = (x.float().repeat_interleave(each, 1) for x in (k_SGH, v_SGH))
        grad, q, out = (x.float() for x in (grad_TNH, q_TNH, out_TNH))
        dq, *dkv = super().backward(grad, q, k, v, out, lse_TN, call, scale=scale, softcap=softcap)
        dk, dv = (x.to(low).float().unflatten(1, (-1, each)).sum(2).to(low) for x in dkv)
        return dq.to(low), dk, dv


def low_errors(scheme: Scheme, kv_heads: int) -> list[float]:
    """As `errors`, of the schemes' own functions with a kernel in bfloat16; without sinks."""
    lengths = (120, 31, 40)
    bands = [causal(n) for n in lengths]
    data = whole(sum(lengths), (8, kv_heads, 16), torch.bfloat16)
    data = dataclasses.replace(data, sinks=torch.full((8,), -math.inf, dtype=F64))
    want = data.dense(lengths, bands)[:4]
    plan = plan_attention(lengths, degree=scheme.degree, bands=bands, scheme=scheme)
    run = staged if scheme.share == 1 else ulysses

    def rank(transport: LoopbackTransport) -> list[float]:
        bound = plan.bind(ranks=list(range(scheme.degree)), transport=transport)
        index = torch.from_numpy(plan.index(bound.position))
        q, k, v, grad = (x[index].bfloat16() for x in (*data.qkv, data.grad))
        setting = staged.Setting(plan=bound, kernel=LowMath(), scale=0.25, softcap=None)
        out, lse = run.forward(q, k, v, None, setting)
        assert lse.dtype == torch.float32
        got = out, *run.backward(grad, q, k, v, None, out, lse, setting)[:3]
        return [float((a - b[index]).square().sum()) for a, b in zip(got, want, strict=True)]

    squares = torch.tensor(run_loopback(scheme.degree, rank)).sum(0)
    return [math.sqrt(s / float(w.square().sum())) for s, w in zip(squares, want, strict=True)]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_gradients_in_bfloat16_on_the_wire_are_as_exact(kv_heads: int) -> None:
    alone = low_errors(select(1), kv_heads)
    for degree in (2, 3, 4, 8):
        for scheme in schemes(degree):
            for one, many in zip(alone, low_errors(scheme, kv_heads), strict=True):
                assert many < 1.5 * one, (scheme, one, many)
