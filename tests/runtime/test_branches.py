"""A tree of a shared prefix and its branches has the loss and gradient of its members apart.

Each member apart has a copy of the whole prefix, media included; the tree has it once. Every model
type that can run trees is held to this, on a rank alone and on rings of 2 and 3 real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from dynapar.attention.bands import causal
from dynapar.attention.exchange import Transport
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.data.trees import join_members
from dynapar.errors import ModelError
from dynapar.runtime.adapter import FAMILIES, TEXT_MODELS, Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.masks import MaskClass
from dynapar.runtime.order import OrderLog
from dynapar.runtime.reference import count_targets, reference_step
from tests import models
from tests.distributed import TIMEOUT, run_ranks
from tests.models import Recipe, gradients, small_model, worst_error
from tests.plans import Written, hand_plan
from tests.runtime import masked_models

RINGS: dict[str, list[Written]] = {
    "alone": [([0], {0: [0], 1: [0]})],
    "ring of 2": [([2, 1], {0: [2, 1], 1: [1]})],
    "ring of 3": [([1, 2, 0], {0: [1, 2, 0], 1: [0, 2]})],
}

MEDIA_KINDS = ("qwen2_vl", "qwen2_5_vl")
"""Of models that see images one way, so that trees may hold some."""

WITHOUT_TREES = ("llama4_text",)
"""Attends by chunks of a sequence, in which branches have no place."""

GROUPS: dict[str, tuple[Recipe, Sequence[Recipe]]] = {
    "two branches of text": ([21], ([9], [30])),
    "three, one of a single token": ([13], ([1], [17], [4])),
}
"""What is shared, and what each member adds."""

MEDIA_GROUPS: dict[str, tuple[Recipe, Sequence[Recipe]]] = {
    "an image shared": ([4, (1, 8, 4), 3], ([6], [15], [2])),
    "images and a video shared, one branch with an image of its own": (
        [2, (1, 4, 4), 1, (2, 4, 6), 5],
        ([3, (1, 4, 6), 8], [11]),
    ),
}


def small_qwen2_vl() -> PreTrainedModel:
    """No parameter at a value that could hide an error."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope,
            "bos_token_id": None, "eos_token_id": None,
        },
        vision_config={
            "depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 4,
        },
        image_token_id=models.IMAGE_ID,
        video_token_id=models.VIDEO_ID,
        vision_start_token_id=models.START_ID,
        vision_end_token_id=models.END_ID,
    )  # fmt: skip
    model: PreTrainedModel = Qwen2VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.train()
    return model


def make_model(kind: str) -> PreTrainedModel:
    if kind in MEDIA_KINDS:
        return small_qwen2_vl() if kind == "qwen2_vl" else small_model()
    return masked_models.make_model(kind)


def make(model: PreTrainedModel, recipe: Recipe, seed: int) -> LoadedSample:
    if model.config.model_type in MEDIA_KINDS:
        return models.make_sample(model, recipe, seed=seed)
    return masked_models.make_sample(seed, list(recipe))  # type: ignore[arg-type]


def make_members(
    model: PreTrainedModel, shared: Recipe, branches: Sequence[Recipe]
) -> tuple[list[LoadedSample], int, int]:
    """Samples that begin alike, and how many tokens and encoder units they share.

    All targets count, also those in the prefix; of the first member those in the prefix do not.
    """
    prefix = make(model, shared, seed=11)
    size, units = len(prefix.input_ids), len(prefix.units)
    members = []
    for number, branch in enumerate(branches):
        own = make(model, [*shared, *branch], seed=20 + number)
        ids = torch.cat([prefix.input_ids, own.input_ids[size:]])
        labels = ids.masked_fill(own.kinds != 0, IGNORE)
        targets = functional.pad(labels[1:], (0, 1), value=IGNORE)
        if number == 0:
            targets[: size - 1] = IGNORE
        members.append(
            replace(own, id=f"m{number}", input_ids=ids, targets=targets,
                    units={**own.units, **prefix.units})
        )  # fmt: skip
    return members, size, units


