"""The common layout deals every sample once, fits, and gives the same gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynapar.attention.exchange import Transport
from dynapar.bench.baselines import (
    PaddedBatch,
    fixed_degree,
    lay_out_padded,
    pad_sample,
    padded_batches,
)
from dynapar.data.samples import IGNORE, TEXT_KIND, LoadedSample
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.layout import ShardLayout
from dynapar.runtime.order import OrderLog
from dynapar.runtime.reference import count_targets, reference_step
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


def table(lengths: Sequence[int], encoder: Sequence[int]) -> SampleTable:
    """Samples of one encoder unit each, or of none where it has 0 tokens."""
    n = len(lengths)
    units = [tokens for tokens in encoder if tokens]
    return SampleTable(
        ids=tuple(f"s{i}" for i in range(n)),
        llm_tokens=np.array(lengths, np.int64),
        text_tokens=np.array(lengths, np.int64),
        label_tokens=np.zeros(n, np.int64),
        modalities=np.zeros(n, np.uint8),
        unit_offsets=np.cumsum([0, *(tokens > 0 for tokens in encoder)], dtype=np.int64),
        unit_tokens=np.array(units, np.int64),
    )


@pytest.mark.parametrize(
    ("longest", "ranks", "degree"), [(100, 4, 1), (101, 4, 2), (201, 4, 4), (201, 6, 3)]
)
def test_the_fixed_degree_is_the_least_that_divides_the_ranks(
    longest: int, ranks: int, degree: int
) -> None:
    assert fixed_degree(longest, capacity=100, ranks=ranks) == degree


def test_too_long_a_sample_is_refused() -> None:
    message = r"has 401 tokens, 4 ranks hold 400; expected it to fit\. Raise capacity"
    with pytest.raises(PlanError, match=message):
        fixed_degree(401, capacity=100, ranks=4)


def test_a_step_by_hand() -> None:
    """Two rings of two ranks; 200 tokens fit on a ring."""
    found = padded_batches(
        table([10, 180, 40, 90, 100, 30], [0, 8, 0, 8, 0, 8]),
        degree=2,
        ranks=4,
        capacity=100,
        encoder_capacity=10,
    )
    assert found == (
        PaddedBatch((0, 1), (1,), 180),
        PaddedBatch((2, 3), (4,), 100),
        PaddedBatch((0, 1), (3,), 90),
        PaddedBatch((2, 3), (2,), 40),
        PaddedBatch((0, 1), (5,), 30),
        PaddedBatch((2, 3), (0,), 10),
    )


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 50)), min_size=1, max_size=40),
    st.sampled_from([1, 2, 4]),
)
def test_every_sample_is_dealt_once_and_fits(sizes: list[tuple[int, int]], degree: int) -> None:
    lengths, encoder = [s[0] for s in sizes], [s[1] for s in sizes]
    samples = table(lengths, encoder)
    found = padded_batches(samples, degree=degree, ranks=4, capacity=100, encoder_capacity=60)
    assert sorted(row for batch in found for row in batch.rows) == list(range(len(sizes)))
    for batch in found:
        assert batch.length == max(lengths[row] for row in batch.rows)
        if len(batch.rows) > 1:
            assert batch.length * len(batch.rows) <= 100 * degree
            assert sum(encoder[row] for row in batch.rows) <= 60
    rings = {batch.ranks for batch in found}
    assert rings <= {tuple(range(k, k + degree)) for k in range(0, 4, degree)}


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
        table_of(samples), degree=degree, ranks=4, capacity=200, encoder_capacity=200
    )
    lengths = [{len(samples[row].input_ids) for row in batch.rows} for batch in batches]
    assert any(len(found) > 1 for found in lengths), "nothing is padded"
    mine = [batch for batch in batches if executor.rank in batch.ranks]
    queue = tuple(
        lay_out_padded(
            batch,
            dict(enumerate(samples)),
            rank=executor.rank,
            windows=executor.adapter.windows,
            bands=executor.adapter.bands,
        )
        for batch in mine
    )
    media = sum(len(samples[row].units) for batch in mine for row in batch.rows)
    assert sum(len(layout.units) for layout in queue) == media, "each rank encodes all"
    return queue


def test_the_gradient_is_that_of_one_process(tmp_path: Path) -> None:
    run_ranks(check_gradient, 4, tmp_path)
