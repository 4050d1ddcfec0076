from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from dynapar.cluster import Cluster
from dynapar.errors import PlanError
from dynapar.plan import Sync
from dynapar.simulate import replay
from dynapar.simulate.padded import fixed_degree
from dynapar.simulate.peers import PeerError, plan_with
from dynapar.simulate.peers.judge import ask, judge
from dynapar.simulate.peers.process import peer
from dynapar.simulate.peers.verl import deal
from tests.samples import table
from tests.simulate.peers.scenes import check_rows, installed, problem_of
from tests.simulate.scenes import config, random_table


def best_partition(work: Sequence[int], parts: int, equal: bool) -> list[list[int]]:
    """The most even deal of all, tried one by one."""
    best: tuple[int, list[list[int]]] | None = None
    for choice in itertools.product(range(parts), repeat=len(work)):
        bins = [[i for i, part in enumerate(choice) if part == b] for b in range(parts)]
        if any(not members for members in bins):
            continue
        if equal and len({len(members) for members in bins}) > 1:
            continue
        fullest = max(sum(work[i] for i in members) for members in bins)
        if best is None or fullest < best[0]:
            best = fullest, bins
    assert best is not None
    return best[1]


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_the_installed_function_deals(sync: Sync) -> None:
    installed("verl")
    samples = random_table(5, 64, longest=30_000)
    problem = problem_of(samples, "2x4", sync)
    plan, _ = peer("verl").ask(ask(problem, 2))
    check_rows(plan, 64)
    rings = [
        {row for piece in plan if piece.ranks[0] == r for row in piece.rows} for r in (0, 2, 4, 6)
    ]
    assert [len(rows) for rows in rings] == [16] * 4
    assert {piece.ranks for piece in plan} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    waves = max(piece.wave for piece in plan) + 1
    assert len(plan) == 4 * waves
    fullest = max(int(samples.llm_tokens[list(rows)].sum()) for rows in rings)
    assert waves >= -(-fullest // (2 * 16_384))
    assert replay(judge(problem, plan)).makespan >= problem.bound()


def test_it_balances_its_own_estimate_of_work() -> None:
    """Four samples, two rings: 24,576 n + n^2 is most even as 9,000 + 1,000 and 6,000 + 5,000."""
    installed("verl")
    problem = problem_of(table([1_000, 5_000, 9_000, 6_000]), "1x2")
    plan, _ = peer("verl").ask(ask(problem, 1))
    assert {piece.rows for piece in plan} == {(0, 2), (1, 3)}


def test_the_degree_with_the_least_total_is_kept() -> None:
    installed("verl")
    cluster = Cluster.parse("2x4")
    problems = [problem_of(random_table(seed, 32, longest=30_000), "2x4") for seed in (1, 2)]
    outcomes = plan_with("verl", problems, cluster=cluster)
    longest = max(int(problem.samples.llm_tokens.max()) for problem in problems)
    least = fixed_degree(longest, capacity=16_384, cluster=cluster)
    totals = {}
    for degree in (d for d in (1, 2, 4, 8) if d >= least):
        plans = [peer("verl").ask(ask(problem, degree))[0] for problem in problems]
        totals[degree] = sum(
            replay(judge(p, plan)).makespan for p, plan in zip(problems, plans, strict=True)
        )
    schedules = [outcome.schedule for outcome in outcomes]
    assert None not in schedules
    assert sum(replay(s).makespan for s in schedules if s is not None) == min(totals.values())
    degrees = {s.degrees for s in schedules if s is not None}
    assert degrees == {(min(totals, key=lambda d: totals[d]),)}


def test_a_run_that_holds_no_longest_sample_cannot_be_planned() -> None:
    installed("verl")
    samples = table([100, 200_000])
    problem = problem_of(samples, "1x8", planner=config("step", capacity=200_000))
    narrow = problem_of(table([100, 200]), "1x8", planner=config("step", capacity=10_000))
    with pytest.raises(PlanError, match="the longest sample has 200,000 tokens"):
        plan_with("verl", [narrow, problem], cluster=Cluster.parse("1x8"))


def test_microbatches_are_added_until_all_fit_and_the_largest_stands_in_the_middle() -> None:
    """60 + 40 and 50 + 30 + 20 keep within 100; within 99 it takes three, 60 + 20 the largest."""
    sizes = [60, 50, 40, 30, 20]
    request = ask(problem_of(table(sizes), "1x1"), 1)
    for capacity in (100, 99):
        plan = deal(request._replace(capacity=capacity), sizes, best_partition)
        sums = [sum(sizes[row] for row in piece.rows) for piece in plan]
        assert max(sums) <= capacity
        assert len(plan) == -(-200 // capacity)
        assert sums[1] == max(sums)


@pytest.mark.parametrize(
    ("samples", "capacity", "message"),
    [
        ([10, 10, 10], 100, r"^3 samples do not divide among 2 rings, which verl deals equally"),
        ([10], 100, r"^1 samples do not divide among 2 rings"),
        (
            [90, 20, 90, 20],
            80,
            r"^no number of microbatches up to 2, one for each sample of a ring",
        ),
    ],
)
def test_what_it_cannot_deal(samples: list[int], capacity: int, message: str) -> None:
    problem = problem_of(table(samples), "1x2")
    request = ask(problem, 1)._replace(capacity=capacity)
    with pytest.raises(PeerError, match=message):
        deal(request, samples, best_partition)


def test_every_sample_alone_is_the_last_resort() -> None:
    sizes = [90, 80, 90, 80]
    request = ask(problem_of(table(sizes), "1x2"), 1)._replace(capacity=95)
    plan = deal(request, sizes, best_partition)
    check_rows(plan, 4)
    assert [(piece.wave, piece.ranks, len(piece.rows)) for piece in plan] == [
        (0, (0,), 1), (0, (1,), 1), (1, (0,), 1), (1, (1,), 1),
    ]  # fmt: skip
