"""One microbatch as one module call: encode, route, language model, token losses.

That module is what a wrapper such as DDP wraps, so that everything of a microbatch runs inside one
forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynapar.attention.pooled import RingTransport
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.layout import BoundLayout, ShardLayout
from dynapar.runtime.loss import token_loss_sum
from dynapar.runtime.routing import route_rows


class MicrobatchModule(nn.Module):
    """Runs this rank's part of a microbatch and returns the sum of its token losses.

    Attributes:
        model: The whole model; its parameters are this module's.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        transport: RingTransport,
        loss_chunk: int = 1024,
        autocast: torch.dtype | None = None,
    ):
        """Wrap an adapter.

        Args:
            adapter: Of the model.
            transport: Of the ranks that may share a sample; on groups of its own.
            loss_chunk: Tokens whose logits exist at a time.
            autocast: Run the model under autocast to this type; parameters and the sums of
                gradients keep their own, float32.
        """
        super().__init__()
        self.autocast = autocast
        self.model = adapter.model
        self.adapter = adapter
        self.transport = transport
        self.loss_chunk = loss_chunk

    def forward(self, shard: ShardLayout | None) -> Tensor:
        """The sum of the losses of the targets that this rank owns; a scalar.

        All ranks of the microbatch call it. With None it is the closing pass: an exact zero that
        reaches one parameter, which is all that a reducer needs to reduce every gradient.

        Args:
            shard: This rank's part of the microbatch.
        """
        if shard is None:
            return self._probe()
        device = self.model.device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            return self._loss(shard)

    def _loss(self, shard: ShardLayout) -> Tensor:
        shard = shard.to(self.model.device)
        transport = self.transport.among(shard.ranks)
        bound = BoundLayout(
            shard=shard,
            plans={
                mask: plan.bind(ranks=shard.ranks, transport=transport)
                for mask, plan in shard.plans.items()
            },
        )
        embeds = self.adapter.embed(shard.input_ids, shard.kinds)
        if shard.route is not None:
            rows = route_rows(
                self._encode(shard, embeds).to(embeds.dtype),  # one type on the whole ring
                route=shard.route,
                ranks=shard.ranks,
                transport=transport,
            )
            embeds = embeds.index_copy(0, shard.route.places, rows)
        hidden = self.adapter.hidden(embeds, shard.positions, bound)
        return token_loss_sum(
            hidden, shard.targets, head=self.adapter.logits, chunk=self.loss_chunk
        )

    def _encode(self, shard: ShardLayout, embeds: Tensor) -> Tensor:
        if shard.units:
            return self.adapter.encode(shard.units)
        empty = embeds.new_zeros((0, embeds.shape[1]))
        return empty.requires_grad_(self.adapter.encoder_is_trained and torch.is_grad_enabled())

    def _probe(self) -> Tensor:
        trained = next(p for p in self.model.parameters() if p.requires_grad)
        return trained.flatten()[:0].sum()
