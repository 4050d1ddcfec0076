from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.data.grouped import GroupSampler
from dynapar.data.sampler import Sampler
from dynapar.errors import CheckpointError, ConfigError

names = st.lists(st.sampled_from(["", "", "a", "b", "c", "d"]), min_size=1, max_size=40)


def runs(sampler: GroupSampler, first: int, steps: int) -> list[list[int]]:
    return [sampler.rows(step).tolist() for step in range(first, first + steps)]


@settings(max_examples=80)
@given(names, st.integers(1, 12), st.integers(0, 5), st.booleans(), st.sampled_from([1, 3]))
def test_every_epoch_holds_every_sample_once_and_groups_stay_together(
    prefixes: list[str], batch: int, seed: int, shuffle: bool, block: int
) -> None:
    sampler = GroupSampler(
        prefixes, global_batch=batch, seed=seed, shuffle=shuffle, block=block, window=2
    )
    steps: list[list[int]] = []
    taken = 0
    while taken < 3 * len(prefixes):
        steps.append(sampler.rows(len(steps)).tolist())
        taken += len(steps[-1])
        assert 1 <= len(steps[-1]) <= batch
    rows = [row for step in steps for row in step]
    for epoch in range(3):
        part = rows[epoch * len(prefixes) : (epoch + 1) * len(prefixes)]
        assert sorted(part) == list(range(len(prefixes)))
    step_of: dict[int, int] = {}
    for number, step in enumerate(steps):
        for row in step:
            step_of.setdefault(row, number)
    for name in set(prefixes) - {""}:
        own = [row for row, prefix in enumerate(prefixes) if prefix == name]
        parts = [own[k : k + batch] for k in range(0, len(own), batch)]
        assert all(len({step_of[row] for row in part}) == 1 for part in parts), (name, steps)


@settings(max_examples=60)
@given(names, st.integers(6, 12), st.integers(0, 20), st.integers(0, 20))
def test_a_resumed_run_goes_on_where_it_stopped(
    prefixes: list[str], batch: int, stop: int, again: int
) -> None:
    """Also twice, by a sampler that never saw the steps before."""
    whole = GroupSampler(prefixes, global_batch=batch, seed=2)
    second = GroupSampler(prefixes, global_batch=batch, seed=2)
    second.load_state_dict(whole.state_dict(stop))
    third = GroupSampler(prefixes, global_batch=batch, seed=2)
    third.load_state_dict({**second.state_dict(stop + again), "drawn": 7, "stubs": 0})
    assert third.state_dict(stop + again) == whole.state_dict(stop + again)
    assert runs(third, stop + again, 5) == runs(whole, stop + again, 5)
    assert third.epoch(stop + again) == whole.epoch(stop + again)


def test_another_global_batch_goes_on_in_the_same_order() -> None:
    prefixes = ["a", "", "b", "a", "b", "", "c", "c", "c", ""]
    first = GroupSampler(prefixes, global_batch=4, seed=1)
    second = GroupSampler(prefixes, global_batch=7, seed=1)
    second.load_state_dict(first.state_dict(2))
    before = [row for step in runs(first, 0, 2) for row in step]
    after = [row for step in runs(second, 2, 9) for row in step]
    whole = [
        row for step in runs(GroupSampler(prefixes, global_batch=4, seed=1), 0, 9) for row in step
    ]
    count = min(len(before) + len(after), len(whole))
    assert (before + after)[:count] == whole[:count]


def test_without_a_shuffle_groups_stand_where_their_first_samples_do() -> None:
    prefixes = ["a", "", "b", "a", "b", "", "a"]
    sampler = GroupSampler(prefixes, global_batch=4, seed=0, shuffle=False)
    assert runs(sampler, 0, 4) == [[0, 3, 6, 1], [2, 4, 5], [0, 3, 6, 1], [2, 4, 5]]
    cut = GroupSampler(prefixes, global_batch=2, seed=0, shuffle=False)
    assert runs(cut, 0, 4) == [[0, 3], [1], [2, 4], [5, 6]]


def test_samples_that_share_nothing_are_dealt_as_without_groups() -> None:
    one, other = (
        GroupSampler([""] * 50, global_batch=8, seed=3),
        Sampler(50, global_batch=8, seed=3),
    )
    for step in range(20):
        np.testing.assert_array_equal(one.rows(step), other.rows(step))


def test_states_of_another_order_are_refused() -> None:
    grouped = GroupSampler(["a", "a", "", "b"], global_batch=3, seed=0)
    plain = Sampler(4, global_batch=3, seed=0)
    with pytest.raises(CheckpointError) as caught:
        grouped.load_state_dict(plain.state_dict(1))
    assert str(caught.value) == (
        "the checkpoint's order of groups is of None samples, this run's of 4; expected equal "
        "ones. Resume with the first run's group_by and index."
    )
    with pytest.raises(CheckpointError) as caught:
        plain.load_state_dict(grouped.state_dict(1))
    assert str(caught.value) == (
        "the checkpoint's order of samples is one of groups; this run has no group_by. Resume "
        "with group_by: prefix, as the first run"
    )
    cut = GroupSampler(["a", "a", "", "b"], global_batch=1, seed=0)
    with pytest.raises(CheckpointError, match="has samples 3, this run's 4; expected equal ones"):
        cut.load_state_dict(grouped.state_dict(1))


@pytest.mark.parametrize(
    ("prefixes", "batch", "message"),
    [
        (["a"], 0, "GroupSampler: global_batch is 0; expected 1 or more"),
        ([], 3, "Sampler: samples is 0; expected 1 or more"),
    ],
)
def test_numbers_out_of_range_are_named(prefixes: Sequence[str], batch: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GroupSampler(prefixes, global_batch=batch, seed=0)
    assert str(caught.value) == message


def test_steps_before_the_state_are_refused() -> None:
    sampler = GroupSampler(["a", "a", ""], global_batch=2, seed=0)
    sampler.load_state_dict(sampler.state_dict(3))
    with pytest.raises(ConfigError, match="step 2 lies before step 3, where this run starts"):
        sampler.rows(2)
