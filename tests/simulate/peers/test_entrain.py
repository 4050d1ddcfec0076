from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.packing.ticks import sample_columns
from dynapar.plan import Sync
from dynapar.simulate import replay
from dynapar.simulate.peers import PeerError, plan_with
from dynapar.simulate.peers.entrain import plan
from dynapar.simulate.peers.judge import ask, judge
from tests.samples import table
from tests.simulate.peers.scenes import check_rows, problem_of
from tests.simulate.scenes import random_table


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["step", "microbatch"]),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 40),
)
def test_plans_can_run_at_one_degree(seed: int, sync: Sync, degree: int, count: int) -> None:
    samples = random_table(seed, count, longest=30_000)
    problem = problem_of(samples, "2x4", sync)
    made = plan(ask(problem, degree))
    check_rows(made, count)
    assert {len(piece.ranks) for piece in made} == {degree}
    assert replay(judge(problem, made)).makespan >= problem.bound()


def test_the_encoders_work_is_made_even_first() -> None:
    """Four equal images and no text: two for each rank, whatever their LLM tokens."""
    samples = table([100] * 4, [[1_000]] * 4)
    made = plan(ask(problem_of(samples, "1x2"), 1))
    assert sorted(len(piece.rows) for piece in made) == [2, 2]


def test_excess_llm_work_is_deferred() -> None:
    """By the encoder alone 900 + 100 and 500 + 480 run together, and so both long texts."""
    samples = table([6_000, 500, 500, 6_000], [[900], [500], [480], [100]])
    problem = problem_of(samples, "1x2")
    made = plan(ask(problem, 1))
    assert sorted(0 in piece.rows and 3 in piece.rows for piece in made) == [False, False]
    work = sample_columns(samples.llm_tokens, 1, problem.constants).sum(axis=1)
    loads = [int(work[list(piece.rows)].sum()) for piece in made]
    assert max(loads) - min(loads) <= 2 * int(work.min())


def test_more_microbatches_where_the_fewest_do_not_hold_all() -> None:
    """Three samples of 60 and capacity 100 on one rank: 180 would fit two by their sum alone."""
    request = ask(problem_of(table([60] * 3), "1x1"), 1)._replace(capacity=100)
    assert [len(piece.rows) for piece in plan(request)] == [1, 1, 1]


def test_what_fits_nowhere_is_said() -> None:
    request = ask(problem_of(table([60] * 3), "1x1"), 1)._replace(capacity=50)
    with pytest.raises(PeerError, match=r"^no number of microbatches up to 3|4 keeps within"):
        plan(request)


def test_it_runs_in_its_process_at_the_best_degree() -> None:
    cluster = Cluster.parse("2x4")
    problem = problem_of(random_table(2, 30, longest=16_000), "2x4")
    (outcome,) = plan_with("entrain", [problem], cluster=cluster)
    totals = [replay(judge(problem, plan(ask(problem, d)))).makespan for d in (1, 2, 4, 8)]
    assert outcome.schedule is not None
    assert replay(outcome.schedule).makespan == min(totals)
