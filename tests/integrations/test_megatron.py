"""The schedulers' results against what Megatron's own code does with them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.costs import Costs, coefficients, load_costs
from dynapar.errors import ConfigError, PlanError, SampleError
from dynapar.integrations.lengths import model_costs
from dynapar.integrations.megatron import (
    BalancedCPScheduler,
    DefaultDynamicCPScheduler,
    PerRank,
    get_groups_and_subsamples,
)
from dynapar.packing.ticks import sample_ticks
from tests.integrations.peers import megatron

LIMIT = 2048


class Ranks:
    """A process group, as far as a scheduler looks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def group_sizes(ranks: int) -> set[int]:
    """Sizes of the groups that Megatron makes: powers of two below half, and all ranks."""
    sizes, size = {1, ranks}, 2
    while 2 * size <= ranks:
        sizes.add(size)
        size *= 2
    return {s for s in sizes if s == ranks or 2 * s <= ranks}


def members(group: PerRank) -> dict[int, list[int]]:
    """The ranks that list each sample."""
    found: dict[int, list[int]] = {}
    for rank, ids in enumerate(group):
        for each in ids:
            found.setdefault(each, []).append(rank)
    return found


def can_run(groups: Sequence[PerRank], samples: Sequence[tuple[int, int]], ranks: int) -> None:
    """What Megatron's loop takes for granted of a schedule."""
    seen: list[int] = []
    lengths = dict(samples)
    for group in groups:
        assert len(group) == ranks
        assert all(group)
        for sample, own in members(group).items():
            seen.append(sample)
            # The loop asks for "the group of this size": it must be these ranks.
            assert len(own) in group_sizes(ranks)
            assert own == list(range(own[0], own[0] + len(own)))
            assert own[0] % len(own) == 0
            assert -(-lengths[sample] // len(own)) <= LIMIT
            # They run all of their samples together, in one order.
            assert all(group[rank] == group[own[0]] for rank in own)
    assert sorted(seen) == sorted(lengths)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    ranks = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16]))
    sizes = group_sizes(ranks) - ({ranks} if ranks & (ranks - 1) else set())
    padding = 2 * ranks  # as Megatron pads
    longest = LIMIT * max(sizes | {1}) // padding
    lengths = draw(
        st.lists(
            st.integers(1, longest).map(lambda length: length * padding),
            min_size=ranks,
            max_size=4 * ranks,
        )
    )
    ids = draw(st.permutations(range(100, 100 + len(lengths))))
    return ranks, list(zip(ids, lengths, strict=True))


