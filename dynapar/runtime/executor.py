"""Run one rank's queue of a step and reduce the gradients in a closing pass.

The gradient rule: with N the targets of the whole step, over all ranks and microbatches, every
rank runs backward on S * G / N, where S is the *sum* of the losses of the targets that it owns and
G the number of ranks over which the reducer averages. The gradient is then that of one process
which runs the same samples unpacked, whatever the layout.

Every microbatch runs with reduction off. Then all ranks, also one with an empty queue, make one
closing call in which all gradients are reduced, in the same order everywhere. No reduction is
issued before a rank's last exchange: with NCCL it could block the exchange that its partner waits
for, and a rank whose last microbatch leaves out a tower would reduce the wrong gradients.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynapar.attention.pooled import RingTransport
from dynapar.data.samples import LoadedSample
from dynapar.plan import MicroBatch, StepPlan
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.layout import STAGED, ShardLayout, lay_out
from dynapar.runtime.microbatch import MicrobatchModule
from dynapar.runtime.order import OrderLog
from dynapar.runtime.recompute import recomputing
from dynapar.runtime.reduction import Reduction, recorded_all_reduce
from dynapar.schemes import Schemes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a rank knows after a step."""

    loss: float
    """Mean loss a target of the whole step; the same on all ranks."""
    microbatch_seconds: tuple[float, ...]
    """Wall-clock time of each microbatch of this rank's queue, waiting for peers included."""
    microbatch_busy: tuple[float, ...]
    """CPU time of this rank's training thread in each, waiting not included."""
    busy_seconds: float
    """CPU time that this rank's training thread spent in the step, waiting not included."""
    seconds: float
    """Wall-clock time of the step: microbatches and closing pass."""


class StepExecutor:
    """Runs steps on a model that every rank holds whole.

    Attributes:
        adapter: Of the model.
        module: The microbatch as one module.
        schemes: How rings share attention.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        transport: RingTransport,
        data_group: dist.ProcessGroup | None = None,
        log: OrderLog | None = None,
        loss_chunk: int = 1024,
        autocast: torch.dtype | None = None,
        recompute: bool = True,
        schemes: Schemes = STAGED,
    ):
        """Wrap the model for training; a collective: all ranks call it.

        Args:
            adapter: Of the model, with equal parameters on all ranks.
            transport: Of the exchanges, over process groups on which nothing else runs.
            data_group: Over which gradients are reduced; None is the default group.
            log: Records the collectives, for the order check.
            loss_chunk: Tokens whose logits exist at a time.
            autocast: Run the model under autocast to this type; gradients stay in the type of
                the parameters.
            recompute: Follow the plans' recompute policies; False keeps all activations, as checks
                in float64 must, whose recomputed layers would round to float32.
            schemes: How rings share attention; equal on all ranks.
        """
        self.schemes = schemes
        self.adapter = adapter
        self.rank = dist.get_rank(data_group)
        self.ranks = dist.get_world_size(data_group)
        self.module = MicrobatchModule(
            adapter, transport=transport, loss_chunk=loss_chunk, autocast=autocast
        )
        self._group = data_group
        self._log = log
        self._recompute = recompute
        self._wrapped: nn.Module = self.module
        if self.ranks > 1:
            self._wrapped = _wrap(self.module, data_group, log)

    def prepare(
        self, plan: StepPlan, samples: Mapping[int, LoadedSample]
    ) -> tuple[ShardLayout, ...]:
        """This rank's queue, laid out; needs no model and may run in the loader's thread.

        Args:
            plan: Of the step.
            samples: By row of the plan's sample table: all that this rank's microbatches hold.

        Returns:
            One layout a microbatch of the queue; dummies are left out, since a model that every
            rank holds whole needs none.
        """
        return self.prepare_microbatches(plan.of_rank(self.rank), samples)

    def prepare_microbatches(
        self, microbatches: Sequence[MicroBatch], samples: Mapping[int, LoadedSample]
    ) -> tuple[ShardLayout, ...]:
        """The same for microbatches of this rank, whatever plan they are of."""
        return tuple(
            lay_out(
                microbatch,
                samples,
                rank=self.rank,
                masks=self.adapter.masks,
                bands=self.adapter.bands,
                schemes=self.schemes,
            )
            for microbatch in microbatches
        )

    def run(self, queue: tuple[ShardLayout, ...], *, targets: int) -> StepResult:
        """Forward and backward of this rank's queue, then the closing pass.

        Adds to the parameters' gradients, which are the whole step's on every rank afterwards.

        Args:
            queue: From `prepare`.
            targets: N, of the whole step over all ranks. A step without any has gradient zero.
        """
        began, busy = time.perf_counter(), time.thread_time()
        factor = self.ranks / max(targets, 1)
        total = torch.zeros((), dtype=torch.float64)
        seconds, spent = [], []
        for shard in queue:
            start, worked = time.perf_counter(), time.thread_time()
            with self._no_sync():
                policy = shard.recompute if self._recompute else "none"
                with recomputing(self.module.model, policy):
                    loss = self._wrapped(shard)
                if loss.requires_grad:
                    (loss * factor).backward()
            total += loss.detach().cpu().double()
            seconds.append(time.perf_counter() - start)
            spent.append(time.thread_time() - worked)
        self._close()
        loss = self._sum(total)
        return StepResult(
            loss=float(loss) / max(targets, 1),
            microbatch_seconds=tuple(seconds),
            microbatch_busy=tuple(spent),
            busy_seconds=time.thread_time() - busy,
            seconds=time.perf_counter() - began,
        )

    def _no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self._wrapped, DistributedDataParallel):
            return self._wrapped.no_sync()
        return nullcontext()

    def _close(self) -> None:
        """All gradients, in the same order on every rank, whatever it ran."""
        self._wrapped(None).backward()

    def _sum(self, value: Tensor) -> Tensor:
        if self.ranks > 1:
            if self._log is not None:
                self._log.record_collective(
                    communicator="data",
                    operation="loss",
                    members=range(self.ranks),
                    size=value.element_size(),
                )
            value = value.to(self.module.model.device)
            dist.all_reduce(value, group=self._group)
        return value


def _wrap(
    module: nn.Module, group: dist.ProcessGroup | None, log: OrderLog | None
) -> DistributedDataParallel:
    """DDP that issues nothing inside a microbatch, and reduces what any rank used."""
    # Released under this name in torch 2.13; the old one warns there.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    buffers: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        module,
        process_group=group,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        **buffers,
    )
    if log is not None:
        of = dist.group.WORLD if group is None else group
        assert of is not None
        wrapped.register_comm_hook(Reduction(group=of, log=log), recorded_all_reduce)
    return wrapped
