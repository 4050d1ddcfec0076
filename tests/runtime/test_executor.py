"""The gradient of a step on real ranks is that of one process, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from dynapar.attention.exchange import Transport
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.masks import MaskClass
from dynapar.runtime.order import OrderError, OrderLog
from dynapar.runtime.reference import Widening, count_targets, reference_step
from tests.distributed import TIMEOUT, run_ranks
from tests.models import (
    END_ID,
    IMAGE_ID,
    START_ID,
    VIDEO_ID,
    Recipe,
    gradients,
    make_sample,
    small_model,
    worst_error,
)
from tests.plans import Written, hand_plan

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

RECIPES: dict[str, Recipe] = {
    "text": [23],
    "long": [97],
    "one image": [6, (1, 4, 6), 9],
    "images": [4, (1, 8, 4), 3, (1, 4, 4), 5, (1, 12, 8), 8],
    "video": [5, (3, 4, 4), 11],
    "mixed": [3, (2, 6, 4), 4, (1, 4, 6), 2, (1, 4, 4), 7],
    "late": [19, (1, 12, 8), 3],
    "one": [1],
    "two": [2],
    "masked": [6, (1, 4, 4), 5],
}
ROWS = {name: row for row, name in enumerate(RECIPES)}


def written(*microbatches: tuple[list[int], dict[str, list[int]]]) -> list[Written]:
    return [(ranks, {ROWS[n]: owners for n, owners in of.items()}) for ranks, of in microbatches]


STEPS = {
    "degrees 1 to 4 in one step": written(
        ([0, 1, 2, 3], {"long": [0, 1, 2, 3], "images": [0, 1, 2, 3], "one": [0, 1, 2, 3]}),
        ([0, 1, 2], {"mixed": [0, 1, 2], "text": [1]}),
        ([3], {"video": [3]}),
        ([2, 3], {"late": [2, 3], "two": [2, 3], "masked": [3]}),
        ([0], {"one image": [0]}),
    ),
    "whole samples inside rings, on ranks in any order": written(
        ([0, 1, 2, 3], {"long": [2, 0], "video": [3], "text": [1], "mixed": [3, 1, 0]}),
        ([1, 2], {"images": [1], "late": [2, 1]}),
    ),
    "an empty queue, others of unequal length": written(
        ([0], {"text": [0]}),
        ([0], {"one image": [0]}),
        ([0], {"masked": [0]}),
        ([1, 2], {"long": [1, 2], "video": [2, 1]}),
        ([2], {"two": [2]}),
    ),
    "a rank whose labels are all masked": written(
        ([0], {"masked": [0]}), ([1], {"text": [1]}), ([2, 3], {"one image": [2, 3]})
    ),
    "the tower in one rank's first microbatch only": written(
        ([0], {"images": [0]}),
        ([0, 1], {"long": [0, 1]}),
        ([2], {"text": [2]}),
        ([3], {"two": [3]}),
    ),
    "the tower in one rank's last microbatch only": written(
        ([0, 1], {"long": [0, 1]}),
        ([2], {"text": [2]}),
        ([3], {"two": [3]}),
        ([0], {"images": [0]}),
    ),
    "text alone": written(
        ([0, 1, 2], {"long": [0, 1, 2]}), ([3], {"text": [3]}), ([3], {"one": [3]})
    ),
    "a rank of the ring without any token": written(
        ([0, 1, 2, 3], {"two": [0, 1, 2, 3], "one": [1]}), ([2], {"video": [2]})
    ),
}
"""By what is special about it: the microbatches of a step of four ranks."""


def make_samples(model: PreTrainedModel) -> list[LoadedSample]:
    return [
        make_sample(model, recipe, seed=seed, masked=name == "masked")
        for seed, (name, recipe) in enumerate(RECIPES.items())
    ]


def rows_of(step: list[Written]) -> list[int]:
    return [row for _, shares in step for row in shares]


def make_executor(model: PreTrainedModel, log: OrderLog) -> StepExecutor:
    """The exchanges on a group of their own, as in a real run."""
    group = dist.new_group(timeout=TIMEOUT)
    transport = Transport(group, recorder=log)
    return StepExecutor(Adapter(model), transport=transport, log=log, loss_chunk=16)


def planned(
    executor: StepExecutor, samples: list[LoadedSample], step: list[Written]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step on all ranks."""
    executor.adapter.model.zero_grad()
    executor.adapter.use_attention("dynapar")
    plan = hand_plan(samples, dist.get_world_size(), step)
    queue = executor.prepare(plan, dict(enumerate(samples)))
    used = [samples[row] for row in rows_of(step)]
    result = executor.run(queue, targets=count_targets(used))
    return result.loss, gradients(executor.adapter.model)


