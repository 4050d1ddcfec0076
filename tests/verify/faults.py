"""Mistakes that are easy to make, planted one at a time inside a rank's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dynapar.attention.bands import causal
from dynapar.attention.plan import plan_attention
from dynapar.data.samples import IGNORE
from dynapar.runtime import executor, layout, microbatch
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor, StepResult
from dynapar.runtime.layout import ShardLayout, Unit
from dynapar.runtime.loss import token_loss_sum
from dynapar.runtime.microbatch import MicrobatchModule


def labels_shifted_after_the_cut() -> AbstractContextManager[object]:
    """The target of a shard's token becomes the next token of the shard."""
    original = layout.lay_out

    def shifted(*args: Any, **kwargs: Any) -> ShardLayout:
        shard = original(*args, **kwargs)
        follower = functional.pad(shard.input_ids[1:], (0, 1))
        wanted = shard.targets != IGNORE
        return replace(shard, targets=torch.where(wanted, follower, shard.targets))

    return patch.object(executor, "lay_out", shifted)


@contextmanager
def loss_averaged_per_rank() -> Iterator[None]:
    """Each microbatch's mean, averaged over the ranks."""
    run = StepExecutor.run

    def mean(hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
        count = max(int((targets != IGNORE).sum()), 1)
        return token_loss_sum(hidden, targets, **options) / count

    def averaged(self: StepExecutor, queue: Any, *, targets: int) -> StepResult:
        return run(self, queue, targets=self.ranks * max(len(queue), 1))

    with (
        patch.object(microbatch, "token_loss_sum", mean),
        patch.object(StepExecutor, "run", averaged),
    ):
        yield


def mask_leaks() -> AbstractContextManager[object]:
    """Where all samples of a microbatch are whole on its one rank, they become one."""

    def leaky(lengths: Sequence[int], *, degree: int, **options: Any) -> Any:
        if degree > 1:
            return plan_attention(lengths, degree=degree, **options)
        return plan_attention([sum(lengths)], degree=1, bands=[causal(sum(lengths))])

    return patch.object(layout, "plan_attention", leaky)


def image_encoded_twice() -> AbstractContextManager[object]:
    """Two ranks encode the same image; both gradients are added."""
    encode = Adapter.encode

    def twice(self: Adapter, units: Sequence[Unit]) -> Tensor:
        rows = encode(self, units)
        return rows + (rows - rows.detach())

    return patch.object(Adapter, "encode", twice)


def images_in_wrong_order() -> AbstractContextManager[object]:
    """A rank encodes its units last to first."""
    units = layout._units

    def backwards(*args: Any) -> Iterator[Unit]:
        return reversed(list(units(*args)))

    return patch.object(layout, "_units", backwards)


def text_positions_for_media() -> AbstractContextManager[object]:
    """Position ids count tokens, as for a model without mRoPE."""
    original = layout.lay_out

    def counted(mb: Any, samples: Any, **options: Any) -> ShardLayout:
        plain = {
            row: replace(s, positions=torch.arange(len(s.input_ids)).expand_as(s.positions))
            for row, s in samples.items()
        }
        return original(mb, plain, **options)

    return patch.object(executor, "lay_out", counted)


@contextmanager
def reduced_in_the_last_microbatch() -> Iterator[None]:
    """A rank issues its reduction before its last microbatch's exchanges are through.

    The messages themselves still go in the right order, as gloo would forgive it; the log holds
    what NCCL would see.
    """
    run, forward = StepExecutor.run, MicrobatchModule.forward
    last: dict[str, Any] = {}

    def marked(self: StepExecutor, queue: Any, *, targets: int) -> StepResult:
        last.update(executor=self, shard=queue[-1] if queue else None)
        return run(self, queue, targets=targets)

    def early(self: MicrobatchModule, shard: ShardLayout | None) -> Tensor:
        if shard is not None and shard is last["shard"]:
            record(last["executor"])
        return forward(self, shard)

    def record(of: StepExecutor) -> None:
        assert of._log is not None
        of._log.record_collective(
            communicator="data", operation="closing pass", members=range(of.ranks), size=4
        )

    def close(self: StepExecutor) -> None:
        if last["shard"] is None:
            record(self)
        self._wrapped(None).backward()

    with (
        patch.object(StepExecutor, "run", marked),
        patch.object(StepExecutor, "_close", close),
        patch.object(MicrobatchModule, "forward", early),
    ):
        yield


def one_rank_drifts() -> AbstractContextManager[object]:
    """After the closing pass the last rank alone holds another gradient."""
    run = StepExecutor.run

    def drifting(self: StepExecutor, queue: Any, *, targets: int) -> StepResult:
        result = run(self, queue, targets=targets)
        if dist.get_rank() == self.ranks - 1:
            for parameter in self.adapter.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        return result

    return patch.object(StepExecutor, "run", drifting)


FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    fault.__name__: fault
    for fault in (
        labels_shifted_after_the_cut,
        loss_averaged_per_rank,
        mask_leaks,
        image_encoded_twice,
        images_in_wrong_order,
        text_positions_for_media,
        one_rank_drifts,
        reduced_in_the_last_microbatch,
    )
}
