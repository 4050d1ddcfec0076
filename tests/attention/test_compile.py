"""Attention is one opaque operator of a compiled graph, exchanges included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from dynapar.attention.api import attend
from dynapar.attention.bands import causal, window
from dynapar.attention.exchange import Transport
from dynapar.attention.plan import BoundPlan, plan_attention
from dynapar.attention.select import select
from dynapar.attention.tokens import shard
from dynapar.runtime.order import OrderLog
from tests.distributed import run_ranks

Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., object]]


def counting(graphs: list[torch.fx.GraphModule]) -> Backend:
    """A backend that keeps what it is given to compile."""

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        compiled: Callable[..., object] = aot_eager(graph, examples)
        return compiled

    return backend


def layer(plan: BoundPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return attend(q * 2, k.sin(), v, plan, softcap=3.0, sinks=sinks).sin()


def check_ring(rank: int, name: str) -> OrderLog:
    log = OrderLog(rank)
    transport = Transport(recorder=log)
    transport.warm_up()
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(layer, backend=counting(graphs), fullgraph=True)
    for length in (40, 44, 60, 52):
        bands = [causal(length), window(9, width=4)]
        scheme = select(2, name=name)
        plan = plan_attention([length, 9], degree=2, bands=bands, scheme=scheme)
        bound = plan.bind(ranks=[1, 0], transport=transport)
        rng = torch.Generator().manual_seed(length)
        shapes = [(length + 9, heads, 8) for heads in (4, 2, 2)]
        whole = [torch.randn(s, generator=rng) for s in shapes]
        local = [shard(x, plan, bound.position, dim=0).requires_grad_() for x in whole]
        inputs = [*local, torch.linspace(-1, 1, 4).requires_grad_()]
        want = torch.autograd.grad(layer(bound, *inputs).sum(), inputs)
        got = torch.autograd.grad(compiled(bound, *inputs).sum(), inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # One for the first shapes and handle, one in which both may change.
    assert len(graphs) == 2
    for graph in graphs:
        ours = [n for n in graph.graph.nodes if n.target == torch.ops.dynapar.attend.default]
        assert len(ours) == 1
    return log


@pytest.mark.parametrize("scheme", ["staged", "ulysses"])
def test_a_ring_compiles_into_one_graph_that_serves_other_plans(
    scheme: str, tmp_path: Path
) -> None:
    run_ranks(check_ring, 2, tmp_path, scheme)
