"""The reference costs, in ticks, against their formulas written out again in plain Python floats.

The numbers below are those of the published reference (`reference_costs/h100_7b.json`), and of the
harder file that plans are also judged by (`harder.json`); nothing is imported from what is tested
but the plans.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import coefficients, load_costs
from dynapar.packing.ticks import latency_ticks, sample_ticks, unit_ticks
from dynapar.plan import MicroBatch, StepPlan, Sync
from dynapar.planner import PlannerConfig, assemble, random_plan
from tests.samples import table
from tests.simulate.scenes import random_table

EASY: Mapping[str, float] = {"fixed": 0.030, "hop": 10e-6, "inside": 200e9, "across": 40e9}
HARD: Mapping[str, float] = {"fixed": 0.080, "hop": 3e-5, "inside": 100e9, "across": 12e9}
ROUNDING = 0.5e-6
"""Seconds that rounding a term to a tick can move it."""


def linear(tokens: int) -> float:
    return 6 * 6.5e9 * tokens / (400e12 * tokens / (tokens + 64)) if tokens else 0.0


def attention(s: int, d: int) -> float:
    m = s / d
    return 3.5 * 2 * 28 * 3584 * s * s / d / (300e12 * m / (m + 256))


def exchange(s: int, d: int, node: int, rates: Mapping[str, float]) -> float:
    if d == 1:
        return 0.0
    bytes_per_s = rates["inside"] if d <= node else rates["across"]
    layer = 3 * 0.75 * 2048 * (s / d) / bytes_per_s - attention(s, d) / (28 * d)
    return 28 * (d - 1) * max(0.0, layer)


def encoder(p: int) -> float:
    return (6 * 0.3e9 * p + 3.5 * 4 * 24 * 1024 * p * p) / 2.2e14


def ranks_of(
    micro: MicroBatch, plan: StepPlan, rates: Mapping[str, float]
) -> dict[int, tuple[float, float]]:
    """Encoder seconds and LLM seconds of each rank; latency and fixed count in the LLM's."""
    llm, enc, busy = (dict.fromkeys(micro.ranks, 0.0) for _ in range(3))
    for place in micro.placements:
        s, d = int(plan.samples.llm_tokens[place.sample]), len(place.ranks)
        for rank in place.ranks:
            busy[rank] += s / d
            llm[rank] += attention(s, d) + exchange(s, d, plan.ranks_per_node, rates)
        for rank, unit in zip(place.encoders, plan.samples.units(place.sample), strict=True):
            enc[rank] += encoder(int(unit))
    largest = max(len(place.ranks) for place in micro.placements)
    once = 28 * (largest - 1) * rates["hop"] + rates["fixed"]
    # n / (n + 64) of a rank's tokens, whole or not: cuts differ from s / d by less than a token.
    return {
        rank: (enc[rank], llm[rank] + once + (6 * 6.5e9 * (n + 64) / 400e12 if n else 0.0))
        for rank, n in busy.items()
    }


def makespan_of(plan: StepPlan, rates: Mapping[str, float]) -> float:
    works = [ranks_of(micro, plan, rates) for micro in plan.microbatches]
    if plan.sync == "step":
        free = [0.0] * plan.ranks
        for micro, work in zip(plan.microbatches, works, strict=True):
            end = max(free[r] for r in micro.ranks) + max(map(sum, work.values()))
            for rank in micro.ranks:
                free[rank] = end
        return max(free)
    total = 0.0
    for entries in zip(*plan.queues, strict=True):
        encodes, enc, llm = False, 0.0, 39e9 / 50e9
        for rank, number in enumerate(entries):
            own = (0.0, rates["fixed"]) if number is None else works[number][rank]
            encodes |= own[0] > 0
            enc, llm = max(enc, own[0]), max(llm, own[1])
        total += llm + (max(enc, 1.8e9 / 50e9) if encodes else 0.0)
    return total


