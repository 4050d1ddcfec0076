from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.data.sampler import Sampler, permute
from dynapar.errors import CheckpointError, ConfigError

numbers = st.integers(1, 60)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutations_hold_every_place_once(size: int, key: int) -> None:
    places = permute(np.arange(size), size, key)
    assert np.array_equal(np.sort(places), np.arange(size))


@settings(max_examples=60)
@given(
    samples=numbers,
    batch=numbers,
    seed=st.integers(0, 9),
    block=st.integers(1, 40),
    window=st.integers(1, 5),
)
def test_every_epoch_holds_every_sample_once(
    samples: int, batch: int, seed: int, block: int, window: int
) -> None:
    sampler = Sampler(samples, global_batch=batch, seed=seed, block=block, window=window)
    steps = -(-3 * samples // batch)
    rows = np.concatenate([sampler.rows(step) for step in range(steps)])
    for epoch in range(3):
        part = rows[epoch * samples : (epoch + 1) * samples]
        assert np.array_equal(np.sort(part), np.arange(samples))


@settings(max_examples=60)
@given(
    samples=numbers,
    batch=numbers,
    other=numbers,
    stop=st.integers(0, 20),
    again=st.integers(0, 20),
    block=st.sampled_from([1, 7]),
)
def test_a_resumed_run_goes_on_where_it_stopped(
    samples: int, batch: int, other: int, stop: int, again: int, block: int
) -> None:
    """Also twice, and with another global batch: the stream of samples is the unbroken one."""
    whole = Sampler(samples, global_batch=1, seed=4, block=block)
    first = Sampler(samples, global_batch=batch, seed=4, block=block)
    second = Sampler(samples, global_batch=other, seed=4, block=block)
    second.load_state_dict(first.state_dict(stop))
    third = Sampler(samples, global_batch=batch, seed=4, block=block)
    third.load_state_dict(second.state_dict(stop + again))
    taken = stop * batch + again * other
    expected = [int(whole.rows(taken + n)[0]) for n in range(batch)]
    assert third.rows(stop + again).tolist() == expected


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = {
        tuple(Sampler(50, global_batch=50, seed=seed).rows(epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_a_full_shuffle_is_spread_evenly() -> None:
    """Each sample stands at each place of the order about equally often."""
    counts = np.zeros((16, 16))
    sampler = Sampler(16, global_batch=16, seed=0)
    for epoch in range(2000):
        counts[np.arange(16), sampler.rows(epoch)] += 1
    expected = 2000 / 16
    assert ((counts - expected) ** 2 / expected).sum() < 225 + 6 * np.sqrt(2 * 225)


def test_blocks_stay_near_each_other() -> None:
    sampler = Sampler(10_000, global_batch=160, seed=1, block=10, window=16)
    for step in range(0, 60, 7):
        assert len(np.unique(sampler.rows(step) // 10)) == 16
    assert not np.array_equal(sampler.rows(0), np.sort(sampler.rows(0)))


def test_without_shuffling_the_order_is_the_sources() -> None:
    sampler = Sampler(5, global_batch=3, seed=0, shuffle=False)
    assert np.concatenate([sampler.rows(0), sampler.rows(1)]).tolist() == [0, 1, 2, 3, 4, 0]


def test_any_step_is_reached_at_once() -> None:
    sampler = Sampler(10**12, global_batch=8, seed=3)
    rows = sampler.rows(10**11)
    assert len(set(rows.tolist())) == 8
    assert rows.min() >= 0
    assert rows.max() < 10**12


def test_the_state_is_small_and_free_of_ranks() -> None:
    sampler = Sampler(10, global_batch=4, seed=7)
    assert sampler.state_dict(3) == {
        "step": 3, "epoch": 1, "cursor": 2, "seed": 7, "samples": 10, "block": 1, "window": 16,
        "shuffle": True,
    }  # fmt: skip


@pytest.mark.parametrize("key", ["seed", "samples", "block"])
def test_states_of_other_orders_are_refused(key: str) -> None:
    state = Sampler(10, global_batch=4, seed=7).state_dict(3)
    with pytest.raises(
        CheckpointError, match=rf"has {key} {state[key] + 1}, this run's {state[key]}"
    ):
        Sampler(10, global_batch=4, seed=7).load_state_dict(state | {key: state[key] + 1})
    with pytest.raises(CheckpointError, match=rf"has {key} None"):
        Sampler(10, global_batch=4, seed=7).load_state_dict(state | {key: None})


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match="global_batch is 0; expected 1 or more"):
        Sampler(10, global_batch=0, seed=0)
    sampler = Sampler(10, global_batch=4, seed=0)
    sampler.load_state_dict(sampler.state_dict(5))
    with pytest.raises(ConfigError, match="step 4 lies before step 5"):
        sampler.rows(4)
