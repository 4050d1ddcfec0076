"""What other schedulers make of the same samples, by the same costs and the same simulator.

"megatron" and "verl" are the real code of an installed package, run in a process of its own;
"dhp" and "entrain" are written anew from their papers. Each module says what its peer sees, how its
answer is read, and what is decided in its favour. What they plan is priced, checked and replayed
like everything else; a plan that could not run is a failure and is shown as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynapar.cluster import Cluster
from dynapar.planner.problem import Problem
from dynapar.simulate.padded import dividing_degrees, fixed_degree
from dynapar.simulate.peers.judge import ask, judge
from dynapar.simulate.peers.process import PeerProcess, PeerTimeoutError
from dynapar.simulate.peers.process import peer as peer
from dynapar.simulate.peers.request import PeerError as PeerError
from dynapar.simulate.peers.request import PeerMissingError as PeerMissingError
from dynapar.simulate.replay import replay
from dynapar.simulate.schedule import Schedule

PEERS = ("megatron", "verl", "dhp", "entrain")
"""Names of all peers."""
STATIC = ("verl", "entrain")
"""Those with one degree for the whole run."""


class Outcome(NamedTuple):
    """What a peer made of one step."""

    schedule: Schedule | None
    """None where its plan could not run, or there is none."""
    reason: str
    """Why there is none."""
    seconds: float
    """CPU time of its plan; 0 where none came back."""
    timeout: bool
    """Whether it was stopped."""


def plan_with(
    name: str,
    problems: Sequence[Problem],
    *,
    cluster: Cluster,
    process: PeerProcess | None = None,
) -> list[Outcome]:
    """Let a peer plan the steps of a run.

    Args:
        name: One of `PEERS`.
        problems: The steps, 1 or more.
        cluster: Their ranks.
        process: Where the peer runs; None for the shared one.

    Returns:
        For each step what came of it. A peer of one degree has tried all that divide the cluster
        and hold the longest sample; that with the fewest failures and then the least total is kept.

    Raises:
        PeerMissingError: The peer is not installed.
        PlanError: The longest sample fits at no degree that divides the cluster.
    """
    runner = process or peer(name)
    runner.wait()
    if name not in STATIC:
        return [_outcome(runner, problem, 0) for problem in problems]
    longest = max(int(problem.samples.llm_tokens.max(initial=1)) for problem in problems)
    least = fixed_degree(longest, capacity=problems[0].config.capacity, cluster=cluster)
    degrees = [degree for degree in dividing_degrees(cluster) if degree >= least]
    tried = [[_outcome(runner, problem, degree) for problem in problems] for degree in degrees]
    return min(tried, key=_total)


def _outcome(runner: PeerProcess, problem: Problem, degree: int) -> Outcome:
    seconds = 0.0
    try:
        plan, seconds = runner.ask(ask(problem, degree))
        return Outcome(judge(problem, plan), "", seconds, False)
    except PeerError as error:
        return Outcome(None, str(error), seconds, isinstance(error, PeerTimeoutError))


def _total(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    schedules = [outcome.schedule for outcome in outcomes if outcome.schedule is not None]
    failures = len(outcomes) - len(schedules)
    return failures, sum(replay(schedule).makespan for schedule in schedules)
