"""Average gradients over the ranks as DDP does, and note each bucket where it is issued."""

# DDP compares the annotations of a hook with classes, so they must not become strings here.
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dynapar.runtime.order import OrderLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Where gradients are reduced, and the log that is told."""

    group: dist.ProcessGroup
    log: OrderLog


def recorded_all_reduce(
    reduction: Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """A hook for `DistributedDataParallel.register_comm_hook`; changes nothing but the log.

    Args:
        reduction: The group of the gradients and the log.
        bucket: Gradients that are ready on this rank.
    """
    reduction.log.record_collective(
        communicator="data",
        operation="gradients",
        members=dist.get_process_group_ranks(reduction.group),
        size=bucket.buffer().nbytes,
    )
    return allreduce_hook(reduction.group, bucket)
