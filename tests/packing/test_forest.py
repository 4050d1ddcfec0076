from __future__ import annotations

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.packing.construct import construct
from dynapar.packing.forest import fill_machines
from dynapar.packing.moldable import (
    NEVER,
    dealt_tokens,
    job_ticks,
    overhead,
    remainder,
    share_tokens,
)
from dynapar.packing.search import improve
from dynapar.packing.strip import Strip
from dynapar.planner import PlannerConfig
from dynapar.planner.problem import Problem, make_problem
from dynapar.workloads import draw


def problem_of(workload: str, seed: int) -> Problem:
    return make_problem(
        draw(workload, 96, seed=seed, longest=16 * 16_384),
        step=0,
        cluster=Cluster(nodes=2, ranks_per_node=8),
        costs=load_costs(None),
        config=PlannerConfig(capacity=16_384, encoder_capacity=65_536),
    )


def built(problem: Problem, samples: int, waves: int) -> Strip:
    target = problem.bound() // max(1, waves)
    done, strip = construct(
        problem.order[:samples].copy(), target, 2, 1, False, False, waves,
        problem.jobs, problem.limits, problem.constants,
    )  # fmt: skip
    assert done
    return strip


def ends(problem: Problem, strip: Strip, i: int, single: bool) -> list[int]:
    """Of each machine, its end with sample i; `NEVER` without room: every machine looked at."""
    jobs, limits, costs = problem.jobs, problem.limits, problem.constants
    size, units, total = (int(c[i]) for c in (jobs.unit_size, jobs.units, jobs.encoder_tokens))
    found = []
    for m in range(int(strip.counts[1])):
        width, b = int(strip.machine_width[m]), int(strip.machine_top[m])
        share, end = share_tokens(jobs, i, width), int(strip.machine_end[m])
        end += job_ticks(jobs, i, width, costs)
        fits = b >= 0 and strip.tokens[b] + share <= limits.capacity
        if fits and total:
            most = max(int(strip.unit_size[b]), size)
            dealt = dealt_tokens(
                int(strip.encoder_tokens[b]) + total, most, int(strip.units[b]) + units, width
            )
            fits = dealt <= limits.encoder_capacity
        dear = int(jobs.unit_ticks[i])
        if fits:
            end += remainder(max(0, dear - int(strip.unit_ticks[b])), width)
        else:
            alone = dealt_tokens(total, size, units, width) if total else 0
            room = share <= limits.capacity and alone <= limits.encoder_capacity
            end += overhead(width, costs) + remainder(dear, width)
            if not room or (single and b >= 0):
                end = NEVER
        found.append(end)
    return found


@pytest.mark.parametrize("waves", [0, 2])
@pytest.mark.parametrize("workload", ["longdoc", "docs", "video"])
def test_the_tree_finds_what_a_look_at_all_machines_finds(workload: str, waves: int) -> None:
    problem = problem_of(workload, seed=1)
    strip = built(problem, 64, waves)
    seen = set()
    for i in problem.order[64:].tolist():
        known = ends(problem, strip, i, waves > 0)
        for target in (min(known) - 1, int(np.median(known)), max(known)):
            by = [end for end in known if end <= target]
            for best_fit, wanted in ((False, min(known)), (True, max(by, default=min(known)))):
                tried = Strip(*(column.copy() for column in strip))
                done = fill_machines(
                    tried, np.array([i]), target, waves > 0, best_fit, False,
                    problem.jobs, problem.limits, problem.constants,
                )  # fmt: skip
                assert done == (wanted < NEVER)
                if done:
                    m = int(tried.machine[tried.microbatch[i]])
                    assert known[m] == tried.machine_end[m] == wanted
                    seen.add(m)
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("workload", "seed", "across"),
    [("docs", 2, False), ("flat", 2, False), ("longdoc", 3, True), ("sft", 2, True)],
)
def test_improving_lowers_the_latest_end_and_keeps_the_sums(
    workload: str, seed: int, across: bool
) -> None:
    problem = problem_of(workload, seed)
    strip = built(problem, 96, 0)
    machines, microbatches = int(strip.counts[1]), int(strip.counts[0])
    before = int(strip.machine_end[:machines].max())
    widths = strip.width[strip.microbatch]
    rounds = improve(strip, problem.order, 200, 0, problem.jobs, problem.limits, problem.constants)
    after = int(strip.machine_end[:machines].max())
    assert rounds > 0
    assert after < before
    assert bool((strip.width[strip.microbatch] != widths).any()) == across
    for b in range(microbatches):
        rows = np.flatnonzero(strip.microbatch == b)
        width = int(strip.width[b])
        held = sum(share_tokens(problem.jobs, int(i), width) for i in rows)
        assert strip.tokens[b] == held <= problem.limits.capacity
        assert strip.encoder_tokens[b] == problem.jobs.encoder_tokens[rows].sum()
        assert strip.units[b] == problem.jobs.units[rows].sum()