def wanted(
    model: PreTrainedModel, samples: list[LoadedSample], step: list[Written]
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    used = [samples[row] for row in rows_of(step)]
    loss = reference_step(model, used, targets=count_targets(used))
    return loss, gradients(model)


def check_steps(rank: int, dtype: torch.dtype) -> OrderLog:
    model = small_model(dtype)
    samples = make_samples(model)
    log = OrderLog(rank)
    executor = make_executor(model, log)
    reference = small_model(dtype)
    wide: Callable[[], AbstractContextManager[object]]
    wide = Widening if dtype == torch.float64 else nullcontext
    with wide():
        for number, (name, step) in enumerate(STEPS.items()):
            loss, got = planned(executor, samples, step)
            if number % 4 != rank:
                continue  # each rank compares some of the steps
            want_loss, want = wanted(reference, samples, step)
            error = worst_error(got, want)
            assert error[0] < TOLERANCE[dtype], (name, error)
            assert abs(loss - want_loss) <= TOLERANCE[dtype] * want_loss, name
            tower = float(want["model.visual.patch_embed.proj.weight"].norm())
            assert (tower > 0) == any(samples[row].media for row in rows_of(step)), name
        loss, got = planned(executor, samples, written(([0, 1], {"masked": [0, 1]})))
        assert loss == 0.0, "a step without any target"
        assert not any(gradient.any() for gradient in got.values())
    return log


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_gradient_is_that_of_one_process(dtype: torch.dtype, tmp_path: Path) -> None:
    run_ranks(check_steps, 4, tmp_path, dtype)


def check_early_reduction(rank: int) -> OrderLog:
    """Gradients are reduced in each rank's own last microbatch, as with plain accumulation."""
    log = OrderLog(rank)
    small = partial(DistributedDataParallel, bucket_cap_mb=0.01)
    with patch("dynapar.runtime.executor.DistributedDataParallel", small):
        model = small_model()
        executor = make_executor(model, log)
    samples = make_samples(model)
    step = written(([0, 1], {"long": [0, 1]}), ([1], {"text": [1]}))
    used = [samples[row] for row in rows_of(step)]
    queue = executor.prepare(hand_plan(samples, 2, step), dict(enumerate(samples)))
    wrapped = executor._wrapped
    assert isinstance(wrapped, DistributedDataParallel)
    contexts = iter([*(wrapped.no_sync() for _ in queue[1:]), nullcontext()])
    with (
        patch.object(executor, "_no_sync", lambda: next(contexts)),
        patch.object(executor, "_close", lambda: None),
    ):
        executor.run(queue, targets=count_targets(used))
    return log


def test_a_reduction_before_the_last_exchange_is_found(tmp_path: Path) -> None:
    """Gloo gets through; the order of what was issued would stop NCCL."""
    with pytest.raises(OrderError, match="gradients on 'data'"):
        run_ranks(check_early_reduction, 2, tmp_path)


def check_frozen(rank: int) -> OrderLog:
    """What is trained decides who enters backward, not whether a rank has media."""
    log = OrderLog(rank)
    frozen: dict[str, Callable[[str], bool]] = {
        "encoder": lambda name: name.startswith("model.visual"),
        "all but the projector": lambda name: "visual.merger" not in name,
    }
    for what, is_frozen in frozen.items():
        models = small_model(), small_model()
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not is_frozen(name))
        samples = make_samples(models[0])
        executor = make_executor(models[0], log)
        for number, step in enumerate(STEPS.values()):
            if what != "encoder" and not any(samples[row].media for row in rows_of(step)):
                continue  # nothing of the projector is used
            _, got = planned(executor, samples, step)
            if number % 4 != rank:
                continue
            error = worst_error(got, wanted(models[1], samples, step)[1])
            assert error[0] < 1e-5, (what, error)
    return log


def test_frozen_parts_take_part_in_exchanges_alike(tmp_path: Path) -> None:
    run_ranks(check_frozen, 4, tmp_path)


