"""What one CUDA device can show, by `pytest -m gpu tests/gpu`. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dynapar.attention.exchange import Transport
from dynapar.bench.device_check import checks, run
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.reference import count_targets, reference_step
from tests.models import gradients, small_model
from tests.plans import Written, hand_plan
from tests.runtime.test_executor import make_samples

pytestmark = pytest.mark.gpu


@pytest.fixture(name="group")
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_kernels_agree_with_dense_attention() -> None:
    found = [run(check, "cuda") for check in checks("cuda")]
    assert found
    assert [each for each in found if not each.right] == []


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("group")
def test_a_step_on_one_gpu_is_the_reference(autocast: torch.dtype | None) -> None:
    model, exact, low = (small_model() for _ in range(3))
    samples = make_samples(model)
    for each in (model, exact, low):
        nn.Module.cuda(each)
    step: list[Written] = [([0], {row: [0]}) for row in range(len(samples))]
    executor = StepExecutor(Adapter(model), transport=Transport(), autocast=autocast)
    queue = executor.prepare(hand_plan(samples, 1, step), dict(enumerate(samples)))
    executor.run(queue, targets=count_targets(samples))
    reference_step(exact, samples, targets=count_targets(samples))
    reference_step(low, samples, targets=count_targets(samples), autocast=autocast)
    ours, want, theirs = (
        torch.cat([g.flatten() for g in gradients(m).values()]) for m in (model, exact, low)
    )
    allowed = 1e-4 if autocast is None else 1.5 * float((theirs - want).norm() / want.norm())
    assert float((ours - want).norm() / want.norm()) <= allowed
