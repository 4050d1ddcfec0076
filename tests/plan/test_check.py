from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from dynapar.cluster import Cluster
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.plan import MicroBatch, PlanColumns, StepPlan, Sync, validate
from dynapar.planner import PlannerConfig, assemble, plan_step
from tests.plan.small import COSTS, SAMPLES, plan
from tests.samples import table


def change(number: int, **fields: object) -> Callable[[StepPlan], StepPlan]:
    """Replace fields of one microbatch."""

    def apply(made: StepPlan) -> StepPlan:
        micro = list(made.microbatches)
        micro[number] = dataclasses.replace(micro[number], **fields)  # type: ignore[arg-type]
        return records(microbatches=micro)(made)

    return apply


def place(number: int, entry: int, **fields: object) -> Callable[[StepPlan], StepPlan]:
    """Replace fields of one placement of a microbatch."""

    def apply(made: StepPlan) -> StepPlan:
        places = list(made.microbatches[number].placements)
        places[entry] = places[entry]._replace(**fields)  # type: ignore[arg-type]
        return change(number, placements=tuple(places))(made)

    return apply


def whole(**fields: object) -> Callable[[StepPlan], StepPlan]:
    """Replace fields of the plan."""
    return lambda made: dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def records(**fields: Any) -> Callable[[StepPlan], StepPlan]:
    """Replace the microbatches, queues or waves of the plan."""

    def apply(made: StepPlan) -> StepPlan:
        kept = {name: getattr(made, name) for name in ("microbatches", "queues", "waves")}
        return dataclasses.replace(made, columns=PlanColumns.from_records(**{**kept, **fields}))

    return apply


def without(number: int) -> Callable[[StepPlan], StepPlan]:
    """Take the last sample out of a microbatch."""

    def apply(made: StepPlan) -> StepPlan:
        return change(number, placements=made.microbatches[number].placements[:-1])(made)

    return apply


def twice(made: StepPlan) -> StepPlan:
    """Put the first microbatch's second sample into another one as well."""
    extra = made.microbatches[0].placements[1]._replace(ranks=(2,), encoders=(2,))
    return change(1, placements=(*made.microbatches[1].placements, extra))(made)


def swapped(made: StepPlan) -> StepPlan:
    """Run rank 0's two microbatches in the other order."""
    return records(queues=((2, 0), *made.queues[1:]))(made)


def slower(made: StepPlan) -> StepPlan:
    """A microbatch that says it takes a tick more, consistently but for the costs."""
    micro: MicroBatch = made.microbatches[3]
    parts = micro.parts._replace(linear=micro.parts.linear + 1)
    return change(3, ticks=micro.ticks + 1, parts=parts)(made)


def later(made: StepPlan) -> StepPlan:
    """A wave that says it takes a tick more."""
    waves = [*made.waves[:-1], made.waves[-1]._replace(llm=made.waves[-1].llm + 1)]
    return dataclasses.replace(records(waves=waves)(made), makespan=made.makespan + 1)


def relabelled(targets: int) -> SampleTable:
    """The samples, the first of which says that it has so many targets."""
    labels = SAMPLES.label_tokens.copy()
    labels[0] = targets
    return dataclasses.replace(SAMPLES, label_tokens=labels)


