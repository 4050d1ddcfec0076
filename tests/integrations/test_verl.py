"""Balancing and scheduling against what verl's own code does with them."""

from __future__ import annotations

import inspect
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.costs import LinearCosts, load_costs
from dynapar.errors import CostsError, PlanError
from dynapar.integrations import verl as ours
from dynapar.integrations.lengths import model_costs, timed_costs
from tests.integrations import peers

LIMIT = 2048


def fullest(work: list[int], partitions: list[list[int]]) -> int:
    return max(sum(work[row] for row in rows) for rows in partitions)


def best(work: list[int], k: int, *, equal: bool) -> int:
    """The least fullest partition, by trying all."""
    least = sum(work)
    for bins in product(range(k), repeat=len(work)):
        counts = np.bincount(bins, minlength=k)
        if counts.min() == 0 or (equal and counts.max() > counts.min()):
            continue
        least = min(least, int(np.bincount(bins, weights=work, minlength=k).max()))
    return least


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_partitions_are_whole_and_near_the_best(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 3))
    equal = data.draw(st.booleans())
    sizes = st.just(k * data.draw(st.integers(1, 2))) if equal else st.integers(k, 7)
    count = data.draw(sizes)
    work = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    found = ours.get_seqlen_balanced_partitions(work, k, equal)
    assert len(found) == k
    assert all(rows == sorted(rows) and rows for rows in found)
    assert sorted(row for rows in found for row in rows) == list(range(count))
    if equal:
        assert {len(rows) for rows in found} == {count // k}
    assert 3 * fullest(work, found) <= 4 * best(work, k, equal=equal)  # Graham's bound


@pytest.fixture
def real() -> Any:
    with peers.verl() as modules:
        yield modules


@pytest.mark.parametrize("equal", [False, True])
def test_no_fuller_than_verls_own(real: dict[str, ModuleType], equal: bool) -> None:
    theirs = real["seqlen_balancing"]
    shares = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        k = int(rng.integers(2, 17))
        count = k * int(rng.integers(1, 12)) + (0 if equal else int(rng.integers(0, k)))
        lengths = torch.tensor(np.minimum(rng.lognormal(7.6, 1.4, count), 131_072).astype(int) + 1)
        work = theirs.calculate_workload(lengths).tolist()
        expected = theirs.get_seqlen_balanced_partitions(work, k, equal)
        found = ours.get_seqlen_balanced_partitions(work, k_partitions=k, equal_size=equal)
        assert type(found) is type(expected) is list
        assert type(found[0]) is type(expected[0]) is list
        assert type(found[0][0]) is type(expected[0][0]) is int
        shares.append(fullest(work, found) / fullest(work, expected))
    assert max(shares) <= 1.0001
    assert min(shares) < 0.95 if equal else min(shares) <= 1


def test_calls_are_those_of_the_installed_verl(real: dict[str, ModuleType]) -> None:
    theirs = real["seqlen_balancing"]
    names = list(inspect.signature(theirs.get_seqlen_balanced_partitions).parameters)
    assert list(inspect.signature(ours.get_seqlen_balanced_partitions).parameters) == names
    names = list(inspect.signature(theirs.calculate_workload).parameters)
    assert list(inspect.signature(ours.calculate_workload).parameters)[: len(names)] == names
    adapter = real["dynamic_cp_scheduler"]
    names = list(inspect.signature(adapter.get_megatron_dynamic_cp_scheduler_cls).parameters)
    assert list(inspect.signature(ours.get_megatron_dynamic_cp_scheduler_cls).parameters) == names


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_workloads_are_of_the_shape_and_kind_given(kind: str) -> None:
    lengths = torch.tensor([10, 4096, 131_072], dtype=getattr(torch, kind))
    work = ours.calculate_workload(lengths)
    assert work.dtype == lengths.dtype
    linear = 24_576 * 3 / 4 * 6 / 3.5 + 256  # see test_lengths
    exact = [linear * s + s * s for s in (10, 4096, 131_072)]
    assert work.tolist() == pytest.approx(exact, rel=1e-4)
    timed = timed_costs(seconds_per_token=6e-5, seconds_per_square=2e-9)
    assert ours.calculate_workload(np.array([100]), costs=timed).tolist() == [100 * 30_000 + 10_000]


def test_costs_without_attention_are_refused() -> None:
    flat = timed_costs(seconds_per_token=1e-5, seconds_per_square=0)
    with pytest.raises(CostsError, match="have no attention; expected some"):
        ours.calculate_workload(np.array([100]), costs=flat)
    assert flat.linear == LinearCosts(parameters=1.0, flops=6.0 / 1e-5)
    assert load_costs(None) != model_costs(hidden=4096, layers=32)


@pytest.mark.parametrize(
    ("work", "k", "equal", "message"),
    [
        ([1, 2], 3, False, "k_partitions is 3; expected 1 to 2, the number of items, since no"),
        ([1, 2], 0, False, "k_partitions is 0; expected 1 to 2"),
        ([1, 2, 3], 2, True, "3 items cannot be dealt to 2 partitions of equal size; expected a"),
        ([1, -2], 2, False, r"seqlen_list\[1\] is -2.0; expected a finite number, 0 or more"),
        ([1, float("nan")], 2, False, r"seqlen_list\[1\] is nan; expected a finite number"),
    ],
)
def test_what_cannot_be_dealt_is_named(
    work: list[float], k: int, equal: bool, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        ours.get_seqlen_balanced_partitions(work, k, equal)


def test_fractions_and_zeros_are_dealt() -> None:
    assert sorted(ours.get_seqlen_balanced_partitions([0.5, 0.25, 0.25], 2, False)) == [[0], [1, 2]]
    found = ours.get_seqlen_balanced_partitions([0, 0, 0, 0], 4, False)
    assert sorted(found) == [[0], [1], [2], [3]]


class Batch:
    """A batch as verl's adapter reads it."""

    def __init__(self, lengths: list[int]) -> None:
        self.ids = torch.nested.nested_tensor(
            [torch.zeros(length, dtype=torch.long) for length in lengths], layout=torch.jagged
        )
        self.lengths = lengths

    def get(self, name: str, default: object = None) -> object:
        return self.ids if name == "input_ids" else default

    def __len__(self) -> int:
        return len(self.lengths)


class Ranks(SimpleNamespace):
    """A process group."""

    def size(self) -> int:
        return int(self.ranks)

    def rank(self) -> int:
        return int(self.own)


@pytest.mark.parametrize(("dp", "cp"), [(8, 1), (2, 4), (1, 2)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of its nested tensors
def test_verls_own_adapter_runs_the_schedule(
    real: dict[str, ModuleType], dp: int, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks that groups are contiguous, aligned and full; each sample is led once."""
    adapter = real["dynamic_cp_scheduler"]
    monkeypatch.setattr(
        adapter,
        "get_megatron_dynamic_cp_scheduler_cls",
        ours.get_megatron_dynamic_cp_scheduler_cls,
    )
    picked: list[dict[str, Any]] = []
    adapter.tu.index_select_tensor_dict = lambda batch, ids: {"ids": list(ids)}
    adapter.tu.assign_non_tensor_data = lambda batch, key, value: batch.update({key: value})
    rng = np.random.default_rng(dp)
    lengths = np.minimum(rng.lognormal(6.5, 1.3, 60), dp * cp * LIMIT).astype(int) + 1
    batch = Batch(np.minimum(lengths, dp * cp * LIMIT).tolist())
    counts = set()
    for rank in range(dp * cp):
        scheduler = adapter.DynamicCPScheduler(LIMIT, dp_size=dp, cp_size=cp)
        group = Ranks(ranks=dp * cp, own=rank)
        microbatches = scheduler.schedule(batch, group, tp_size=1)
        counts.add(len(microbatches))
        picked += microbatches
    assert len(counts) == 1
    leaders = [each for each in picked if each[adapter.DCP_GROUP_LEADER]]
    assert sorted(row for each in leaders for row in each["ids"]) == list(range(60))
