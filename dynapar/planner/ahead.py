"""Plan the next steps in a thread while a step trains.

The kernels release the interpreter's lock, so planning costs training next to nothing and a step
finds its plan ready. What is planned depends on the batches alone: neither on how far ahead nor
on when.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self

from dynapar.errors import ConfigError, PlanError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan


class PlanStep(Protocol):
    """Plans one step; the same on every rank. `partial(plan_step, cluster=...)` is one."""

    def __call__(self, samples: SampleTable, /, *, step: int) -> StepPlan:
        """The plan of `samples`, the whole global batch, as that of step `step`."""


def plan_ahead(
    batches: Iterable[SampleTable], plan: PlanStep, *, first: int = 0, ahead: int = 2
) -> PlanAhead:
    """Plan steps in a thread of their own, up to `ahead` of them before they are asked for.

    Planning begins at once. To plan on every rank of any trainer, with rows from its sampler:

        batches = (table.draw(rows) for rows in sampler)
        planner = partial(plan_step, cluster=cluster, costs=costs, config=config)
        with plan_ahead(batches, planner, ahead=2) as plans:
            for plan in plans:
                for microbatch in plan.of_rank(rank):
                    ...

    Args:
        batches: The samples of each step, in order; drawn in the thread, when the step is begun.
        plan: Plans a step, in the thread.
        first: Number of the first step.
        ahead: Steps that may be planned or in work and not yet taken, 1 or more.

    Returns:
        An iterator of plans. Whatever fails in the thread is raised there when its step is asked
        for, with the step's number: in the message of a PlanError, in a note of other errors.

    Raises:
        ConfigError: `ahead` is below 1.
    """
    return PlanAhead(batches, plan, first=first, ahead=ahead)


class PlanAhead(Iterator[StepPlan]):
    """The plans of `plan_ahead`; close it, or use it in a `with` statement.

    Forgotten without either, its thread ends after the step in work. One thread takes plans.
    """

    def __init__(
        self, batches: Iterable[SampleTable], plan: PlanStep, *, first: int, ahead: int
    ) -> None:
        """Start planning; the arguments are those of `plan_ahead`."""
        if ahead < 1:
            raise ConfigError(f"plan_ahead: ahead is {ahead}; expected 1 or more")
        # The thread knows the state and not this object, which therefore can become garbage.
        self._state = _State(taken=first, ahead=ahead)
        self._thread = threading.Thread(
            target=_work,
            args=(self._state, iter(batches), plan, first),
            name="dynapar-planner",
            daemon=True,
        )
        weakref.finalize(self, _stop, weakref.ref(self._state))
        self._thread.start()

    def __next__(self) -> StepPlan:
        """The plan of the next step; waits for it.

        Raises:
            PlanError: The step cannot be planned; the message begins with its number.
            StopIteration: There are no more batches, or this is closed.
        """
        return self._state.take()

    def close(self) -> None:
        """End the thread after the step in work, and drop what was not taken."""
        self._state.stop()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _State:
    """What the thread and its consumer share."""

    def __init__(self, *, taken: int, ahead: int) -> None:
        self._taken, self._ahead = taken, ahead
        self._ready: deque[StepPlan] = deque()
        self._failure: BaseException | None = None
        self._stopped = self._ended = False
        self._changed = threading.Condition()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def take(self) -> StepPlan:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
            if self._ready:
                self._taken += 1
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failure is not None and not self._stopped:
                raise self._failure
        raise StopIteration

    def may_begin(self, step: int) -> bool:
        """Wait until a step may be begun; False when it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: step < self._taken + self._ahead or self._stopped)
            return not self._stopped

    def put(self, plan: StepPlan) -> None:
        with self._changed:
            if not self._stopped:
                self._ready.append(plan)
                self._changed.notify_all()

    def end(self, failure: BaseException | None = None) -> None:
        with self._changed:
            self._failure, self._ended = failure, True
            self._changed.notify_all()


def _stop(reference: weakref.ref[_State]) -> None:
    """End the thread, which alone keeps the state, of an object that is garbage."""
    if (state := reference()) is not None:
        state.stop()


def _work(state: _State, batches: Iterator[SampleTable], plan: PlanStep, first: int) -> None:
    step = first
    try:
        while state.may_begin(step):
            try:
                samples = next(batches)
            except StopIteration:
                break
            state.put(plan(samples, step=step))
            step += 1
    except PlanError as error:
        numbered = PlanError(f"step {step}: {error}")
        numbered.__cause__ = error
        state.end(numbered)
    except BaseException as error:  # handed to the consumer, who raises it
        error.add_note(f"while planning step {step}")
        state.end(error)
    else:
        state.end()
