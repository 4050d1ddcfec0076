from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import Costs, load_costs
from dynapar.meta import SampleTable
from dynapar.packing.exact import FEWER_THAN, Answer, complete, exact
from dynapar.plan import Sync
from dynapar.planner import PlannerConfig, plan_step
from dynapar.planner.problem import Problem, make_problem, price
from dynapar.workloads import draw
from tests.packing import oddcosts
from tests.packing.exact import Exact
from tests.samples import table

SYNCS: tuple[Sync, Sync] = ("step", "microbatch")
CAPACITY, ENCODER_CAPACITY = 4000, 3000


def problem(
    samples: SampleTable, shape: str, costs: Costs, sync: Sync, **rules: str | int
) -> Problem:
    config = PlannerConfig(
        capacity=CAPACITY,
        encoder_capacity=ENCODER_CAPACITY,
        sync=sync,
        **rules,  # type: ignore[arg-type]
    )
    cluster = Cluster.parse(shape)
    return make_problem(samples, step=0, cluster=cluster, costs=costs, config=config)


def search(given: Problem, rival: int, goal: int = 0) -> Answer:
    return exact(
        given.lockstep, rival, goal, given.order, given.unit_offsets, given.unit_tokens,
        given.jobs, given.limits, given.constants,
    )  # fmt: skip


def optimum(given: Problem) -> int:
    oracle = Exact(given.samples, given.cluster, given.costs, CAPACITY, ENCODER_CAPACITY)
    return oracle.waves() if given.lockstep else oracle.step()


def drawn(seed: int, shape: str) -> SampleTable:
    """1 to 3 samples (to 4 on fewer than 4 ranks), of which two may have up to two units."""
    rng = np.random.default_rng(seed)
    ranks = Cluster.parse(shape).ranks
    n = int(rng.integers(1, 4 if ranks == 4 else 5))
    lengths = np.minimum(rng.lognormal(7.3, 1.0, n).astype(int) + 1, ranks * CAPACITY)
    units: list[Sequence[int]] = [
        rng.integers(200, 1500, int(rng.integers(0, 3))).tolist() if i < 2 else [] for i in range(n)
    ]
    return table(lengths.tolist(), units)


@pytest.mark.parametrize("costs", oddcosts.ALL, ids=lambda costs: costs.name)
@pytest.mark.parametrize("sync", SYNCS)
def test_the_search_finds_what_an_exhaustive_oracle_finds(sync: Sync, costs: Costs) -> None:
    """With nothing to start from, and with nothing to find; rarely does the count run out."""
    proven = 0
    for seed, shape in enumerate(["1x2", "1x3", "2x2", "1x4", "1x1", "1x2"]):
        given = problem(drawn(seed, shape), shape, costs, sync)
        least = optimum(given)
        found = search(given, 1 << 40)
        assert found.makespan == least if found.optimal else found.makespan >= least, seed
        assert price(given, found.layout).makespan == found.makespan
        none = search(given, least)
        assert (none.makespan, none.found) == (least, False), seed
        proven += found.optimal + none.optimal
    assert proven >= 8


@pytest.mark.parametrize("costs", [oddcosts.FREE, oddcosts.DEAR_LINKS], ids=lambda c: c.name)
@pytest.mark.parametrize("sync", SYNCS)
def test_more_samples_without_media(sync: Sync, costs: Costs) -> None:
    """Enough of them that several share microbatches, and that symmetry is made use of."""
    for seed, (n, shape) in enumerate([(4, "1x4"), (4, "2x2"), (5, "1x3"), (6, "1x2")]):
        rng = np.random.default_rng(100 + seed)
        most = Cluster.parse(shape).ranks * CAPACITY
        lengths = np.minimum(rng.lognormal(7.3, 1.0, n).astype(int) + 1, most)
        given = problem(table(lengths.tolist()), shape, costs, sync)
        least = optimum(given)
        found = search(given, 1 << 40)
        assert found.makespan == least if found.optimal else found.makespan >= least, seed
        assert not search(given, least).found, seed


@pytest.mark.parametrize("sync", SYNCS)
def test_memory_is_never_exceeded(sync: Sync) -> None:
    """Three samples that two ranks hold by two: what is shared counts on each of its ranks."""
    for lengths in ([3900] * 3, [7900, 7800], [7000, 500, 500, 300], [4000, 4000, 1]):
        given = problem(table(lengths), "1x2", oddcosts.DEAR_FIXED, sync)
        found = search(given, 1 << 40)
        assert (found.makespan, found.optimal) == (optimum(given), True)
        assert price(given, found.layout).loads.tokens.max() <= CAPACITY


def test_a_plan_says_whether_it_is_the_best() -> None:
    """Small steps are solved; of larger ones the plan does not claim more than it knows."""
    costs, cluster = load_costs(None), Cluster.parse("1x4")
    config = PlannerConfig(capacity=16_384, encoder_capacity=65_536)
    few = draw("wikipedia", 2, seed=1, longest=65_536)
    made = plan_step(few, step=0, cluster=cluster, costs=costs, config=config)
    assert made.optimal
    assert made.makespan > made.lower_bound
    many = draw("wikipedia", FEWER_THAN, seed=1, longest=65_536)
    made = plan_step(many, step=0, cluster=cluster, costs=costs, config=config)
    assert not made.optimal
    assert made.makespan > made.lower_bound


def test_a_count_ends_the_search() -> None:
    samples = draw("docs", FEWER_THAN - 1, seed=0, longest=65_536)
    config = PlannerConfig(capacity=16_384, encoder_capacity=65_536)
    given = make_problem(
        samples, step=0, cluster=Cluster.parse("1x8"), costs=load_costs(None), config=config
    )
    made = plan_step(samples, step=0, cluster=given.cluster, costs=given.costs, config=config)
    answer = search(given, made.makespan, made.lower_bound)
    assert not answer.optimal
    assert search(given, made.makespan, made.lower_bound).makespan == answer.makespan


def test_where_rules_narrow_rings_nothing_is_claimed() -> None:
    samples = table([3000, 700])
    assert complete(problem(samples, "2x4", oddcosts.FREE, "step").limits)
    narrow: list[dict[str, str | int]] = [
        {"degrees": "pow2"}, {"windows": "aligned"}, {"peer_budget": 3},
    ]  # fmt: skip
    for rules in narrow:
        assert not complete(problem(samples, "2x4", oddcosts.FREE, "step", **rules).limits)


@pytest.mark.parametrize("sync", SYNCS)
def test_units_may_lie_across_two_nodes(sync: Sync) -> None:
    """A third half node is needed then, on either side; the oracle knows all windows."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        units = [rng.integers(800, 1500, 3).tolist(), [int(rng.integers(900, 1500))]]
        samples = table(rng.integers(300, 900, 2).tolist(), units)
        given = problem(samples, "2x2", oddcosts.DEAR_ENCODER, sync)
        found = search(given, 1 << 40)
        least = optimum(given)
        assert found.makespan == least if found.optimal else found.makespan >= least, seed
