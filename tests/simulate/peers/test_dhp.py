from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.plan import Sync
from dynapar.simulate import replay
from dynapar.simulate.peers import PeerError, plan_with
from dynapar.simulate.peers.dhp import fewest_ranks, plan, stand
from dynapar.simulate.peers.judge import ask, judge
from tests.samples import table
from tests.simulate.peers.scenes import check_rows, problem_of
from tests.simulate.scenes import random_table


def by_dynamic_program(times: list[list[int]], least: list[int], ranks: int) -> int:
    """The paper's recurrence: the best slowest group over all ways to hand out ranks."""
    never = 1 << 60
    best = [0] + [never] * ranks
    for row, lowest in zip(times, least, strict=True):
        after = [never] * (ranks + 1)
        for used, value in enumerate(best):
            for degree in range(lowest, ranks - used + 1):
                after[used + degree] = min(after[used + degree], max(value, row[degree - 1]))
        best = after
    return min(best)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_bisection_finds_what_the_dynamic_program_finds(data: st.DataObject) -> None:
    """Times may rise and fall with the degree."""
    ranks = data.draw(st.integers(1, 9))
    groups = data.draw(st.integers(1, ranks))
    times = [
        data.draw(st.lists(st.integers(1, 40), min_size=ranks, max_size=ranks))
        for _ in range(groups)
    ]
    least, left = [], ranks - groups
    for _ in range(groups):
        extra = data.draw(st.integers(0, left))
        left -= extra
        least.append(1 + extra)
    degrees, slowest = fewest_ranks(np.array(times), np.array(least), ranks)
    assert int(degrees.sum()) <= ranks
    assert (degrees >= np.array(least)).all()
    assert slowest == max(row[d - 1] for row, d in zip(times, degrees, strict=True))
    assert slowest == by_dynamic_program(times, least, ranks)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.sampled_from([1, 3, 4, 8]))
def test_groups_stand_side_by_side(degrees: list[int], node: int) -> None:
    ranks = -(-sum(degrees) // node) * node
    order, firsts = stand(np.array(degrees), ranks, node)
    assert sorted(order) == list(range(len(degrees)))
    taken = [f + k for g, f in zip(order, firsts, strict=True) for k in range(degrees[g])]
    assert len(taken) == len(set(taken))
    assert max(taken) < ranks


def test_groups_stay_in_their_node_where_idle_ranks_allow() -> None:
    """5 + 3 fill a node, 6 leaves 2 idle, 4 follows in the next: none crosses."""
    degrees = [5, 3, 6, 4]
    order, firsts = stand(np.array(degrees), 24, 8)
    for group, first in zip(order, firsts, strict=True):
        assert first // 8 == (first + degrees[group] - 1) // 8


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["step", "microbatch"]),
    st.sampled_from(["1x4", "2x4", "3x3"]),
    st.integers(1, 40),
)
def test_plans_can_run(seed: int, sync: Sync, cluster: str, count: int) -> None:
    samples = random_table(seed, count, longest=40_000)
    problem = problem_of(samples, cluster, sync)
    made = plan(ask(problem, 0))
    check_rows(made, count)
    assert replay(judge(problem, made)).makespan >= problem.bound()


def test_short_samples_fill_the_slack_of_long_ones() -> None:
    """20,000 tokens take 2 ranks of 16,384 with 12,768 left: the 12,000 go in, the 2,000 do not."""
    problem = problem_of(table([2_000, 20_000, 12_000]), "1x4")
    made = plan(ask(problem, 0))
    assert {frozenset(piece.rows) for piece in made} == {frozenset({0}), frozenset({1, 2})}


def test_a_sample_that_fits_nowhere_is_named() -> None:
    request = ask(problem_of(table([100]), "1x4"), 0)._replace(capacity=20)
    with pytest.raises(PeerError, match=r"^a sample of 100 tokens fits on no number of ranks$"):
        plan(request)


def test_it_runs_in_its_process() -> None:
    problem = problem_of(random_table(2, 30, longest=40_000), "2x4")
    (outcome,) = plan_with("dhp", [problem], cluster=Cluster.parse("2x4"))
    assert outcome.schedule is not None
    assert outcome.seconds > 0
    here = replay(judge(problem, plan(ask(problem, 0)))).makespan
    assert replay(outcome.schedule).makespan == here