def planned(
    kind: str, samples: Sequence[LoadedSample], step: list[Written], log: OrderLog
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step on all ranks."""
    model = make_model(kind)
    transport = Transport(dist.new_group(timeout=TIMEOUT), recorder=log)
    executor = StepExecutor(Adapter(model), transport=transport, log=log, loss_chunk=16)
    plan = hand_plan(samples, dist.get_world_size(), step)
    queue = executor.prepare(plan, dict(enumerate(samples)))
    result = executor.run(queue, targets=count_targets(samples))
    return result.loss, gradients(model)


def wanted(kind: str, samples: Sequence[LoadedSample]) -> tuple[float, dict[str, Tensor]]:
    """The same of the samples one by one, in one process."""
    model = make_model(kind)
    return reference_step(model, samples, targets=count_targets(samples)), gradients(model)


def check(rank: int, kinds: Sequence[str], media: bool) -> OrderLog:
    log = OrderLog(rank)
    for turn, kind in enumerate(kinds):
        model = make_model(kind)
        other = make(model, [29], seed=3)
        for name, (shared, branches) in (MEDIA_GROUPS if media else GROUPS).items():
            members, size, units = make_members(model, shared, branches)
            tree = join_members("tree", members, prefix_tokens=size, prefix_units=units)
            added = sum(len(member.input_ids) - size for member in members)
            assert len(tree.input_ids) == size + added
            got = {ring: planned(kind, [tree, other], step, log) for ring, step in RINGS.items()}
            if turn % dist.get_world_size() != rank:  # each rank compares some of the models
                continue
            loss, want = wanted(kind, [*members, other])
            for ring, (found, gradient) in got.items():
                assert found == pytest.approx(loss, rel=1e-6), (kind, name, ring)
                assert worst_error(gradient, want)[0] < 1e-5, (kind, name, ring)
    return log


def test_text_models(tmp_path: Path) -> None:
    kinds = [kind for kind in masked_models.MODELS if kind not in WITHOUT_TREES]
    assert {*kinds, *WITHOUT_TREES, *MEDIA_KINDS} == {*TEXT_MODELS, *FAMILIES}
    run_ranks(check, 3, tmp_path, kinds, False)


def test_models_with_media_in_what_is_shared(tmp_path: Path) -> None:
    run_ranks(check, 3, tmp_path, list(MEDIA_KINDS), True)


@pytest.mark.parametrize("kind", WITHOUT_TREES)
def test_models_that_cannot_run_trees_say_so(kind: str) -> None:
    model = make_model(kind)
    members, size, _ = make_members(model, *GROUPS["two branches of text"])
    tree = join_members("tree", members, prefix_tokens=size, prefix_units=0)
    adapter = Adapter(model)
    chunks = next(mask for mask in adapter.masks if mask.chunk is not None)
    with pytest.raises(ModelError, match="'tree' is a tree, and this model's layers attend by"):
        adapter.bands(tree, chunks)


def branches_see_each_other() -> AbstractContextManager[object]:
    def bands(_: Adapter, sample: LoadedSample, mask: MaskClass) -> object:
        return causal(len(sample.input_ids))

    return patch.object(Adapter, "bands", bands)


def as_it_is() -> AbstractContextManager[object]:
    return patch.object(Adapter, "bands", Adapter.bands)


def positions_run_on(tree: LoadedSample) -> LoadedSample:
    return replace(tree, positions=torch.arange(len(tree.input_ids))[None])


def one_target_each(tree: LoadedSample) -> LoadedSample:
    return replace(tree, targets=tree.targets[0])


Fault = tuple[Callable[[], AbstractContextManager[object]], Callable[[LoadedSample], LoadedSample]]

FAULTS: dict[str, Fault] = {
    "branches see each other": (branches_see_each_other, lambda tree: tree),
    "positions run on": (as_it_is, positions_run_on),
    "targets of the prefix count once": (as_it_is, one_target_each),
}


def check_fault(rank: int, name: str) -> OrderLog:
    log = OrderLog(rank)
    fault, change = FAULTS[name]
    model = make_model("llama")
    other = make(model, [29], seed=3)
    members, size, _ = make_members(model, *GROUPS["three, one of a single token"])
    tree = change(join_members("tree", members, prefix_tokens=size, prefix_units=0))
    with fault():
        _, got = planned("llama", [tree, other], RINGS["alone"], log)
    error = worst_error(got, wanted("llama", [*members, other])[1])
    assert error[0] > 0.01, (name, error)
    return log


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_notices(name: str, tmp_path: Path) -> None:
    run_ranks(partial(check_fault, name=name), 1, tmp_path)
