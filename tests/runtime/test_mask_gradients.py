"""Under every kind of mask the gradient of a step on real ranks is that of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dynapar.attention import api
from dynapar.attention.exchange import Transport
from dynapar.attention.trees import tree_positions
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.data.trees import join_members
from dynapar.runtime import adapter, attention_interface
from dynapar.runtime.adapter import FAMILIES, Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.masks import MaskClass
from dynapar.runtime.order import OrderLog
from dynapar.runtime.reference import count_targets, reference_step
from tests.distributed import TIMEOUT, run_ranks
from tests.models import gradients, worst_error
from tests.plans import Written, hand_plan
from tests.runtime.masked_models import MODELS, WINDOW, make_model, make_sample, make_samples

STEP: list[Written] = [
    ([0, 1, 2], {0: [0, 1, 2], 1: [2, 0], 2: [1]}),
    ([2, 1], {4: [1, 2], 3: [2]}),
]
"""Degrees 2 and 3, a sample on some of a ring's ranks, one on a single rank."""

ALONE: list[Written] = [([0], {0: [0], 1: [0], 2: [0], 3: [0], 4: [0]})]
"""All packed on one rank."""


def planned(
    kind: str,
    samples: Sequence[LoadedSample],
    step: list[Written],
    log: OrderLog,
    *,
    checkpointing: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Gradients of a step on all ranks."""
    model = make_model(kind)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False, **checkpointing})
    transport = Transport(dist.new_group(timeout=TIMEOUT), recorder=log)
    executor = StepExecutor(Adapter(model), transport=transport, log=log, loss_chunk=16)
    plan = hand_plan(samples, dist.get_world_size(), step)
    queue = executor.prepare(plan, dict(enumerate(samples)))
    executor.run(queue, targets=count_targets(samples))
    return gradients(model)


def wanted(kind: str, samples: Sequence[LoadedSample]) -> dict[str, Tensor]:
    model = make_model(kind)
    reference_step(model, samples, targets=count_targets(samples))
    return gradients(model)


def check_gradients(rank: int, kinds: list[str]) -> OrderLog:
    log = OrderLog(rank)
    for number, kind in enumerate(kinds):
        samples = make_samples(kind)
        got = planned(kind, samples, STEP, log)
        if number % 3 == rank:  # each rank compares some of the models
            error = worst_error(got, wanted(kind, samples))
            assert error[0] < 1e-5, (kind, error)
    return log


def test_the_gradient_is_that_of_one_process(tmp_path: Path) -> None:
    run_ranks(check_gradients, 3, tmp_path, list(MODELS))


def keep_attention(_: object, op: object, *args: object, **options: object) -> CheckpointPolicy:
    kept = op == torch.ops.dynapar.attend.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def check_recomputation(rank: int) -> OrderLog:
    """Bit for bit the same, with the exchanges of each layer run again, or kept."""
    log = OrderLog(rank)

    def fetches() -> int:
        return sum(op.operation == "attention forward rows" for op in log.operations)

    selective = partial(create_selective_checkpoint_contexts, keep_attention)
    for kind in ("gemma3", "gpt_oss", "llama4_text"):
        samples, counts, found = make_samples(kind), [], []
        for how in (None, {}, {"context_fn": selective}):
            before = fetches()
            found.append(planned(kind, samples, STEP, log, checkpointing=how))
            counts.append(fetches() - before)
        once, twice, kept = counts
        assert (twice, kept) == (2 * once, once)
        for other in found[1:]:
            assert all(torch.equal(other[name], found[0][name]) for name in other), kind
    return log


def test_recomputed_layers_give_the_very_same_gradients(tmp_path: Path) -> None:
    run_ranks(check_recomputation, 3, tmp_path)


def without(**dropped: None) -> AbstractContextManager[object]:
    """Attention that is not told of something."""

    def attend(*args: Any, **options: Any) -> Tensor:
        return api.attend(*args, **{**options, **dropped})

    return patch.object(attention_interface, "attend", attend)


def masked_as(mask: MaskClass) -> AbstractContextManager[object]:
    """Every layer's bands are those of one class."""
    bands = Adapter.bands
    return patch.object(Adapter, "bands", lambda self, sample, _: bands(self, sample, mask))


def one_way_images() -> AbstractContextManager[object]:
    family = replace(FAMILIES["gemma3"], two_way_images=False)
    return patch.object(adapter, "FAMILIES", {"gemma3": family})


def temperature_of_rows() -> AbstractContextManager[object]:
    factor = torch.ones(())
    return patch.object(attention_interface, "_missing_temperature", lambda *_: factor)


FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[object]]]] = {
    "sinks left out": ("gpt_oss", partial(without, sinks=None)),
    "softcap left out": ("gemma2", partial(without, softcap=None)),
    "window wider by one": ("mistral", partial(masked_as, MaskClass(window=WINDOW + 1))),
    "windows ignored": ("qwen2", partial(masked_as, MaskClass())),
    "chunks ignored": ("llama4_text", partial(masked_as, MaskClass())),
    "images causal": ("gemma3", one_way_images),
    "temperature by row": ("llama4_text", temperature_of_rows),
}