def test_one_sample_by_hand() -> None:
    """10,000 tokens over 4 ranks of a node and over 16 ranks of two, worked out on paper."""
    constants = coefficients(load_costs(None), ranks_per_node=8)
    # 6 * 6.5e9 / 400e12 = 97.5 us a token; 64 tokens more a rank: 6.24 ms.
    assert constants.linear_rank == 6240
    # Linear 2,500 * 97.5 us. Attention 3.5 * 2 * 28 * 3584 * 1e8 / 4 / (300e12 * 2500 / 2756)
    # = 17.5616e12 / 272.134e12 s = 64.533 ms. In a layer, 11.52e6 / 200e9 = 57.6 us of wire hide
    # behind 64,533 / 112 = 576.2 us of attention.
    assert sample_ticks(10_000, 4, constants) == (243_750, 64_533, 0)
    # 625 tokens: linear 60.9375 ms; attention 4.3904e12 / (300e12 * 625 / 881) = 20.6289 ms. In a
    # layer 2.88e6 / 40e9 = 72 us of wire against 20,628.9 / 448 = 46.047 us: 28 * 15 * 25.953 us.
    assert sample_ticks(10_000, 16, constants) == (60_938, 20_629, 10_900)
    assert [latency_ticks(d, constants) for d in (1, 4, 16)] == [0, 840, 4200]
    # A tile: (1.8e9 * 1025 + 344064 * 1025^2) / 2.2e14 = (1.845e12 + 0.36148e12) / 2.2e14.
    assert unit_ticks(1025, constants) == 10_029
    assert (constants.fixed, constants.llm_floor, constants.encoder_floor) == (
        30_000,
        780_000,
        36_000,
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300_000), st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 64]), st.booleans())
def test_a_samples_ticks_are_its_formulas(s: int, d: int, hard: bool) -> None:
    costs, rates = (load_costs("harder"), HARD) if hard else (load_costs(None), EASY)
    constants = coefficients(costs, ranks_per_node=8)
    found = [ticks / 1e6 for ticks in sample_ticks(s, d, constants)]
    tolerance = pytest.approx
    assert found[0] == tolerance(97.5e-6 * s / d, abs=1.01 * ROUNDING)
    assert found[1] == tolerance(attention(s, d), rel=1e-12, abs=1.01 * ROUNDING)
    assert found[2] == tolerance(exchange(s, d, 8, rates), rel=1e-9, abs=1.01 * ROUNDING)
    assert (found[0] + constants.linear_rank / 1e6) * d >= linear(s) - 2 * d * ROUNDING
    assert unit_ticks(s, constants) / 1e6 == tolerance(encoder(s), rel=1e-12, abs=1.01 * ROUNDING)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["step", "microbatch"]),
    st.sampled_from(["2x4", "3x2"]),
    st.booleans(),
)
def test_a_plans_times_are_the_formulas(seed: int, sync: Sync, cluster: str, hard: bool) -> None:
    costs, rates = (load_costs("harder"), HARD) if hard else (load_costs(None), EASY)
    plan = random_plan(
        random_table(seed, 20),
        seed=seed,
        step=0,
        cluster=Cluster.parse(cluster),
        costs=costs,
        config=PlannerConfig(capacity=16_384, encoder_capacity=65_536, sync=sync),
    )
    for micro in plan.microbatches:
        work = ranks_of(micro, plan, rates)
        # Three terms a sample, one a unit, latency and two constants, each rounded once.
        terms = 3 * len(micro.placements) + sum(len(p.encoders) for p in micro.placements) + 3
        expected = max(map(sum, work.values()))
        assert micro.ticks / 1e6 == pytest.approx(expected, abs=terms * ROUNDING)
        assert sum(micro.parts) == micro.ticks
    whole = 4 * sum(len(m.placements) for m in plan.microbatches) + len(plan.samples.unit_tokens)
    expected = makespan_of(plan, rates)
    assert plan.makespan / 1e6 == pytest.approx(expected, abs=(whole + 100) * ROUNDING)


def test_a_wave_waits_for_its_slowest_parts() -> None:
    """Rank 0 encodes, rank 1 has the tokens: encoder and LLM are waited for one by one."""
    plan = assemble(
        table([600, 9000], [[1025] * 10, []]),
        microbatches=[((0,), [(0, (0,))]), ((1,), [(1, (1,))])],
        step=0,
        cluster=Cluster(nodes=1, ranks_per_node=3),
        costs=load_costs(None),
        config=PlannerConfig(capacity=16_384, encoder_capacity=65_536, sync="microbatch"),
    )
    assert plan.makespan / 1e6 == pytest.approx(
        10 * encoder(1025) + linear(9000) + attention(9000, 1) + 0.030, abs=10e-6
    )


def test_the_closing_pass_is_a_constant() -> None:
    step = load_costs(None).step
    assert (step.closing_step, step.closing_microbatch) == (0.25, 0.05)
