"""Plan and load steps ahead of training, each in a thread of its own.

Every rank runs the same loop over steps: draw the samples, plan (the same plan everywhere, without
talking), load what this rank's microbatches hold, agree with the other ranks, prepare. Step s is
begun when fewer than `ahead` steps wait for training, counted in steps that training has taken, not
in what happens to be ready: so after equally many steps all ranks have agreed on equally many, and
a run can stop at any step without leaving a rank behind in the agreement.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self

from dynapar.control import Agreement, ControlPlane
from dynapar.data.grouped import GroupSampler
from dynapar.data.index import Index
from dynapar.data.materialize import Materializer
from dynapar.data.parts import Parts
from dynapar.data.pieces import pieces_of
from dynapar.data.sampler import Sampler
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.data.stubs import StubCount
from dynapar.errors import ConfigError
from dynapar.meta import IntArray, SampleTable
from dynapar.plan import StepPlan, plan_digest
from dynapar.planner import plan_ahead
from dynapar.speeds import Pace, SpeedFollower

PlanStep = Callable[[SampleTable, int], StepPlan]
"""(the step's samples, step) -> its plan; the same on every rank."""

Prepare = Callable[[StepPlan, Mapping[int, LoadedSample]], object]
"""(plan, this rank's samples) -> what training wants made ready in the thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStep:
    """A step as one rank runs it."""

    step: int
    plan: StepPlan
    rows: IntArray
    """(drawn samples,) rows of the index; without trees by row of the plan's sample table."""
    samples: Mapping[int, LoadedSample]
    """By row of the plan: all of this rank's microbatches, with the units that it encodes."""
    targets: int
    """N of the gradient rule: targets of the whole step, over all ranks, without stubs."""
    own_targets: int
    """Targets of the samples whose first rank this is; their sum over the ranks is `targets`."""
    stubs: tuple[str, ...]
    """Ids of the samples that some rank could not load; stubs on all ranks."""
    agreement: Agreement | None
    """What the ranks told each other; None without a control plane."""
    counted: StubCount
    """Stubs of the run up to this step."""
    prepared: object
    """What the `prepare` hook returned; None without one."""
    seconds: float
    """Time that planning and loading took."""


class StepLoader:
    """An iterator of loaded steps; close it, or use it in a `with` statement.

    Attributes:
        follower: Of the ranks' speeds; None where nobody asks about them.
    """

    def __init__(
        self,
        *,
        index: Index,
        sampler: Sampler | GroupSampler,
        materializer: Materializer,
        plan: PlanStep,
        rank: int,
        first: int = 0,
        steps: int | None = None,
        ahead: int = 2,
        control: ControlPlane | None = None,
        prepare: Prepare | None = None,
        stub_limit: float = 0.05,
        counted: StubCount | None = None,
        follower: SpeedFollower | None = None,
    ) -> None:
        """Start loading.

        Args:
            index: Of the source.
            sampler: The order of its samples, at the state to go on from.
            materializer: Loads them.
            plan: Plans a step.
            rank: This rank.
            first: The first step.
            steps: The step before which to end, the same on all ranks; None for no end.
            ahead: Steps that may be ready or in work before training asks for them, 1 or more.
            control: Agrees with the other ranks, from the loader's thread; needed with more than
                one rank, since another rank's stubs and targets are not known without it.
            prepare: Called with each step in the loader's thread, after the agreement.
            stub_limit: Largest share of stubs among all samples of the run, over all ranks; above
                it every rank's loader ends with a SampleError.
            counted: Stubs of the run before `first`; None for none.
            follower: Is told what the ranks measured, at each agreement; its lag is above `ahead`,
                so that `plan` may ask it about the step. None: nobody asks.

        Raises:
            ConfigError: `ahead` is below 1.
        """
        if ahead < 1:
            raise ConfigError(f"StepLoader: ahead is {ahead}; expected 1 or more")
        self._index, self._sampler, self._materializer = index, sampler, materializer
        self._plan, self._rank, self._control, self._prepare = plan, rank, control, prepare
        self._steps, self._ahead = steps, ahead
        self._stub_limit, self._counted = stub_limit, counted or StubCount()
        self._taken, self._taken_count = first, self._counted
        self.follower = follower
        self._ready: deque[LoadedStep] = deque()
        self._paces: list[Pace] = []
        self._failure: BaseException | None = None
        self._closing = self._stopped = self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._work, args=(first,), name="dynapar-loader", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LoadedStep:
        """The next step; waits for it.

        Raises:
            DynaparError: Whatever failed in the thread, with its traceback.
            StopIteration: All steps were taken, or the loader is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                loaded = self._ready.popleft()
                self._taken, self._taken_count = loaded.step + 1, loaded.counted
                self._changed.notify_all()
                return loaded
        if self._failure is not None:
            raise self._failure
        raise StopIteration

    def report(self, pace: Pace) -> None:
        """Hand in what this rank measured in a finished step; the next agreement carries it."""
        with self._changed:
            self._paces.append(pace)

    def state_dict(self) -> dict[str, object]:
        """The sampler's state, the stubs and the speeds before the first step not taken."""
        state: dict[str, object] = {
            **self._sampler.state_dict(self._taken),
            **self._taken_count.state_dict(),
        }
        if self.follower is not None:
            state["speeds"] = self.follower.after(self._taken - 1).to_state()
        return state

    def close(self) -> None:
        """End the thread.

        With a control plane it first goes through the steps that the other ranks' threads, having
        taken as many steps, go through as well, so that no rank waits in vain.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _work(self, first: int) -> None:
        try:
            with plan_ahead(
                self._tables(first),
                lambda samples, *, step: self._plan(samples, step),
                first=first,
                ahead=self._ahead,
            ) as plans:
                try:
                    self._load_steps(first, plans)
                finally:
                    with self._changed:
                        self._stopped = True  # or the planner would wait for training
                        self._changed.notify_all()
        except BaseException as error:  # handed to the consumer, who raises it
            self._failure = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _tables(self, first: int) -> Iterator[SampleTable]:
        """The samples of the steps that may be begun, drawn when they may."""
        for step in count(first):
            if not self._may_begin(step):
                return
            yield self._index.table.draw(self._sampler.rows(step))

    def _load_steps(self, first: int, plans: Iterator[StepPlan]) -> None:
        for step, plan in enumerate(plans, first):
            if not self._may_begin(step):
                return
            loaded = self._load(step, plan)
            with self._changed:
                self._ready.append(loaded)
                self._changed.notify_all()

    def _may_begin(self, step: int) -> bool:
        """Wait until a step may be begun; False when it never will be."""
        if self._steps is not None and step >= self._steps:
            return False
        with self._changed:
            self._changed.wait_for(
                lambda: step < self._taken + self._ahead or self._closing or self._stopped
            )
            due = step < self._taken + self._ahead and not self._stopped
        return due and (not self._closing or self._control is not None)

    def _load(self, step: int, plan: StepPlan) -> LoadedStep:
        began = time.perf_counter()
        rows = self._sampler.rows(step)
        drawn = plan.samples.ids
        if plan.samples.trees is not None:
            drawn = self._index.table.draw(rows).ids
        parts = Parts(
            self._materializer, plan, pieces_of(plan, self._rank, drawn), rows=rows, drawn=drawn
        )
        agreement, stubs, samples = None, parts.stubs(), parts.samples()
        if self._control is not None:
            with self._changed:
                paces, self._paces = self._paces, []
            agreement = self._agree(plan, samples, stubs, paces)
            if any(agreement.stubs):
                # Samples that only another rank failed to load become stubs here as well; then
                # the counts are right, and all ranks know it.
                stubs = tuple(dict.fromkeys(id for ids in agreement.stubs for id in ids))
                parts.make_stubs(stubs)
                samples = parts.samples()
                agreement = self._agree(plan, samples, stubs, paces)
            if self.follower is not None:
                self.follower.observe(step, agreement.paces)
        self._judge_stubs(parts, stubs, drawn=len(rows))
        own = self._own_targets(plan, samples)
        prepared = self._prepare(plan, samples) if self._prepare is not None else None
        return LoadedStep(
            step=step,
            plan=plan,
            rows=rows,
            samples=samples,
            targets=own if agreement is None else agreement.targets,
            own_targets=own,
            stubs=stubs,
            agreement=agreement,
            counted=self._counted,
            prepared=prepared,
            seconds=plan.plan_seconds + time.perf_counter() - began,
        )

    def _judge_stubs(self, parts: Parts, stubs: Sequence[str], *, drawn: int) -> None:
        """Stop on all ranks at once when too many samples of the run are lost."""
        self._counted = self._counted.add(drawn=drawn, stubs=len(stubs))
        if stubs:
            why = parts.reason(stubs[-1]) or "see the other ranks"
            self._counted.check(limit=self._stub_limit, last=f"{stubs[-1]!r}: {why}")

    def _agree(
        self,
        plan: StepPlan,
        samples: Mapping[int, LoadedSample],
        stubs: Sequence[str],
        paces: Sequence[Pace],
    ) -> Agreement:
        assert self._control is not None
        digest = plan_digest(plan)
        if self.follower is not None:
            digest += self.follower.at(plan.step).digest
        return self._control.agree(
            step=plan.step,
            digest=digest,
            targets=self._own_targets(plan, samples),
            planned_targets=sum(
                int(plan.samples.label_tokens[sample]) for sample in _owned(plan, self._rank)
            ),
            stubs=stubs,
            fingerprint=self._index.fingerprint,
            paces=paces,
        )

    def _own_targets(self, plan: StepPlan, samples: Mapping[int, LoadedSample]) -> int:
        return sum(
            int((samples[sample].targets != IGNORE).sum()) for sample in _owned(plan, self._rank)
        )


def _owned(plan: StepPlan, rank: int) -> list[int]:
    """The samples whose targets a rank counts: those whose first rank it is."""
    return [
        placement.sample
        for microbatch in plan.of_rank(rank)
        for placement in microbatch.placements
        if placement.ranks[0] == rank
    ]
