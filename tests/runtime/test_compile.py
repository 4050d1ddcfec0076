"""Layers of a language model compile into one graph, plan and all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynapar.attention.exchange import Transport
from dynapar.runtime.adapter import Adapter, find_decoder
from dynapar.runtime.layout import BoundLayout, lay_out
from tests.attention.test_compile import counting
from tests.models import gradients
from tests.plans import hand_plan
from tests.runtime.masked_models import make_model, make_sample


def test_layers_are_one_graph_that_serves_other_plans() -> None:
    """Of two mask classes, with softcaps."""
    torch._dynamo.reset()
    model = make_model("gemma2")
    adapter = Adapter(model)
    decoder: Any = find_decoder(model)
    windowed, full = decoder.layers[:2]
    graphs: list[torch.fx.GraphModule] = []

    def layers(hidden: Tensor, rotary: tuple[Tensor, Tensor], plan: BoundLayout) -> Tensor:
        for layer in (windowed, full):
            hidden = layer(
                hidden, position_embeddings=rotary, attention_mask=None, dynapar_plan=plan
            )
        return hidden

    compiled = torch.compile(layers, backend=counting(graphs), fullgraph=True)

    def run(forward: Callable[..., Tensor], lengths: list[int]) -> dict[str, Tensor]:
        samples = [make_sample(number, [length]) for number, length in enumerate(lengths)]
        plan = hand_plan(samples, 1, [([0], {row: [0] for row in range(len(samples))})])
        shard = lay_out(
            plan.microbatches[0],
            dict(enumerate(samples)),
            rank=0,
            masks=adapter.masks,
            bands=adapter.bands,
        )
        plans = {m: p.bind(ranks=[0], transport=Transport()) for m, p in shard.plans.items()}
        model.zero_grad()
        # A leaf: torch warns of others when it compiles.
        hidden = adapter.embed(shard.input_ids, shard.kinds)[None].detach()
        rotary = decoder.rotary_emb(hidden, shard.positions)
        out = forward(hidden, rotary, BoundLayout(shard=shard, plans=plans))
        out.square().sum().backward()
        return gradients(model)

    for lengths in ([20, 9], [23, 10], [26, 4]):
        want, got = run(layers, lengths), run(compiled, lengths)
        assert all(torch.equal(got[name], want[name]) for name in want)
    # One for the first shapes and handles, one in which both may change.
    assert len(graphs) == 2
