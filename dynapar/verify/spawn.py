"""Start ranks on this machine: gloo processes of one thread that meet in a file, without torchrun.

For checks and measurements, which must be one command. Training runs under torchrun.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from dynapar.errors import DynaparError

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def run_on_ranks(
    fn: Callable[[int, Argument], Result],
    argument: Argument,
    *,
    ranks: int,
    timeout: timedelta = timedelta(minutes=10),
) -> list[Result]:
    """Call `fn(rank, argument)` on each rank and wait for all of them.

    In each process the default group of torch.distributed has been made, over gloo.

    Args:
        fn: A function of a module.
        argument: Can be pickled, like the results.
        ranks: Processes to start, 1 or more.
        timeout: Longest wait of a rank for another one.

    Returns:
        The results by rank.

    Raises:
        DynaparError: The first that a rank raised.
        RuntimeError: A rank ended otherwise; with its traceback.
    """
    # Imported once, not in every rank.
    multiprocessing.set_forkserver_preload(["torch", "transformers.modeling_utils", fn.__module__])
    # It warns of every rank that it ends after one has failed.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="dynapar-ranks-") as name:
        folder = Path(name)
        call = (fn, argument, ranks, folder, timeout)
        try:
            start_processes(_rank_main, call, nprocs=ranks, start_method="forkserver")
        except ProcessException as error:
            raised = sorted(folder.glob("error_*"), key=lambda path: path.stat().st_mtime_ns)
            if not raised:
                raise RuntimeError(f"a rank ended early: {error}") from error
            raise pickle.loads(raised[0].read_bytes()) from None
        return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(ranks)]


def _rank_main(
    rank: int,
    fn: Callable[[int, Any], Any],
    argument: Any,
    ranks: int,
    folder: Path,
    timeout: timedelta,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=timeout,
    )
    try:
        result = fn(rank, argument)
    except DynaparError as error:
        (folder / f"part_{rank}").write_bytes(pickle.dumps(error))
        (folder / f"part_{rank}").rename(folder / f"error_{rank}")
        raise
    (folder / f"result_{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
