"""The common layout pads, encodes everywhere, and gives the same gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dynapar.attention.exchange import Transport
from dynapar.bench.baselines import lay_out_padded, pad_sample
from dynapar.data.samples import IGNORE, TEXT_KIND, LoadedSample
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.layout import ShardLayout
from dynapar.runtime.order import OrderLog
from dynapar.runtime.reference import count_targets, reference_step
from dynapar.simulate.padded import padded_batches
from dynapar.verify.gradients import difference, gradients
from tests.distributed import run_ranks
from tests.models import Recipe, make_sample, small_model
from tests.plans import table_of

RECIPES: Sequence[Recipe] = (
    [23],
    [97],
    [6, (1, 4, 6), 9],
    [4, (1, 8, 4), 3, (1, 4, 4), 5],
    [5, (3, 4, 4), 11],
    [2],
    [31],
)


def test_padding_has_no_target_and_no_media() -> None:
    sample = make_sample(small_model(), [5, (1, 4, 4), 3], seed=0)
    padded = pad_sample(sample, length=40)
    length = len(sample.input_ids)
    assert {len(padded.input_ids), len(padded.targets), len(padded.kinds)} == {40}
    assert padded.positions.shape == (3, 40)
    assert bool((padded.targets[length:] == IGNORE).all())
    assert bool((padded.kinds[length:] == TEXT_KIND).all())
    assert torch.equal(padded.positions[:, :length], sample.positions)
    assert count_targets([padded]) == count_targets([sample])


def check_gradient(rank: int) -> OrderLog:
    model, reference = small_model(), small_model()
    samples = [make_sample(model, recipe, seed=k) for k, recipe in enumerate(RECIPES)]
    targets = count_targets(samples)
    want_loss = reference_step(reference, samples, targets=targets)
    want = gradients(reference)
    log = OrderLog(rank)
    group = torch.distributed.new_group(range(4))
    executor = StepExecutor(
        Adapter(model), transport=Transport(group, recorder=log), log=log, loss_chunk=16
    )
    for degree in (1, 2, 4):
        model.zero_grad()
        queue = padded_queue(executor, samples, degree=degree)
        result = executor.run(queue, targets=targets)
        assert abs(result.loss - want_loss) < 1e-5 * want_loss, degree
        assert difference(gradients(model), want).worst < 1e-5, degree
    return log


def padded_queue(
    executor: StepExecutor, samples: Sequence[LoadedSample], *, degree: int
) -> tuple[ShardLayout, ...]:
    batches = padded_batches(
        table_of(samples), degree=degree, ranks=4, budget=200, encoder_capacity=200
    )
    lengths = [{len(samples[row].input_ids) for row in batch.rows} for batch in batches]
    assert any(len(found) > 1 for found in lengths), "nothing is padded"
    mine = [batch for batch in batches if executor.rank in batch.ranks]
    queue = tuple(
        lay_out_padded(
            batch,
            dict(enumerate(samples)),
            rank=executor.rank,
            masks=executor.adapter.masks,
            bands=executor.adapter.bands,
        )
        for batch in mine
    )
    media = sum(len(samples[row].units) for batch in mine for row in batch.rows)
    assert sum(len(layout.units) for layout in queue) == media, "each rank encodes all"
    return queue


def test_the_gradient_is_that_of_one_process(tmp_path: Path) -> None:
    run_ranks(check_gradient, 4, tmp_path)
