"""Bytes of states by sharding mode, against what torch's own sharding holds on two real ranks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dynapar.bench.memory import text_model
from dynapar.memory.states import Sharding, state_bytes
from tests.distributed import run_ranks


def tensors(model: nn.Module) -> Iterator[Tensor]:
    """All that Python knows of, and the gradients, of which it knows nothing until it is asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names that are looked at
        known = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    yield from known
    leaves = [each for each in (*known, *model.parameters()) if each.is_leaf]
    yield from (each.grad for each in leaves if each.grad is not None)


def held(model: nn.Module) -> int:
    """Bytes of all tensors, storage by storage; a storage that FSDP2 has freed has none."""
    gc.collect()
    sizes = {}
    for tensor in tensors(model):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def check(rank: int, sharding: Sharding) -> None:
    # Here, since it warns of torch's own scripts, which in the test's process is an error.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = text_model(layers=4, width=192, mlp=640, vocabulary=320)
    parameters = sum(p.numel() for p in model.parameters())
    layers = list(model.model.layers)
    layer = sum(p.numel() for p in layers[0].parameters())
    before = held(model) - 4 * parameters
    units: list[nn.Module] = [*layers, model]
    for unit in units if sharding in ("gathered", "full") else []:
        fully_shard(unit, reshard_after_forward=sharding == "full")
    optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
        if sharding == "zero1"
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    ids = torch.arange(4)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    if sharding == "zero1":
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if sharding == "gathered":
        for unit in units:
            assert isinstance(unit, FSDPModule)
            unit.unshard()
            unit.set_requires_gradient_sync(False)
            unit.set_reshard_after_backward(False)
    peak = 0

    def look(*_: object) -> None:
        nonlocal peak
        peak = max(peak, held(model))

    for unit in layers:
        unit.register_full_backward_pre_hook(look)
        unit.register_full_backward_hook(look)
    model(input_ids=ids, labels=ids).loss.backward()
    look()
    found = state_bytes(
        parameters,
        trained=parameters,
        layer=layer,
        sharding=sharding,
        ranks=dist.get_world_size(),
        weight_bytes=4,
    )
    # A microbatch of four tokens keeps next to nothing.
    assert (peak - before) / found.held == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1", "gathered", "full"])
def test_states_are_those_of_real_ranks(sharding: Sharding, tmp_path: Path) -> None:
    run_ranks(check, 2, tmp_path, sharding)
