from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import coefficients, load_costs
from dynapar.errors import PlanError
from dynapar.packing.ticks import microbatch_ticks
from dynapar.plan import MicroBatch, PlanColumns, StepPlan, Sync, plan_digest, validate
from dynapar.plan.columns import positions
from dynapar.planner import PlannerConfig, plan_step, random_plan
from dynapar.workloads import draw
from tests.plan.small import COSTS, plan
from tests.samples import table

SYNCS: tuple[Sync, Sync] = ("step", "microbatch")


@cache
def made(sync: Sync, seed: int, ranks: int = 4) -> StepPlan:
    """A random valid plan of samples with media, or for seed 0 the planner's own."""
    cluster = Cluster(nodes=2, ranks_per_node=ranks // 2)
    config = PlannerConfig(capacity=16_384, encoder_capacity=65_536, sync=sync)
    samples = draw("video", 20, seed=seed, longest=ranks * 16_384)
    costs = load_costs(None)
    if not seed:
        return plan_step(samples, step=0, cluster=cluster, costs=costs, config=config)
    return random_plan(samples, seed=seed, step=0, cluster=cluster, costs=costs, config=config)


def plans() -> Iterator[StepPlan]:
    return (made(sync, seed) for sync in SYNCS for seed in range(4))


def fresh(one: StepPlan) -> StepPlan:
    """The same plan, of which no record was made."""
    return dataclasses.replace(one)


def test_records_and_columns_say_the_same() -> None:
    for one in plans():
        records = {name: getattr(one, name) for name in ("microbatches", "queues", "waves")}
        assert PlanColumns.from_records(**records) == one.columns


def test_records_are_those_of_the_columns_by_plain_slicing() -> None:
    for one in plans():
        columns = one.columns
        place = 0
        for number, micro in enumerate(one.microbatches):
            begin, end = columns.rank_offsets[number : number + 2]
            assert micro.ranks == tuple(range(micro.ranks[0], micro.ranks[0] + end - begin))
            assert micro.ranks == tuple(columns.ranks[begin:end])
            assert micro.tokens_per_rank == tuple(columns.tokens[begin:end])
            assert micro.encoder_tokens_per_rank == tuple(columns.encoder_tokens[begin:end])
            assert (micro.ticks, micro.start) == (columns.ticks[number], columns.starts[number])
            assert micro.parts == tuple(columns.parts[number])
            for entry in micro.placements:
                shares = columns.share_offsets[place : place + 2]
                units = columns.unit_offsets[place : place + 2]
                assert entry.sample == columns.sample_rows[place]
                assert entry.ranks == tuple(columns.share_ranks[slice(*shares)])
                assert entry.encoders == tuple(columns.unit_ranks[slice(*units)])
                place += 1
        assert place == len(one.samples)
        assert one.degrees == tuple(
            sorted({len(p.ranks) for micro in one.microbatches for p in micro.placements})
        )


def test_one_rank_gets_its_own_records_alone() -> None:
    for one in plans():
        for rank in range(one.ranks):
            alone = fresh(one)
            assert alone.queue(rank) == one.queues[rank]
            own = [one.microbatches[entry] for entry in one.queues[rank] if entry is not None]
            assert list(alone.of_rank(rank)) == own
            assert alone._made.microbatches is None
            assert len(alone._made.microbatch) == len(own)


def test_a_record_is_made_once() -> None:
    one = fresh(plan())
    assert one.microbatch(1) is one.microbatch(1)
    assert one.microbatches is one.microbatches
    assert one.microbatch(2) is one.microbatches[2]


def test_plans_are_equal_when_they_say_the_same() -> None:
    one, other = plan(), plan()
    assert one.columns is not other.columns
    assert one == dataclasses.replace(other, plan_seconds=9.0)
    assert one != "a plan"
    assert one != dataclasses.replace(other, makespan=one.makespan + 1)
    for name in ("samples", "columns"):
        part = getattr(other, name)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            changed = value + 1 if isinstance(value, np.ndarray) else tuple("abcdef")
            if value is None or not len(value):
                continue
            moved = dataclasses.replace(
                other, **{name: dataclasses.replace(part, **{field.name: changed})}
            )
            assert one != moved, field.name
            assert plan_digest(one) != plan_digest(moved), field.name
    assert one == pickle.loads(pickle.dumps(one))


def test_the_layout_of_a_plan_is_priced_as_the_plan_says() -> None:
    for one in plans():
        loads = microbatch_ticks(
            one.layout(),
            one.samples.llm_tokens,
            one.samples.reach,
            one.samples.unit_offsets,
            one.samples.unit_tokens,
            coefficients(COSTS, ranks_per_node=one.ranks_per_node),
        )
        np.testing.assert_array_equal(loads.ticks, one.columns.ticks)
        np.testing.assert_array_equal(loads.tokens, one.columns.tokens)
        np.testing.assert_array_equal(loads.encoder_tokens, one.columns.encoder_tokens)
        waves = one.wave_of_microbatches()
        for rank in range(one.ranks if one.sync == "microbatch" else 0):
            for wave, entry in enumerate(one.queues[rank]):
                assert entry is None or waves[entry] == wave


@given(st.data())
def test_no_number_of_a_plan_can_be_changed_unseen(data: st.DataObject) -> None:
    one = made(data.draw(st.sampled_from(SYNCS)), data.draw(st.integers(0, 3)))
    names = [f.name for f in dataclasses.fields(PlanColumns) if getattr(one.columns, f.name).size]
    name = data.draw(st.sampled_from(names))
    column = getattr(one.columns, name).copy()
    entry = data.draw(st.integers(0, column.size - 1))
    by = data.draw(st.sampled_from([-(10**6), -5, -1, 1, 2, 5, 10**6]))
    column.reshape(-1)[entry] += by
    bad = dataclasses.replace(one, columns=dataclasses.replace(one.columns, **{name: column}))
    with pytest.raises(PlanError, match=r"step 0: the plan is not valid: "):
        validate(bad, COSTS)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PlanColumns)])
def test_columns_that_do_not_fit_each_other_are_named(name: str) -> None:
    one = plan("microbatch")
    shorter = dataclasses.replace(one.columns, **{name: getattr(one.columns, name)[:-1]})
    with pytest.raises(PlanError, match=r"the plan is not valid: "):
        validate(dataclasses.replace(one, columns=shorter))


def test_records_that_no_column_can_hold_are_refused() -> None:
    micro: MicroBatch = plan().microbatches[0]
    for name in ("tokens_per_rank", "encoder_tokens_per_rank"):
        fewer = dataclasses.replace(micro, **{name: (1,)})  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=rf"microbatch 0 has 1 {name}; expected 2, one for"):
            PlanColumns.from_records(microbatches=[fewer], queues=[[0]])
    with pytest.raises(PlanError, match=r"the queue of rank 1 holds -1; expected numbers of mic"):
        PlanColumns.from_records(microbatches=[micro], queues=[[0], [0, -1]])


def test_positions_count_within_rows() -> None:
    assert positions(np.array([0, 2, 2, 5])).tolist() == [0, 1, 0, 1, 2]


def test_columns_may_be_empty() -> None:
    columns = PlanColumns.from_records(microbatches=[], queues=[[], [], []])
    none = dataclasses.replace(plan(), samples=table([]), columns=columns, ranks=3)
    assert (none.queues, none.microbatches, none.degrees) == (((), (), ()), (), ())
    assert (none.waves, none.of_rank(2)) == ((), ())
    assert none.layout().order.tolist() == []
