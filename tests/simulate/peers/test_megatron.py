from __future__ import annotations

import pytest

from dynapar.cluster import Cluster
from dynapar.plan import Sync
from dynapar.simulate import replay
from dynapar.simulate.peers import PeerError, plan_with
from dynapar.simulate.peers.judge import ask
from dynapar.simulate.peers.megatron import pieces
from dynapar.simulate.peers.process import peer
from dynapar.simulate.peers.request import Piece
from tests.samples import table
from tests.simulate.peers.scenes import check_rows, installed, problem_of
from tests.simulate.scenes import config, random_table

UNALIGNED = [400, 400, 201, 200, 200, 200, 200, 101, 50]
"""Of 100 tokens a rank: a batch for which the scheduler makes a group of ranks 2 to 5."""


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_the_installed_scheduler_plans(sync: Sync) -> None:
    installed("megatron")
    samples = random_table(3, 40, longest=60_000)
    problem = problem_of(samples, "2x4", sync)
    plan, _ = peer("megatron").ask(ask(problem, 0))
    check_rows(plan, 40)
    for piece in plan:
        (row,) = piece.rows
        needed = 1
        while needed * 16_384 < samples.llm_tokens[row]:
            needed *= 2
        assert len(piece.ranks) >= needed
    (outcome,) = plan_with("megatron", [problem], cluster=Cluster.parse("2x4"))
    assert outcome.schedule is not None
    assert replay(outcome.schedule).makespan >= problem.bound()
    assert len(outcome.schedule.layout.first) == 40


def test_groups_that_do_not_line_up_are_a_failure() -> None:
    installed("megatron")
    problem = problem_of(table(UNALIGNED), "1x8", planner=config("step", capacity=100))
    (outcome,) = plan_with("megatron", [problem], cluster=Cluster.parse("1x8"))
    assert outcome.schedule is None
    assert not outcome.timeout
    assert outcome.reason == (
        "sample 2 is on ranks [2, 3, 4, 5], for which Megatron has no process group: those are "
        "aligned blocks of 2, 4, ... 4 ranks, and all 8"
    )


def test_its_own_errors_are_failures() -> None:
    """More tokens than all ranks hold: it fails with an error of its own."""
    installed("megatron")
    request = ask(problem_of(table([90] * 4), "1x2"), 0)._replace(capacity=10)
    with pytest.raises(PeerError, match=r"^it ended with \w+Error"):
        peer("megatron").ask(request)


def test_groups_become_waves() -> None:
    groups = [[[0, 2], [0, 2], [1], [3]], [[4], [4], [4], [4]]]
    assert pieces(groups, 4) == [
        Piece(0, (0, 1), (0,)),
        Piece(0, (2,), (1,)),
        Piece(0, (3,), (3,)),
        Piece(1, (0, 1), (2,)),
        Piece(2, (0, 1, 2, 3), (4,)),
    ]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[[0, 1], [1, 0]]], r"^sample 0 is at places \[0, 1\] of the lists of ranks \[0, 1\]"),
        (
            [[[], [0], [0], []]],
            r"^sample 0 is on ranks \[1, 2\], for which .* of 2, 4, ... 2 ranks",
        ),
        ([[[0], [], [0], []]], r"^sample 0 is on ranks \[0, 2\], for which"),
        ([[[0], [0], [0], []]], r"^sample 0 is on ranks \[0, 1, 2\], for which"),
        ([[[0], [0], [0], [0], [], []]], r"^sample 0 is on ranks \[0, 1, 2, 3\], for which"),
    ],
)
def test_ranks_without_a_process_group(groups: list[list[list[int]]], message: str) -> None:
    """Of 6 ranks there are blocks of 2 and all 6: a planned block of 4 has none."""
    with pytest.raises(PeerError, match=message):
        pieces(groups, len(groups[0]))
