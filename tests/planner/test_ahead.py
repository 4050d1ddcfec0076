from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest

from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.errors import ConfigError, PlanError, SampleError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan, plan_digest
from dynapar.planner import PlannerConfig, plan_ahead, plan_step
from dynapar.workloads import draw

WAIT = 60.0
"""Seconds after which a thread that does not do what it should counts as hung."""

planner = partial(
    plan_step,
    cluster=Cluster(nodes=2, ranks_per_node=4),
    costs=load_costs(None),
    config=PlannerConfig(capacity=16_384, encoder_capacity=65_536),
)


def batches(steps: int | None = None) -> Iterator[SampleTable]:
    for step in count() if steps is None else range(steps):
        yield draw("video", 12, seed=step, longest=100_000)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "dynapar-planner"]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_plans_are_those_made_one_by_one(ahead: int) -> None:
    alone = [planner(table, step=3 + n) for n, table in enumerate(batches(4))]
    with plan_ahead(batches(4), planner, first=3, ahead=ahead) as plans:
        found = list(plans)
    assert [plan.step for plan in found] == [3, 4, 5, 6]
    assert found == alone
    assert list(map(plan_digest, found)) == list(map(plan_digest, alone))
    assert not threads()


def test_the_next_step_is_planned_while_one_trains() -> None:
    begun = [threading.Event() for _ in range(3)]

    def seen(samples: SampleTable, *, step: int) -> StepPlan:
        begun[step].set()
        return planner(samples, step=step)

    with plan_ahead(batches(3), seen, ahead=1) as plans:
        for step, plan in enumerate(plans):
            assert plan.step == step
            # Training goes on here; nobody asks for a plan, and yet the next one is begun.
            assert step == 2 or begun[step + 1].wait(WAIT)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the thread begins to wait."""
    event, wait = threading.Event(), threading.Condition.wait

    def seen(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "dynapar-planner":
            event.set()
        return wait(condition, timeout)

    monkeypatch.setattr(threading.Condition, "wait", seen)
    return event


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_asked_steps_are_begun_and_no_more(ahead: int, idle: threading.Event) -> None:
    begun = []

    def counted(samples: SampleTable, *, step: int) -> StepPlan:
        begun.append(step)
        return planner(samples, step=step)

    with plan_ahead(batches(), counted, ahead=ahead) as plans:
        for taken in range(3):
            assert idle.wait(WAIT)
            assert begun == list(range(taken + ahead))
            idle.clear()
            next(plans)


def failing(samples: SampleTable, *, step: int) -> StepPlan:
    if step == 12:
        raise PlanError("no room")
    return planner(samples, step=step)


def torn() -> Iterator[SampleTable]:
    yield from batches(2)
    raise SampleError("the file ends here")


def test_a_plan_that_fails_is_raised_at_its_step() -> None:
    with plan_ahead(batches(), failing, first=10, ahead=5) as plans:
        assert [next(plans).step for _ in range(2)] == [10, 11]
        for _ in range(2):
            with pytest.raises(PlanError, match=r"^step 12: no room$") as caught:
                next(plans)
        assert str(caught.value.__cause__) == "no room"
    assert not threads()


def test_batches_that_fail_are_raised_at_their_step() -> None:
    with plan_ahead(torn(), planner, first=7, ahead=5) as plans:
        assert [next(plans).step for _ in range(2)] == [7, 8]
        with pytest.raises(SampleError, match="the file ends here") as caught:
            next(plans)
    assert caught.value.__notes__ == ["while planning step 9"]


def test_closing_in_the_middle_ends_the_thread_and_the_batches() -> None:
    closed = threading.Event()

    def watched() -> Iterator[SampleTable]:
        try:
            yield from batches()
        finally:
            closed.set()

    plans = plan_ahead(watched(), planner, ahead=2)
    assert next(plans).step == 0
    plans.close()
    assert not threads()
    assert closed.wait(WAIT)
    with pytest.raises(StopIteration):
        next(plans)
    plans.close()


def test_an_error_of_training_ends_the_thread() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        plan_ahead(batches(), planner, ahead=2) as plans,
    ):
        raise ZeroDivisionError(str(next(plans).step))
    assert not threads()


def test_closing_wakes_who_waits_for_a_plan() -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended = threading.Event()

    def held(samples: SampleTable, *, step: int) -> StepPlan:
        begun.set()
        go_on.wait(WAIT)
        return planner(samples, step=step)

    plans = plan_ahead(batches(), held, ahead=1)

    def train() -> None:
        assert list(plans) == []
        ended.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    assert begun.wait(WAIT)
    closer = threading.Thread(target=plans.close)
    closer.start()
    assert ended.wait(WAIT), "the trainer waits for a plan that nobody will make"
    go_on.set()
    for thread in (trainer, closer):
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.mark.parametrize("plan", [planner, failing])
def test_a_forgotten_planner_ends_its_thread(plan: partial[StepPlan]) -> None:
    plans = plan_ahead(batches(), plan, first=11, ahead=2)
    thread = plans._thread
    next(plans)
    del plans
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_nothing_ahead_is_no_choice() -> None:
    with pytest.raises(ConfigError, match=r"plan_ahead: ahead is 0; expected 1 or more"):
        plan_ahead(batches(), planner, ahead=0)
