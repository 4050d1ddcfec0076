from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.plan import Sync
from dynapar.planner import PlannerConfig
from dynapar.planner.problem import Problem, make_problem
from dynapar.simulate import replay
from dynapar.simulate.padded import fixed_degree, padded_batches, padded_schedule
from tests.samples import table
from tests.simulate.scenes import COSTS, config, random_table


def problem_of(samples: SampleTable, cluster: str, planner: PlannerConfig) -> Problem:
    return make_problem(
        samples, step=0, cluster=Cluster.parse(cluster), costs=COSTS, config=planner
    )


@pytest.mark.parametrize(
    ("longest", "cluster", "degree"),
    [
        (1000, "1x8", 1),
        (1001, "1x8", 2),
        (2000, "1x8", 2),
        (2001, "1x8", 4),
        (4001, "1x8", 8),
        (8001, "2x8", 16),
        (2001, "1x6", 3),
    ],
)
def test_the_fixed_degree_is_the_least_that_divides(
    longest: int, cluster: str, degree: int
) -> None:
    assert fixed_degree(longest, capacity=1000, cluster=Cluster.parse(cluster)) == degree


def test_a_sample_too_long_for_all_ranks_is_named() -> None:
    with pytest.raises(PlanError, match=r"has 8,001 tokens, cluster 1x8 holds 8,000; expected"):
        fixed_degree(8001, capacity=1000, cluster=Cluster.parse("1x8"))


def test_batches_of_like_length_side_by_side() -> None:
    samples = table([100, 900, 300, 400, 500, 200])
    batches = padded_batches(samples, degree=1, ranks=2, budget=1000, encoder_capacity=10)
    assert [(b.first, b.rows, b.length, b.round) for b in batches] == [
        (0, (1,), 900, 0),
        (1, (4, 3), 500, 0),
        (1, (2, 5), 300, 1),
        (0, (0,), 100, 1),
    ]


def test_samples_are_left_for_the_rings_to_come() -> None:
    samples = table([10] * 7)
    batches = padded_batches(samples, degree=1, ranks=3, budget=1000, encoder_capacity=10)
    assert [len(b.rows) for b in batches] == [3, 2, 2]


def test_a_sample_above_the_budget_goes_alone() -> None:
    samples = table([900, 900, 10, 10])
    batches = padded_batches(samples, degree=2, ranks=2, budget=100, encoder_capacity=10)
    assert [b.rows for b in batches] == [(0,), (1,), (2, 3)]


def test_a_rank_encodes_all_of_its_rings_batch_within_its_capacity() -> None:
    samples = table([100] * 4, [[6], [6], [6], [6, 6]])
    batches = padded_batches(samples, degree=2, ranks=2, budget=1000, encoder_capacity=13)
    assert [b.rows for b in batches] == [(0, 1), (2,), (3,)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 50), st.sampled_from([1, 2, 4, 8]))
def test_every_sample_is_in_one_batch_that_fits(seed: int, count: int, degree: int) -> None:
    samples = random_table(seed, count)
    batches = padded_batches(
        samples, degree=degree, ranks=8, budget=16_384, encoder_capacity=20_000
    )
    assert sorted(row for batch in batches for row in batch.rows) == list(range(count))
    for batch in batches:
        rows = list(batch.rows)
        assert batch.length == samples.llm_tokens[rows].max()
        assert len(rows) * batch.length <= 16_384 * degree
        assert len(rows) == 1 or samples.encoder_tokens[rows].sum() <= 20_000
    assert len({(batch.first, batch.round) for batch in batches}) == len(batches)


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_padding_and_repeated_encoding_are_paid_for(sync: Sync) -> None:
    """By hand, in seconds: 3 samples on one ring of 2; the two short ones make one batch."""
    samples = table([3000, 1000, 800], [[], [1025, 1025], [784]])
    problem = problem_of(samples, "1x2", config(sync, capacity=1600))
    schedule = padded_schedule(problem, degree=2)

    def seconds(length: int, count: int, units: list[int]) -> tuple[float, float]:
        rank = length / 2
        tokens = rank * count
        linear = 6 * 6.5e9 * tokens / (400e12 * tokens / (tokens + 64))
        attention = 3.5 * 2 * 28 * 3584 * length**2 / 2 / (300e12 * rank / (rank + 256))
        exposed = 3 * 0.75 * 2048 * rank / 200e9 - attention / (28 * 2)
        exchange = 28 * max(0.0, exposed)
        encoder = sum((6 * 0.3e9 * p + 3.5 * 4 * 24 * 1024 * p**2) / 2.2e14 for p in units)
        return linear + count * (attention + exchange) + 28 * 10e-6 + 0.030, encoder

    one, two = seconds(3000, 1, []), seconds(1000, 2, [784, 1025, 1025])
    if sync == "step":
        expected = sum(one) + sum(two)
    else:
        expected = max(one[0], 0.78) + max(two[0], 0.78) + max(two[1], 0.036)
    assert replay(schedule).makespan / 1e6 == pytest.approx(expected, abs=1e-5)
    assert (schedule.tokens, schedule.computed_tokens) == (4800, 5000)
    assert schedule.loads.encoder_tokens.tolist() == [0, 0, 2834, 2834]
    encoder = schedule.loads.parts[:, 3].tolist()
    assert encoder == [0, 0, encoder[2], encoder[2]]
    assert encoder[2] / 1e6 == pytest.approx(two[1], abs=2e-6)
    assert schedule.loads.ticks.max() / 1e6 == pytest.approx(max(map(sum, (one, two))), abs=1e-5)