def check_faults(rank: int) -> OrderLog:
    log = OrderLog(rank)
    for name, (kind, fault) in FAULTS.items():
        samples = make_samples(kind)
        with fault():
            got = planned(kind, samples, ALONE, log)
        error = worst_error(got, wanted(kind, samples))
        assert error[0] > 0.01, (name, error)
    return log


def test_the_comparison_notices_every_mask_that_is_wrong(tmp_path: Path) -> None:
    run_ranks(check_faults, 1, tmp_path)


TREE = ((20, -1), (13, 0), (6, 1), (9, 1), (17, 0))
"""Tokens and parent of each node: three branches, two of which share 13 tokens more."""


def tree_and_branches() -> tuple[LoadedSample, list[LoadedSample]]:
    """A tree, and each branch as a sample of its own; each node's targets are in one branch."""
    whole = make_sample(7, [sum(tokens for tokens, _ in TREE)])
    ends = list(itertools.accumulate(tokens for tokens, _ in TREE))
    targets = whole.targets.clone()
    targets[[end - 1 for end in ends]] = IGNORE  # the next token is another branch's
    positions = torch.from_numpy(tree_positions(*zip(*TREE, strict=True)))[None]
    branches, counted = [], set()
    for leaf in (2, 3, 4):
        path = [leaf]
        while TREE[path[0]][1] >= 0:
            path.insert(0, TREE[path[0]][1])
        rows = [torch.arange(ends[n] - TREE[n][0], ends[n]) for n in path]
        mine = [
            targets[r] if n not in counted else torch.full_like(r, IGNORE)
            for n, r in zip(path, rows, strict=True)
        ]
        counted |= set(path)
        ids = whole.input_ids[torch.cat(rows)]
        branch = make_sample(7, [len(ids)])
        branches.append(replace(branch, input_ids=ids, targets=torch.cat(mine)))
    return replace(whole, targets=targets, positions=positions, tree=TREE), branches


def check_trees(rank: int) -> OrderLog:
    log = OrderLog(rank)
    tree, branches = tree_and_branches()
    other = make_sample(3, [29])
    step: list[Written] = [([1, 2, 0], {0: [1, 2, 0], 1: [0, 2]})]
    for number, kind in enumerate(("llama", "mistral", "gpt_oss")):
        got = planned(kind, [tree, other], step, log)
        if number == rank:
            error = worst_error(got, wanted(kind, [*branches, other]))
            assert error[0] < 1e-5, (kind, error)
    return log


def test_a_tree_has_the_gradient_of_its_branches(tmp_path: Path) -> None:
    run_ranks(check_trees, 3, tmp_path)


def members_of_a_prefix() -> list[LoadedSample]:
    """Three samples that begin with the same 21 tokens; all targets count, those of two there."""
    shared = make_sample(11, [21])
    members = []
    for number, branch in enumerate((9, 1, 30)):
        own = make_sample(20 + number, [21 + branch])
        ids = torch.cat([shared.input_ids, own.input_ids[21:]])
        targets = torch.cat([ids[1:], torch.tensor([IGNORE])])
        if number == 1:
            targets[5:20] = IGNORE
        members.append(replace(own, id=f"m{number}", input_ids=ids, targets=targets))
    return members


def check_joined_members(rank: int) -> OrderLog:
    log = OrderLog(rank)
    members, other = members_of_a_prefix(), make_sample(3, [29])
    tree = join_members("m0", members, prefix_tokens=21, prefix_units=0)
    assert tree.targets.shape == (3, 21 + 9 + 1 + 30)
    assert len(tree.input_ids) < sum(len(member.input_ids) for member in members) - 40
    step: list[Written] = [([1, 2, 0], {0: [1, 2, 0], 1: [0, 2]})]
    for number, kind in enumerate(("llama", "mistral", "qwen3")):
        got = planned(kind, [tree, other], step, log)
        once = planned(kind, [replace(tree, targets=tree.targets[0]), other], step, log)
        if number == rank:
            apart = wanted(kind, [*members, other])
            assert worst_error(got, apart)[0] < 1e-5, (kind, worst_error(got, apart))
            assert worst_error(once, apart)[0] > 0.01, "a target of several members counts for each"
    return log


def test_joined_members_have_the_gradient_of_the_members(tmp_path: Path) -> None:
    """Also where a target is several members', and where the prefix ends."""
    run_ranks(check_joined_members, 3, tmp_path)
