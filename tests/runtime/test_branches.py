"""Samples of one prefix have, as a tree on a ring, the gradient that they have one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynapar.attention.exchange import Transport
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.errors import SampleError
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.branches import join_branches
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.order import OrderLog
from dynapar.runtime.reference import count_targets, reference_step
from tests.distributed import TIMEOUT, run_ranks
from tests.models import Recipe, gradients, make_sample, small_model, worst_error
from tests.plans import Written, hand_plan

PREFIX: Recipe = [5, (1, 4, 6), 9]
OWN: list[Recipe] = [[12], [3, (1, 8, 4), 8], [], [1], [4, (2, 4, 4), 2]]
"""What follows the prefix in each sample; nothing in one of them."""


def family() -> tuple[list[LoadedSample], int]:
    """Samples that begin alike, and how many tokens do."""
    model = small_model()
    prefix = make_sample(model, PREFIX, seed=0)
    shared = len(prefix.input_ids)
    samples = []
    for number, own in enumerate(OWN):
        sample = make_sample(model, [*PREFIX, *own], seed=number)
        ids = sample.input_ids.clone()
        ids[:shared] = prefix.input_ids
        targets = torch.cat([ids[1:], torch.tensor([IGNORE])])
        targets = targets.masked_fill(targets >= 310, IGNORE)
        units = {n: prefix.units.get(n, patches) for n, patches in sample.units.items()}
        samples.append(
            replace(sample, id=f"m{number}", input_ids=ids, targets=targets, units=units)
        )
    return samples, shared


def check_gradient(rank: int) -> OrderLog:
    log = OrderLog(rank)
    members, shared = family()
    other = make_sample(small_model(), [17, (1, 4, 4), 6], seed=9)
    tree = join_branches(members, shared=shared)
    assert count_targets([tree]) == count_targets(members)
    samples = [tree, other]
    step: list[Written] = [([1, 0, 2], {0: [1, 0, 2], 1: [2, 1]})]
    model = small_model()
    transport = Transport(dist.new_group(timeout=TIMEOUT), recorder=log)
    executor = StepExecutor(Adapter(model), transport=transport, log=log, loss_chunk=16)
    queue = executor.prepare(hand_plan(samples, 3, step), dict(enumerate(samples)))
    result = executor.run(queue, targets=count_targets(samples))
    if rank == 0:
        alone = small_model()
        loss = reference_step(alone, [*members, other], targets=count_targets(samples))
        assert abs(result.loss - loss) < 1e-5 * loss
        error = worst_error(gradients(model), gradients(alone))
        assert error[0] < 1e-5, error
    return log


def test_the_gradient_is_that_of_the_samples_one_by_one(tmp_path: Path) -> None:
    run_ranks(check_gradient, 3, tmp_path)


def test_what_is_shared_is_there_once() -> None:
    members, shared = family()
    tree = join_branches(members, shared=shared)
    assert len(tree.input_ids) == shared + sum(len(m.input_ids) - shared for m in members)
    assert tree.tree == ((shared, -1), (12, 0), (21, 0), (1, 0), (16, 0))
    assert [item.grid for item in tree.media] == [(1, 4, 6), (1, 8, 4), (2, 4, 4)]
    assert [len(tree.units[n]) for n in range(4)] == [24, 32, 16, 16]
    assert tree.more_targets is not None
    # Each further sample has the targets of the prefix again, the last one with its own token.
    last = [int(t) for row, t in tree.more_targets.T if row == shared - 1]
    assert last == [int(m.targets[shared - 1]) for m in members[1:] if len(m.input_ids) > shared]


def test_samples_that_begin_otherwise_are_refused() -> None:
    members, shared = family()
    other = members[1]
    ids, positions = other.input_ids.clone(), other.positions.clone()
    ids[3] += 1
    positions[0, 3] += 1
    grid = other.media[0]._replace(grid=(1, 6, 4))
    for change in (
        replace(other, input_ids=ids),
        replace(other, positions=positions),
        replace(other, media=(grid, *other.media[1:])),
    ):
        with pytest.raises(SampleError, match=r"'m0' and 'm1' do not begin with the same 22 token"):
            join_branches([members[0], change], shared=shared)
    with pytest.raises(SampleError, match="do not begin with the same 500 tokens"):
        join_branches([members[0], other], shared=500)


def test_half_a_media_item_is_not_shared() -> None:
    members, _ = family()
    with pytest.raises(SampleError, match="'m0' shares 8 tokens, in the middle of a media item"):
        join_branches(members[:2], shared=8)
