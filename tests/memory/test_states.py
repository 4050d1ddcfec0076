from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from dynapar.attention.exchange import Transport
from dynapar.bench.memory import Case, microbatch_of, sample_of, text_model
from dynapar.memory.states import Sharding, States, state_bytes
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.order import OrderLog
from tests.distributed import run_ranks

WHOLE = 4_000_000
"""Bytes of all float32 weights."""


def states(sharding: Sharding, *, ranks: int = 4, weight_bytes: int = 4) -> States:
    return state_bytes(
        1_000_000,
        trained=1_000_000,
        layer=10_000,
        sharding=sharding,
        ranks=ranks,
        weight_bytes=weight_bytes,
    )


def test_gathered_and_full_are_those_measured_with_fsdp2() -> None:
    """Weights and gradients on 4 ranks, in units of the whole: 2.25 between the microbatches of a
    gathered model (2.19 where a tower got no gradient), 0.5 of a sharded one that reduces in every
    microbatch."""
    gathered, full = states("gathered"), states("full")
    assert (gathered.held - gathered.optimizer) / WHOLE == pytest.approx(2.25)
    assert (full.parameters + full.gradients) / WHOLE == pytest.approx(0.5)
    assert full.gathered == 2 * 4 * 10_000 + 4 * 10_000


def test_ddp_is_sixteen_bytes_a_parameter_and_its_buckets() -> None:
    alone, many = states("ddp", ranks=1), states("ddp")
    assert alone.held == 16 * 1_000_000
    assert many.held == 20 * 1_000_000


def test_zero_cuts_the_optimizer() -> None:
    found = states("zero1", weight_bytes=2)
    assert (found.parameters, found.gradients) == (2_000_000, WHOLE)
    assert found.optimizer == (8 + 4) * 250_000


def check_buckets(rank: int) -> OrderLog:
    """After a step gradients are views of DDP's buckets. Set to None, they are made anew in the
    next microbatch, beside the buckets, which stay."""
    log = OrderLog(rank)
    model = text_model(layers=1, width=64, mlp=96)
    executor = StepExecutor(
        Adapter(model), transport=Transport(dist.new_group(), recorder=log), log=log
    )
    sample = sample_of(Case(name="", model=model, tokens=20))
    queue = executor.prepare_microbatches([microbatch_of(sample, "none", rank=rank)], {0: sample})
    executor.run(queue, targets=38)
    parameters = list(model.parameters())
    buckets = [weakref.ref(storage) for storage in gradient_storages(parameters)]
    whole = 4 * sum(p.numel() for p in parameters)
    assert len(buckets) < len(parameters)
    assert sum(storage.nbytes() for ref in buckets if (storage := ref())) == whole
    model.zero_grad(set_to_none=True)
    with patch.object(executor, "_close"):
        executor.run(queue, targets=38)
    assert all(ref() is not None for ref in buckets)
    assert sum(storage.nbytes() for storage in gradient_storages(parameters)) == whole
    assert not {ref() for ref in buckets} & set(gradient_storages(parameters))
    return log


def gradient_storages(parameters: Sequence[Tensor]) -> list[UntypedStorage]:
    found = [p.grad.untyped_storage() for p in parameters if p.grad is not None]
    return list({storage._cdata: storage for storage in found}.values())


def test_buckets_lie_beside_the_gradients(tmp_path: Path) -> None:
    run_ranks(check_buckets, 2, tmp_path)
