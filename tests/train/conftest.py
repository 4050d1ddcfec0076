from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[None]:
    """A run in this process, which is its only rank."""
    torch.set_num_threads(1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
