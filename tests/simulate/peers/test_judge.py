from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.packing.ticks import latency_ticks, sample_ticks
from dynapar.plan import Sync
from dynapar.planner.differencing import microbatch_rows
from dynapar.planner.homogeneous import best_homogeneous
from dynapar.simulate import replay
from dynapar.simulate.peers import PeerError
from dynapar.simulate.peers.judge import judge
from dynapar.simulate.peers.request import Piece, Plan
from tests.samples import table
from tests.simulate.oracle import simulate
from tests.simulate.peers.scenes import problem_of
from tests.simulate.scenes import config, random_table


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["step", "microbatch"]))
def test_a_plan_of_ours_is_worth_what_we_say(seed: int, sync: Sync) -> None:
    """A homogeneous layout, read as if a peer had made it; its units are placed anew."""
    samples = random_table(seed, seed % 30 + 1)
    problem = problem_of(samples, "2x4", sync)
    _, found = best_homogeneous(problem, problem.bound())
    layout = found[0].layout
    degrees = layout.sample_degree[layout.order[layout.offsets[:-1]]]
    plan = [
        Piece(int(wave), tuple(range(int(first), int(first + width))), tuple(rows))
        for first, width, wave, rows in zip(
            layout.first, degrees, layout.wave, microbatch_rows(layout), strict=True
        )
    ]
    if sync == "step":
        plan = [piece._replace(wave=number) for number, piece in enumerate(plan)]
    schedule = judge(problem, plan)
    assert schedule.layout.order.tolist() == layout.order.tolist()
    assert replay(schedule).makespan == found[0].makespan
    own, shared = [1.0] * schedule.ranks, [1.0] * len(layout.first)
    assert simulate(schedule, own, shared)[0] == found[0].makespan


def test_a_group_that_reaches_into_the_next_node_pays_for_it() -> None:
    """600 tokens on ranks 3 and 4 of 2x4, worked out from the formulas across nodes."""
    problem = problem_of(table([600]), "2x4")
    constants = problem.constants
    inside, reaching = (judge(problem, [Piece(0, (r, r + 1), (0,))]) for r in (2, 3))
    once = constants.fixed + constants.linear_rank + latency_ticks(2, constants)
    assert replay(inside).makespan == once + sum(sample_ticks(600, 2, constants))
    across = constants._replace(wire_in_node=constants.wire_across)
    assert replay(reaching).makespan == once + sum(sample_ticks(600, 2, across))
    assert replay(reaching).makespan > replay(inside).makespan


ONE, TWO = Piece(0, (0,), (0,)), Piece(0, (1, 2), (1, 2))
FAILURES: dict[str, tuple[Plan, str]] = {
    "left out": ([ONE], r"^sample 1 is in 0 microbatches; expected 1$"),
    "twice": ([ONE, TWO, Piece(1, (3,), (1,))], r"^sample 1 is in 2 microbatches; expected 1$"),
    "unknown": ([ONE, TWO, Piece(1, (3,), (7,))], r"^sample 7 is in 1 microbatches; expected 1$"),
    "gap": (
        [ONE, TWO._replace(ranks=(1, 3))],
        r"^groups do not line up: microbatch 1 is on ranks \[1, 3\]; expected consecutive ranks of "
        r"0..3$",
    ),
    "outside": ([ONE, TWO._replace(ranks=(3, 4))], r"^groups do not line up: microbatch 1"),
    "overlap": (
        [ONE._replace(ranks=(0, 1)), TWO],
        r"^groups overlap: microbatches 0 and 1 of wave 0 are both on rank 1$",
    ),
    "tokens": (
        [Piece(0, (0,), (0, 1)), Piece(0, (1,), (2,))],
        r"^over capacity: position 0 of microbatch 0 has 16,385 tokens; capacity is 16,384$",
    ),
    "encoder": (
        [ONE, Piece(0, (1,), (1, 2))],
        r"^over capacity: the encoder units of microbatch 1 find no room on its 1 ranks within "
        r"encoder_capacity 1,000$",
    ),
}


@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize(("plan", "message"), FAILURES.values(), ids=FAILURES)
def test_a_plan_that_could_not_run_is_a_failure(sync: Sync, plan: Plan, message: str) -> None:
    samples = table([8_193, 8_192, 100], [[], [600], [600]])
    problem = problem_of(samples, "1x4", planner=config(sync, encoder_capacity=1_000))
    assert judge(problem, [ONE, TWO]).ranks == 4
    with pytest.raises(PeerError, match=message):
        judge(problem, plan)