@settings(max_examples=60, deadline=None)
@given(batches())
def test_schedules_can_be_run(batch: tuple[int, list[tuple[int, int]]]) -> None:
    ranks, samples = batch
    scheduler = BalancedCPScheduler(LIMIT, Ranks(ranks))
    lengths, ids = scheduler.get_groups_and_subsamples(samples, None)
    can_run(ids, samples, ranks)
    known = dict(samples)
    assert lengths == [[[known[each] for each in own] for own in group] for group in ids]
    packed = DefaultDynamicCPScheduler(LIMIT, 1, ranks).get_groups_and_subsamples(samples)
    can_run(packed, samples, ranks)
    for group in packed:
        own = members(group)
        for rank in range(ranks):
            assert sum(known[each] // len(own[each]) for each in group[rank]) <= LIMIT


def drawn(ranks: int, count: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(count)
    lengths = np.minimum(rng.lognormal(np.log(600), 1.4, count), ranks * LIMIT).astype(int) + 16
    return list(enumerate(np.minimum(lengths, ranks * LIMIT).tolist()))


def seconds(groups: Sequence[PerRank], samples: Sequence[tuple[int, int]], costs: Costs) -> float:
    """Time of a schedule with a barrier after each group, by costs that both are judged with."""
    known, total = coefficients(costs, ranks_per_node=64), 0
    lengths = dict(samples)
    for group in groups:
        own = members(group)
        total += max(
            sum(sum(sample_ticks(lengths[each], len(own[each]), known)) for each in ids)
            for ids in group
        )
    return total / 1e6


@pytest.mark.parametrize(("ranks", "count"), [(8, 40), (8, 200), (32, 64), (32, 300)])
def test_it_gives_what_megatron_gives_and_sooner(ranks: int, count: int) -> None:
    """The same kinds, nested alike; both in form; ours within half a percent, or ahead."""
    module = megatron("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    samples = drawn(ranks, count)
    theirs = module.BalancedCPScheduler(LIMIT, Ranks(ranks))
    expected = theirs.get_groups_and_subsamples(samples, None)
    found = BalancedCPScheduler(LIMIT, Ranks(ranks)).get_groups_and_subsamples(samples, None)
    for one, other in zip(expected, found, strict=True):
        assert type(one) is type(other) is list
        assert type(one[0]) is type(other[0]) is list
        assert type(one[0][0]) is type(other[0][0]) is list
        assert type(one[0][0][0]) is type(other[0][0][0]) is int
        assert len(one[0]) == len(other[0]) == ranks
    can_run(found[1], samples, ranks)
    costs = model_costs(hidden=4096, layers=32)
    ours, real = seconds(found[1], samples, costs), seconds(expected[1], samples, costs)
    assert ours <= 1.005 * real


def test_groups_are_aligned_where_others_would_be_sooner() -> None:
    """Of these batches the third's best plan has a ring of ranks 2 to 5."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(4, 24))
        lengths = np.minimum(rng.lognormal(np.log(900), 1.2, count), 8 * LIMIT - 64).astype(int)
        samples = list(enumerate((lengths + 16).tolist()))
        can_run(
            BalancedCPScheduler(LIMIT, Ranks(8)).get_groups_and_subsamples(samples, None)[1],
            samples,
            8,
        )


def test_the_batch_that_breaks_megatrons_own_groups() -> None:
    """Its own puts the 201 tokens on ranks 2 to 5, where it has no group."""
    lengths = [400, 400, 201, 200, 200, 200, 200, 101, 50]
    samples = list(enumerate(lengths))
    scheduler = BalancedCPScheduler(100, Ranks(8))
    for group in scheduler.get_groups_and_subsamples(samples, None)[1]:
        for own in members(group).values():
            assert own == list(range(own[0], own[0] + len(own)))
            assert own[0] % len(own) == 0


def test_calls_are_those_of_the_installed_megatron() -> None:
    module = megatron("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    theirs = module.BalancedCPScheduler
    constructor = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(BalancedCPScheduler).parameters)[: len(constructor)] == (
        constructor
    )
    assert list(inspect.signature(theirs.get_groups_and_subsamples).parameters) == list(
        inspect.signature(BalancedCPScheduler.get_groups_and_subsamples).parameters
    )
    inspect.signature(BalancedCPScheduler).bind(max_seq_len_per_rank=5, dp_cp_group=Ranks(2))
    # What the loader's wrapper calls, where it looks the name up.
    schedule = megatron("megatron.core.datasets.data_schedule")
    assert schedule.BalancedCPScheduler is theirs
    source = inspect.getsource(schedule.HybridCPDataLoaderWrapper)
    assert "cp_balancing_scheduler.get_groups_and_subsamples(" in source
    assert "max_seq_len_per_rank=" in source


def test_groups_of_megatron_are_counted_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """`group_sizes` above, against the code that makes them."""
    state = megatron("megatron.core.parallel_state")
    for ranks in (2, 4, 6, 8, 12, 16, 24):
        made: list[list[int]] = []
        monkeypatch.setattr(state, "create_group", lambda own, made=made, **_: made.append(own))
        state.create_hybrid_dp_cp_groups(0, list(range(ranks)), None)
        full = {len(own) for own in made if own[0] == 0}
        assert full | {1, ranks} == group_sizes(ranks)


def test_width_and_depth_are_read_from_megatrons_configuration() -> None:
    samples = [(row, 1900 - 90 * row) for row in range(16)]
    seen = []
    for hidden in (64, 16_384):
        scheduler = BalancedCPScheduler(LIMIT, Ranks(8))
        config = SimpleNamespace(hidden_size=hidden, num_layers=8)
        seen.append(scheduler.get_groups_and_subsamples(samples, config)[1])
    assert seen[0] != seen[1]
    fixed = BalancedCPScheduler(
        LIMIT, Ranks(8), costs=model_costs(hidden=64, layers=8), ranks_per_node=4
    )
    assert fixed.get_groups_and_subsamples(samples, config)[1] != seen[1]


def test_nothing_gives_nothing() -> None:
    assert BalancedCPScheduler(LIMIT, Ranks(4)).get_groups_and_subsamples([], None) == ([], [])
    assert DefaultDynamicCPScheduler(LIMIT, 2, 2).get_groups_and_subsamples([]) == []


def test_it_is_a_method_of_megatrons_class() -> None:
    """Of one with more attributes than dynapar reads."""
    theirs = type("Theirs", (), {"get_groups_and_subsamples": get_groups_and_subsamples})
    scheduler = theirs()
    vars(scheduler).update(
        max_seqlen_per_dp_cp_rank=LIMIT, cp_size=2, dp_size=4, max_num_seqs=None, min_cp_size=1,
        microbatch_group_size_per_vp_stage=None, is_dynamic_cp=True,
    )  # fmt: skip
    samples = drawn(8, 30)
    can_run(scheduler.get_groups_and_subsamples(samples), samples, 8)
    scheduler.min_cp_size = 2
    with pytest.raises(ConfigError) as caught:
        scheduler.get_groups_and_subsamples(samples)
    assert str(caught.value) == (
        "min_cp_size is 2; expected 1, since dynapar cannot keep to it. Leave it out, or keep "
        "Megatron's own scheduler"
    )


@pytest.mark.parametrize(
    ("samples", "ranks", "kind", "message"),
    [
        ([(7, 0)], 4, SampleError, "lengths\\[0\\] is 0; expected the tokens of a sample"),
        ([(7, 9000)], 4, PlanError, "'0' has 9,000 tokens; 4 ranks x capacity 2,048 hold 8,192"),
        ([(7, 5000)], 6, PlanError, "2 ranks \\(max_degree 2, degrees 'pow2'\\) x capacity 2,048"),
        ([(7, 20)], 6, PlanError, "equal_counts: no way was found in which 1 samples keep all 6"),
    ],
)
def test_what_cannot_be_scheduled_is_named(
    samples: list[tuple[int, int]], ranks: int, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        BalancedCPScheduler(LIMIT, Ranks(ranks)).get_groups_and_subsamples(samples, None)
    with pytest.raises(kind, match=message):
        DefaultDynamicCPScheduler(LIMIT, ranks, 1).get_groups_and_subsamples(samples)


def test_ranks_that_are_no_whole_nodes() -> None:
    with pytest.raises(ConfigError, match=r"6 ranks .* are not whole nodes of 4; give the ranks"):
        BalancedCPScheduler(LIMIT, Ranks(6), ranks_per_node=4)


def test_the_shipped_costs_have_what_is_scaled() -> None:
    assert load_costs(None).attention.hidden > 0
