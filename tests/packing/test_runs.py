"""Runs of microbatches on the same ranks, and what evening them out must keep."""

from __future__ import annotations

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.packing.runs import runs_of
from dynapar.packing.ticks import Layout
from dynapar.plan.check import validate
from dynapar.planner import PlannerConfig
from dynapar.planner.build import to_plan
from dynapar.planner.homogeneous import at_degree
from dynapar.planner.problem import Candidate, Problem, make_problem, steadied
from dynapar.planner.step import best_step
from dynapar.workloads import draw

COSTS = load_costs("h100_7b")


def step_of(workload: str, samples: int = 256) -> Problem:
    return make_problem(
        draw(workload, samples, seed=1, longest=8 * 16_384),
        step=0,
        cluster=Cluster.parse("2x4"),
        costs=COSTS,
        config=PlannerConfig(capacity=16_384, encoder_capacity=65_536),
    )


def chains(found: Candidate) -> list[list[int]]:
    """The runs, found by looking at every pair of microbatches."""
    layout = found.layout
    windows = [
        range(first, first + width)
        for first, width in zip(layout.first.tolist(), layout.width.tolist(), strict=True)
    ]
    out: list[list[int]] = []
    for b, window in enumerate(windows):
        for chain in out:
            last = chain[-1]
            between = windows[last + 1 : b]
            if windows[last] == window and not any(set(w) & set(window) for w in between):
                chain.append(b)
                break
        else:
            out.append([b])
    return out


def strays(found: Candidate, chain: list[int]) -> float:
    return sum(float(found.loads.ticks[b]) ** 2 for b in chain)


def samples_of(found: Candidate, chain: list[int]) -> list[int]:
    layout = found.layout
    return sorted(
        i for b in chain for i in layout.order[layout.offsets[b] : layout.offsets[b + 1]].tolist()
    )


@pytest.mark.parametrize("workload", ["wikipedia", "docs", "video", "burst", "sft", "longdoc"])
@pytest.mark.parametrize("degree", [0, 1, 2, 4])
def test_a_run_keeps_its_samples_and_its_end_and_strays_less(workload: str, degree: int) -> None:
    problem = step_of(workload)
    found = at_degree(problem, degree) if degree else best_step(problem, problem.order, 1)[0]
    if found is None:
        pytest.skip(f"{workload} does not fit at degree {degree}")
    after = steadied(problem, found)
    assert after.makespan <= found.makespan
    plan = to_plan(
        problem, after, bound=1, homogeneous=(0, 0), chosen="dynamic", seconds=0.0
    )  # fmt: skip
    validate(plan, COSTS)
    if degree:
        assert set(after.layout.sample_degree.tolist()) == {degree}
    runs = chains(found)
    assert chains(after) == runs
    for chain in runs:
        assert samples_of(after, chain) == samples_of(found, chain)
        assert after.loads.ticks[chain].sum() <= found.loads.ticks[chain].sum()
        assert strays(after, chain) <= strays(found, chain)


def test_a_full_microbatch_and_a_rest_become_alike() -> None:
    problem = step_of("docs")
    found = at_degree(problem, 1)
    assert found is not None
    after = steadied(problem, found)

    def widest(one: Candidate) -> float:
        spans = [one.loads.ticks[chain] for chain in chains(one)]
        return max(float(span.max() / span.min()) for span in spans)

    assert widest(found) > 1.5
    assert widest(after) < 1.25
    assert after.loads.tokens.max() < found.loads.tokens.max()


def test_layouts_are_left_alone() -> None:
    """What is changed is a copy; what cannot be evened out is itself."""
    problem = step_of("docs")
    found = at_degree(problem, 1)
    assert found is not None
    before = [column.copy() for column in found.layout]
    after = steadied(problem, found)
    assert after is not found
    for column, old in zip(found.layout, before, strict=True):
        np.testing.assert_array_equal(column, old)
    assert steadied(problem, after) is after


def test_runs_end_where_other_ranks_take_part() -> None:
    def column(*values: int) -> np.ndarray:
        return np.array(values, np.int64)

    none = column()
    layout = Layout(
        first=column(0, 0, 0, 0, 0, 1),
        width=column(1, 1, 2, 1, 1, 1),
        wave=column(0, 0, 0, 0, 0, 0),
        offsets=column(0, 0, 0, 0, 0, 0, 0),
        order=none, sample_first=none, sample_degree=none, unit_rank=none,
    )  # fmt: skip
    before, after = runs_of(layout, 2)
    assert before.tolist() == [-1, 0, -1, -1, 3, -1]
    assert after.tolist() == [1, -1, -1, 4, -1, -1]
