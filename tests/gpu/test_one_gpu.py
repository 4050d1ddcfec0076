"""What one CUDA device can show; run by `scripts/gpu_check`. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynapar.attention.api import attend
from dynapar.attention.bands import Bands, causal, full, window
from dynapar.attention.calls import Request
from dynapar.attention.exchange import Transport
from dynapar.attention.kernels import KERNELS
from dynapar.attention.plan import plan_attention
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.reference import count_targets, reference_step
from tests.attention.oracle import dense_attention, dense_mask
from tests.models import gradients, small_model
from tests.plans import Written, hand_plan
from tests.runtime.test_executor import make_samples

pytestmark = pytest.mark.gpu

LENGTHS = (300, 1, 65, 128)
MASKS: dict[str, list[Bands]] = {
    "causal": [causal(length) for length in LENGTHS],
    "full": [full(length) for length in LENGTHS],
    "window": [window(length, width=17) for length in LENGTHS],
}


@pytest.fixture(name="group")
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", sorted(KERNELS))
@pytest.mark.parametrize("mask", sorted(MASKS))
def test_kernels_agree_with_dense_attention(name: str, mask: str) -> None:
    dtype = torch.bfloat16
    request = Request(device="cuda", dtype=dtype, head_dim=64)
    if reason := KERNELS[name].unusable(request):
        pytest.skip(f"{name}: {reason}")
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (4, 2, 2)]
    exact = [
        torch.randn(shape, generator=generator).to(dtype).double().requires_grad_()
        for shape in shapes
    ]
    want = dense_attention(*exact, mask=dense_mask(LENGTHS, MASKS[mask]))
    grad = torch.randn(want.shape, generator=generator).to(dtype)
    want_grads = torch.autograd.grad(want, exact, grad.double())
    given = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]
    plan = plan_attention(LENGTHS, degree=1, bands=MASKS[mask])
    bound = plan.bind(ranks=(0,), transport=Transport(), kernel=name)
    got = attend(given[0], given[1], given[2], bound)
    got_grads = torch.autograd.grad(got, given, grad.cuda())
    for ours, theirs in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert _distance(ours, theirs) < 1e-2


def _distance(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want.detach()).norm() / want.detach().norm())


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
