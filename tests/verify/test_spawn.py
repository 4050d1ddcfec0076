"""Ranks started from one process: their results, and how their errors come back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dynapar.errors import SourceError
from dynapar.verify.spawn import run_on_ranks


def add_up(rank: int, start: int) -> tuple[int, int, int]:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return rank, int(total), torch.get_num_threads()


def fail(rank: int, kind: type[Exception]) -> None:
    if rank == 1:
        raise kind("sample 'a' is missing")
    dist.barrier()


def test_results_come_by_rank() -> None:
    assert run_on_ranks(add_up, 10, ranks=3) == [(0, 33, 1), (1, 33, 1), (2, 33, 1)]


def test_an_error_of_ours_comes_back_as_it_was() -> None:
    with pytest.raises(SourceError, match=r"^sample 'a' is missing$"):
        run_on_ranks(fail, SourceError, ranks=2)


def test_any_other_error_comes_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)a rank ended early:.*in fail.*ZeroDivisionError"):
        run_on_ranks(fail, ZeroDivisionError, ranks=2)