def check_recomputation(rank: int) -> OrderLog:
    log = OrderLog(rank)
    model = small_model()
    samples = make_samples(model)
    executor = make_executor(model, log)
    step = STEPS["degrees 1 to 4 in one step"]
    _, once = planned(executor, samples, step)
    issued = len(log.operations)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, again = planned(executor, samples, step)
    assert all(torch.equal(again[name], once[name]) for name in once)
    assert len(log.operations) - issued > issued  # forward exchanges ran twice
    return log


def test_recomputed_layers_give_the_very_same_gradients(tmp_path: Path) -> None:
    run_ranks(check_recomputation, 4, tmp_path)


def check_low_precision(rank: int) -> OrderLog:
    """Autocast to bfloat16 is as far from float32 on rings as it is in one process."""
    log = OrderLog(rank)
    model = small_model()
    samples = make_samples(model)
    step = STEPS["degrees 1 to 4 in one step"]
    group = dist.new_group(timeout=TIMEOUT)
    transport = Transport(group, recorder=log)
    executor = StepExecutor(
        Adapter(model), transport=transport, log=log, loss_chunk=16, autocast=torch.bfloat16
    )
    _, got = planned(executor, samples, step)
    used = [samples[row] for row in rows_of(step)]
    targets = count_targets(used)
    exact, low = small_model(), small_model()
    reference_step(exact, used, targets=targets)
    reference_step(low, used, targets=targets, autocast=torch.bfloat16)
    want = torch.cat([g.flatten() for g in gradients(exact).values()])
    one_process = torch.cat([g.flatten() for g in gradients(low).values()])
    ours = torch.cat([g.flatten() for g in got.values()])
    assert 1e-4 < float((one_process - want).norm() / want.norm()) < 0.1
    assert float((ours - want).norm()) <= 1.5 * float((one_process - want).norm())
    return log


def test_bfloat16_is_no_further_from_float32_than_one_process(tmp_path: Path) -> None:
    run_ranks(check_low_precision, 4, tmp_path)


def qwen2_vl() -> PreTrainedModel:
    """The family's first release: no windows in its encoder, another rule for a video's time."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 3, 3],
        },
    }
    vision = {"embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2, "patch_size": 4}
    model: PreTrainedModel = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=IMAGE_ID,
            video_token_id=VIDEO_ID,
            vision_start_token_id=START_ID,
            vision_end_token_id=END_ID,
        )
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def check_qwen2_vl(rank: int) -> OrderLog:
    log = OrderLog(rank)
    model, reference = qwen2_vl(), qwen2_vl()
    samples = make_samples(model)
    step = STEPS["degrees 1 to 4 in one step"]
    loss, got = planned(make_executor(model, log), samples, step)
    if rank == 0:
        want_loss, want = wanted(reference, samples, step)
        assert abs(loss - want_loss) <= 1e-5 * want_loss
        error = worst_error(got, want)
        assert error[0] < 1e-5, error
    return log


def test_qwen2_vl_runs_as_its_successor_does(tmp_path: Path) -> None:
    run_ranks(check_qwen2_vl, 4, tmp_path)


def sliding_model() -> PreTrainedModel:
    """A text model whose layers alternate between a window and the whole past."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: PreTrainedModel = Qwen2ForCausalLM(config)
    return model


def check_text_model(rank: int) -> OrderLog:
    log = OrderLog(rank)
    model, reference = sliding_model(), sliding_model()
    generator = torch.Generator().manual_seed(3)
    samples = []
    for number, length in enumerate((70, 41, 9, 1)):
        ids = torch.randint(0, 320, (length,), generator=generator)
        samples.append(
            LoadedSample(
                id=f"s{number}",
                input_ids=ids,
                targets=torch.cat([ids[1:], torch.tensor([IGNORE])]),
                kinds=torch.zeros_like(ids),
                positions=torch.arange(length)[None],
                media=(),
                units={},
            )
        )
    executor = make_executor(model, log)
    assert executor.adapter.masks == (MaskClass(window=8), MaskClass())
    step: list[Written] = [([0, 1, 2], {0: [0, 1, 2], 1: [2, 0], 2: [1]}), ([2], {3: [2]})]
    loss, got = planned(executor, samples, step)
    want_loss, want = wanted(reference, samples, step)
    assert abs(loss - want_loss) <= 1e-5 * want_loss
    assert worst_error(got, want)[0] < 1e-5
    return log


def test_a_text_model_with_sliding_windows_needs_no_entry(tmp_path: Path) -> None:
    run_ranks(check_text_model, 3, tmp_path)
