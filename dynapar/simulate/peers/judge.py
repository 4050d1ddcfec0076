"""Turn a peer's plan into a schedule, by the ticks that everyone is priced with, or say what fails.

Samples stay where the peer put them; their encoder units are placed by our own placement, whatever
the peer knows of media. Nothing is repaired: a plan that leaves a sample out, puts two microbatches
of a wave on one rank, or exceeds a capacity on any rank is a failure. A microbatch that reaches
from one node into the next pays the bandwidth between nodes, also where a node could hold it.
"""

from __future__ import annotations

import numpy as np

from dynapar.packing.bins import place_in_microbatches
from dynapar.packing.ticks import FloatArray, IntArray, Layout, Loads, microbatch_ticks
from dynapar.planner.problem import Problem
from dynapar.simulate.peers.request import PeerError, Plan, Request
from dynapar.simulate.schedule import Schedule, from_layout

_Work = tuple[IntArray, FloatArray, IntArray, IntArray]


def ask(problem: Problem, degree: int) -> Request:
    """What a peer is given of a step."""
    limits = problem.limits
    return Request(
        tokens=np.array(problem.samples.llm_tokens, np.int64),
        reach=problem.jobs.reach,
        unit_offsets=np.array(problem.unit_offsets, np.int64),
        unit_tokens=np.array(problem.unit_tokens, np.int64),
        ranks=limits.ranks,
        node=limits.node,
        capacity=limits.capacity,
        encoder_capacity=limits.encoder_capacity,
        constants=problem.constants,
        lockstep=problem.config.sync == "microbatch",
        degree=degree,
    )


def judge(problem: Problem, plan: Plan) -> Schedule:
    """The schedule of a peer's plan.

    Args:
        problem: The step.
        plan: What the peer made of it.

    Raises:
        PeerError: The plan could not run; says why.
    """
    _check(problem, plan)
    layout = _layout(problem, plan)
    lockstep = problem.config.sync == "microbatch"
    tokens = np.array(problem.samples.llm_tokens, np.int64)
    work = (tokens, problem.jobs.reach, problem.unit_offsets, problem.unit_tokens)
    full = place_in_microbatches(
        layout, *work, problem.limits.encoder_capacity, lockstep, problem.constants
    )
    if full >= 0:
        raise PeerError(
            f"over capacity: the encoder units of microbatch {full} find no room on its "
            f"{layout.width[full]} ranks within encoder_capacity "
            f"{problem.limits.encoder_capacity:,}"
        )
    loads = _price(problem, layout, work)
    _check_tokens(problem, loads)
    whole = int(tokens.sum())
    return from_layout(
        layout,
        loads,
        sync=problem.config.sync,
        ranks=problem.limits.ranks,
        costs=problem.costs,
        constants=problem.constants,
        tokens=whole,
        computed_tokens=whole,
    )


def _check(problem: Problem, plan: Plan) -> None:
    """Raise where samples are not there once each, or the ranks of a wave do not line up."""
    count = len(problem.samples)
    seen = np.bincount([row for piece in plan for row in piece.rows], minlength=count)
    if len(seen) > count or (seen != 1).any():
        wrong = int(np.flatnonzero(seen != 1)[0]) if len(seen) == count else len(seen) - 1
        raise PeerError(f"sample {wrong} is in {seen[wrong]} microbatches; expected 1")
    taken: dict[tuple[int, int], int] = {}
    for number, (wave, ranks, _) in enumerate(plan):
        first = ranks[0]
        if (
            list(ranks) != list(range(first, first + len(ranks)))
            or ranks[-1] >= problem.limits.ranks
        ):
            raise PeerError(
                f"groups do not line up: microbatch {number} is on ranks {list(ranks)}; expected "
                f"consecutive ranks of 0..{problem.limits.ranks - 1}"
            )
        for rank in ranks:
            other = taken.setdefault((wave, rank), number)
            if other != number:
                raise PeerError(
                    f"groups overlap: microbatches {other} and {number} of wave {wave} are both "
                    f"on rank {rank}"
                )


def _layout(problem: Problem, plan: Plan) -> Layout:
    count = len(problem.samples)
    first, degree = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for piece in plan:
        rows = list(piece.rows)
        first[rows], degree[rows] = piece.ranks[0], len(piece.ranks)
    return Layout(
        first=np.array([piece.ranks[0] for piece in plan], np.int64),
        width=np.array([len(piece.ranks) for piece in plan], np.int64),
        wave=np.array([piece.wave for piece in plan], np.int64),
        offsets=np.cumsum([0, *(len(piece.rows) for piece in plan)], dtype=np.int64),
        order=np.array([row for piece in plan for row in piece.rows], np.int64),
        sample_first=first,
        sample_degree=degree,
        unit_rank=np.zeros(len(problem.unit_tokens), np.int64),
    )


def _price(problem: Problem, layout: Layout, work: _Work) -> Loads:
    node = problem.limits.node
    loads = microbatch_ticks(layout, *work, problem.constants)
    reaches = (layout.first % node + layout.width > node) & (layout.width <= node)
    if not reaches.any():
        return loads
    across = microbatch_ticks(layout, *work, problem.constants._replace(node=1))
    rows = np.repeat(reaches, layout.width)
    return loads._replace(
        ticks=np.where(reaches, across.ticks, loads.ticks),
        slowest=np.where(reaches, across.slowest, loads.slowest),
        parts=np.where(rows[:, None], across.parts, loads.parts),
    )


def _check_tokens(problem: Problem, loads: Loads) -> None:
    capacity = problem.limits.capacity
    if loads.tokens.max(initial=0) <= capacity:
        return
    row = int(loads.tokens.argmax())
    number = int(np.searchsorted(loads.starts, row, side="right")) - 1
    raise PeerError(
        f"over capacity: position {row - int(loads.starts[number])} of microbatch {number} has "
        f"{loads.tokens[row]:,} tokens; capacity is {capacity:,}"
    )