FAULTS: dict[str, tuple[Sync, Callable[[StepPlan], StepPlan], str]] = {
    "lost sample": ("step", without(0), r"sample 's1' is in no microbatch"),
    "doubled sample": ("step", twice, r"sample 's1' is in microbatches 0 and 1"),
    "unknown row": ("step", place(1, 0, sample=9), r"runs row 9 of 6 samples"),
    "empty microbatch": ("step", change(1, placements=()), r"microbatch 1 has no sample"),
    "swapped order": ("step", swapped, r"queue of rank 0 runs \[2, 0\]; .* are \[0, 2\]"),
    "queue lacks one": (
        "step",
        records(queues=((0, 2), (0,), (), (3,))),
        r"queue of rank 2 runs \[\]",
    ),
    "too few queues": ("step", records(queues=((0, 2), (0,))), r"2 queues for 4 ranks"),
    "dummy in a step": (
        "step",
        records(queues=((0, None, 2), (0,), (1,), (3,))),
        r"rank 0 has a dummy",
    ),
    "ring with a hole": ("step", change(0, ranks=(0, 2)), r"\[0, 2\] are not consecutive"),
    "rank beyond": ("step", change(3, ranks=(4,)), r"4..4 are not all among 0..3"),
    "foreign rank": ("step", place(0, 0, ranks=(1, 2)), r"'s0' is on rank 2, which is not in it"),
    "ranks reversed": ("step", place(0, 0, ranks=(1, 0)), r"'s0': ranks \[1, 0\] are not consec"),
    "foreign encoder": ("step", place(0, 1, encoders=(3,)), r"'s1' is on rank 3, which is not in"),
    "lost unit": ("step", place(0, 0, encoders=(0,)), r"'s0' has 2 encoder units, 1 are placed"),
    "over capacity": ("step", whole(capacity=5100), r"rank 1 holds 5,200 tokens; capacity is"),
    "over encoder capacity": (
        "step",
        whole(encoder_capacity=399),
        r"rank 0 holds 700 encoder tokens; encoder_capacity is 399",
    ),
    "label tokens": (
        "step",
        whole(samples=relabelled(9000)),
        r"sample 's0' has 9000 label_tokens; expected 0..8999",
    ),
    "negative labels": (
        "step",
        whole(samples=relabelled(-1)),
        r"sample 's0' has -1 label_tokens; expected 0..8999",
    ),
    "unknown sync": ("step", whole(sync="never"), r"sync is 'never'; expected 'step' or"),
    "unknown chosen": ("step", whole(chosen="me"), r"chosen is 'me'; expected 'dynamic' or"),
    "negative bound": ("step", whole(lower_bound=-1), r"lower_bound is -1 ticks; expected 0 or"),
    "negative homogeneous": (
        "step",
        whole(homogeneous_makespan=-1),
        r"homogeneous_makespan is -1 ticks; expected 0 or",
    ),
    "negative degree": ("step", whole(homogeneous_degree=-1), r"degree is -1; expected 0..4"),
    "degree beyond": (
        "step",
        whole(homogeneous_degree=5, homogeneous_makespan=10**9),
        r"degree is 5; expected 0..4",
    ),
    "a token over capacity": ("step", whole(capacity=5199), r"rank 1 holds 5,200 tokens; capac"),
    "a token over encoder capacity": (
        "step",
        whole(encoder_capacity=699),
        r"rank 0 holds 700 encoder tokens; encoder_capacity is 699",
    ),
    "wrong tokens": (
        "step",
        change(0, tokens_per_rank=(4501, 5199)),
        r"tokens per rank are \[4500, 5200\]; the plan says \[4501, 5199\]",
    ),
    "wrong start": ("step", change(2, start=5), r"microbatch 2 starts at tick 5; its ranks are fr"),
    "wrong parts": ("step", change(1, ticks=5), r"microbatch 1: parts add up to \d+ of 5 ticks"),
    "wrong makespan": ("step", whole(makespan=10**9), r"makespan is 1000000000 ticks; the queues"),
    "wrong price": ("step", slower, r"microbatch 3 takes \d+ ticks"),
    "bound above": ("step", whole(lower_bound=10**9), r"lower_bound 1000000000 is above the make"),
    "above homogeneous": (
        "step",
        whole(homogeneous_degree=1, homogeneous_makespan=10**6),
        r"makespan \d+ is above homogeneous 1000000",
    ),
    "bound above homogeneous": (
        "step",
        whole(homogeneous_degree=1, homogeneous_makespan=1),
        r"lower_bound \d+ is above homogeneous 1\b",
    ),
    "ids": (
        "step",
        whole(samples=dataclasses.replace(SAMPLES, ids=("a",) * 6)),
        r"sample ids are not unique",
    ),
    "nodes": ("step", whole(ranks_per_node=3), r"4 ranks are not whole nodes of 3"),
    "other costs": ("step", whole(costs="mine"), r"made with costs 'mine', not with 'h100_7b'"),
    "uneven queues": (
        "microbatch",
        records(queues=((0, 2), (0,), (1, None), (None, 3))),
        r"queues have lengths \[1, 2\]; expected 2",
    ),
    "two waves at once": (
        "microbatch",
        records(queues=((0, 2), (None, 0), (1, None), (None, 3))),
        r"microbatch 0 is in waves 0 and \(rank 1\) 1",
    ),
    "order against the waves": (
        "microbatch",
        records(queues=((0, 2), (0, None), (None, 1), (3, None))),
        r"the global order does not follow the waves",
    ),
    "wrong wave": ("microbatch", later, r"wave 1 takes 0|wave 1 takes \d+ \+ \d+ ticks; the plan"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_validator_names_a_planted_fault(fault: str) -> None:
    sync, plant, message = FAULTS[fault]
    made = plan(sync)
    validate(made, COSTS)
    with pytest.raises(PlanError, match=message):
        validate(plant(made), COSTS)


def test_limits_that_are_just_met_are_valid() -> None:
    labels = relabelled(8999)
    made = dataclasses.replace(plan(), capacity=5200, encoder_capacity=700, samples=labels)
    end = made.makespan
    full = {"homogeneous_degree": 4, "homogeneous_makespan": end, "lower_bound": end}
    validate(dataclasses.replace(made, **full), COSTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "width", "message"),
    [
        (2, 6, ""),
        (0, 8, ""),
        (1, 3, ""),
        (1, 6, r"ranks 1..6 are not whole half nodes of 2"),
        (2, 5, r"ranks 2..6 are not whole half nodes of 2"),
        (2, 4, r"ranks 2..5 span nodes of 4, yet would fit in one"),
    ],
)
def test_rings_stay_in_a_node_or_are_whole_half_nodes(first: int, width: int, message: str) -> None:
    ranks = tuple(range(first, first + width))

    def make() -> StepPlan:
        return assemble(
            table([5000]),
            microbatches=[(ranks, [(0, ranks)])],
            step=0,
            cluster=Cluster(nodes=2, ranks_per_node=4),
            costs=COSTS,
            config=PlannerConfig(capacity=6000, encoder_capacity=800),
        )

    if message:
        with pytest.raises(PlanError, match=message):
            make()
    else:
        assert make().microbatches[0].ranks == ranks


def test_all_faults_are_named_at_once() -> None:
    broken = without(0)(without(2)(plan()))
    with pytest.raises(PlanError, match=r"'s1' is in no microbatch; sample 's5' is in no"):
        validate(broken)


def test_planned_plans_are_valid() -> None:
    config = PlannerConfig(capacity=6000, encoder_capacity=800)
    cluster = Cluster(nodes=1, ranks_per_node=4)
    validate(plan_step(SAMPLES, step=0, cluster=cluster, costs=COSTS, config=config), COSTS)
