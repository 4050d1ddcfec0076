"""Real ranks for tests: gloo processes that meet in a file, and whose message order is replayed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from dynapar.runtime.order import OrderLog, replay

QWEN = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
TIMEOUT = timedelta(seconds=60)


def run_ranks(
    fn: Callable[..., OrderLog | None], world_size: int, tmp_path: Path, *args: Any
) -> None:
    """Call `fn(rank, *args)` on each rank; re-raise the first failure here.

    The ranks meet in a file, so that tests can run side by side with no port to fight over. The
    order logs that `fn` returns are replayed under NCCL's rule: what gloo forgives fails here.
    """
    multiprocessing.set_forkserver_preload(["torch", QWEN, "dynapar.train.loop"])
    folder = tmp_path / f"ranks{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    start_processes(
        _rank_main, (fn, world_size, folder, args), nprocs=world_size, start_method="forkserver"
    )
    logs = [OrderLog.load(path) for path in sorted(folder.glob("order_*.jsonl"))]
    if logs:
        assert len(logs) == world_size, f"{len(logs)} of {world_size} ranks returned an order log"
        replay(logs)


def _rank_main(
    rank: int, fn: Callable[..., OrderLog | None], world_size: int, folder: Path, args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    log = fn(rank, *args)
    if log is not None:
        log.save(folder / f"order_{rank}.jsonl")
    dist.barrier()
    dist.destroy_process_group()
