"""The dynamic candidates where ranks meet in waves.

A wave is as long as its slowest rank, so waves led by the longest samples are peeled off first,
while they idle little; what is left shares one target over all its waves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dynapar.packing.construct import construct
from dynapar.packing.moldable import Jobs, shared_work, without_encoder
from dynapar.packing.peel import leader_targets
from dynapar.packing.refine import refine
from dynapar.packing.ticks import IntArray, Layout
from dynapar.planner.problem import Candidate, Problem, arrange, polish, price
from dynapar.planner.step import FEW, GOOD, Setting, one_by_one, settings

PEELED = 8
"""Most waves that are peeled off."""
LEADERS = 4096
"""Samples that are looked at to size a peeled wave."""
LEAST_FILL = 0.75
"""A wave that is less full than this is not worth peeling."""
WHOLE = 0.5
"""Samples of at most this share of a wave stay whole in wide microbatches, as a rule."""
STEEP = 0.01
"""Peeling ends where it promises a step so much longer."""
FAR = 1.05
"""After a setting so far behind the best, the others are left out."""
STRETCHED = (106, 112, 120)
"""Longer targets, in percent, for steps that come nowhere near the bound."""
PUT_OFF = 0.03
"""More waves are put off where the fewest end so far above their floor."""
CLOSE = 0.02
"""A gap from which evening out may end the search."""
NEAR = 0.03
"""A layout of one degree that is longer by so much may still win once it is evened out."""
REFINED = 100
"""Changes tried on a finished layout, and two more a microbatch."""
ROUNDS = 100
"""Rounds of local search, and one more a rank and wave."""


class Way(NamedTuple):
    """Some waves peeled off, and the samples that are left."""

    order: IntArray
    peeled: tuple[Layout, ...]
    spent: int
    """Ticks of the peeled waves."""


def join(layouts: tuple[Layout, ...]) -> Layout:
    """One layout of several that hold different samples, wave after wave.

    Each layout has columns for all samples, of which it fills its own; units follow samples.
    """
    first = layouts[0]
    wave, offsets, order = [], [np.zeros(1, np.int64)], []
    sample_first, sample_degree = first.sample_first.copy(), first.sample_degree.copy()
    unit_rank = first.unit_rank.copy()
    waves, samples = 0, 0
    for layout in layouts:
        own = layout.order[: layout.offsets[-1]]
        wave.append(layout.wave + waves)
        offsets.append(layout.offsets[1:] + samples)
        order.append(own)
        sample_first[own] = layout.sample_first[own]
        sample_degree[own] = layout.sample_degree[own]
        unit_rank = np.maximum(unit_rank, layout.unit_rank)
        waves += int(layout.wave.max(initial=-1)) + 1
        samples += len(own)
    return Layout(
        first=np.concatenate([layout.first for layout in layouts]),
        width=np.concatenate([layout.width for layout in layouts]),
        wave=np.concatenate(wave),
        offsets=np.concatenate(offsets),
        order=np.concatenate(order),
        sample_first=sample_first,
        sample_degree=sample_degree,
        unit_rank=unit_rank,
    )


def best_waves(problem: Problem, order: IntArray, bound: int) -> list[Candidate]:
    """The dynamic layouts found, the shortest first; one within `GOOD` of the bound is enough."""
    search = _Search(problem, bound)
    few = len(order) <= FEW
    found: list[tuple[int, int, Way]] = []
    for way in search.ways(order):
        search.fill_up(way, found)
        if search.close and search.even_out():
            return search.result(order)
    search.go_on(found)
    if search.close and search.even_out():
        return search.result(order)
    found.sort(key=lambda entry: entry[0])
    choices = settings(problem)
    for _, waves, way in found[: 3 if few else 1]:
        for setting in choices:
            value = search.attempt(way, waves, setting)
            if search.close and search.even_out():
                return search.result(order)
            if not few and search.best is not None and (value or 0) > search.best.makespan * FAR:
                break
    search.stretch(found)
    search.even_out()
    return search.result(order)


def evened(problem: Problem, found: Candidate, bound: int) -> Candidate:
    """A layout of waves after samples have moved between its microbatches; itself if none has.

    Args:
        problem: The step, under sync "microbatch".
        found: Any layout of it.
        bound: Its lower bound, in ticks.
    """
    layout = Layout(*(column.copy() for column in found.layout))
    changes = refine(
        layout, REFINED + 2 * len(layout.first), int(bound * (1 + GOOD / 2)), problem.jobs,
        problem.unit_offsets, problem.unit_tokens, problem.limits, problem.constants,
    )  # fmt: skip
    return price(problem, layout) if changes else found


def evened_single(problem: Problem, dynamic: Candidate, single: Candidate, bound: int) -> Candidate:
    """The shorter of `dynamic` and a layout of one degree that evening out has made one of many.

    Args:
        problem: The step, under sync "microbatch".
        dynamic: The best dynamic layout so far.
        single: The best layout of one degree.
        bound: The lower bound, in ticks.
    """
    near = single.makespan <= dynamic.makespan * (1 + NEAR)
    best = min(dynamic.makespan, single.makespan)
    if not near or best <= bound * (1 + GOOD / 2):
        return dynamic
    found = evened(problem, single, bound)
    return found if found.makespan < dynamic.makespan else dynamic


class _Search:
    """The best candidate so far, and what to try next."""

    def __init__(self, problem: Problem, bound: int) -> None:
        self.problem = problem
        self.bound = bound
        self.best: Candidate | None = None
        self.found: list[Candidate] = []
        self.evened: Candidate | None = None
        """The best one when it was last evened out."""
        limits, costs = problem.limits, problem.constants
        tokens = problem.jobs.tokens.astype(np.float64)
        attention = costs.attention_pair * tokens * (problem.jobs.reach + costs.attention_half)
        work = costs.linear_token * tokens + attention + problem.jobs.encoder_ticks
        self.work = work.astype(np.int64)
        self.least = max(costs.fixed + costs.linear_rank, costs.llm_floor)
        self.room = limits.ranks * limits.capacity
        self.overhead = costs.fixed + costs.linear_rank
        self.put_off: Way | None = None
        """A way of which only the fewest waves have been tried."""
        self.tried: set[tuple[int, int, Setting]] = set()
        """Peeled waves, other waves and setting of each attempt."""

    @property
    def good(self) -> bool:
        return self.best is not None and self.best.makespan <= self.bound * (1 + GOOD)

    @property
    def close(self) -> bool:
        """Whether evening the best layout out may make it good."""
        return self.best is not None and self.best.makespan <= self.bound * (1 + CLOSE)

    def result(self, order: IntArray) -> list[Candidate]:
        if self.best is None:
            return [one_by_one(self.problem, order)]
        return [self.best, *(each for each in self.found if each is not self.best)]

    def even_out(self) -> bool:
        """Move samples between the microbatches of the best layout; whether it is good now."""
        if self.best is not None and self.best is not self.evened and not self.good:
            self.best = self.evened = evened(self.problem, self.best, self.bound)
        return self.good

    def stretch(self, found: list[tuple[int, int, Way]]) -> None:
        """Where nothing comes near the bound, try longer waves, in which rings need fewer ranks."""
        node = min(self.problem.limits.node, self.problem.limits.largest)
        best = self.best
        if best is None or best.makespan <= self.bound * (1 + 2 * CLOSE):
            return
        whole = sorted((waves, value) for value, waves, way in found if not way.peeled)
        several = [(waves, value) for waves, value in whole if waves > 1]
        if not several:
            return
        waves, least = several[0]
        way = next(way for _, _, way in found if not way.peeled)
        for percent in STRETCHED:
            apart = bool(len(self.problem.unit_tokens))
            value = self.attempt(way, waves, Setting(percent, node, node, False, apart))
            if value is None or value >= least:
                break
            least = value

    def fewest(self, order: IntArray, fill: float = 1.0) -> int:
        """Waves that hold the tokens of these samples, filled to this share."""
        tokens = int(self.problem.jobs.tokens[order].sum())
        return max(1, -int(-tokens // (self.room * fill)))

    def even(self, order: IntArray, waves: int) -> int:
        """Length of a wave were all work spread evenly."""
        return self.overhead + int(self.work[order].sum()) // (self.problem.limits.ranks * waves)

    def ways(self, order: IntArray) -> Iterator[Way]:
        """What promises most of nothing peeled, one wave peeled, two, ...: at most three of them.

        Nothing peeled comes first, before any wave is peeled, where it may be good enough.
        """
        whole = Way(order, (), 0)
        least = self.floor(whole, self.fewest(order, 0.99))
        first = least <= self.bound * (1 + GOOD)
        if first:
            yield whole
        promises, way = [(least, whole)], self._peel(whole)
        while way is not None and len(promises) <= PEELED:
            promise = self.floor(way, self.fewest(way.order, 0.99))
            promises.append((promise, way))
            if promise > least * (1 + STEEP):
                break
            least = min(promise, least)
            way = self._peel(way)
        best = sorted(promises, key=lambda entry: entry[0])[:3]
        yield from (way for _, way in best if not (first and way is whole))

    def floor(self, way: Way, waves: int) -> int:
        """What a way with so many more waves hardly falls below: its work shared out evenly."""
        if not len(way.order):
            return way.spent
        problem = self.problem
        target = max(self.even(way.order, waves), self.least)
        if waves == 1:  # the longest sample may rule, not the work
            target = max(target, self.bound - way.spent)
        shared = int(
            shared_work(problem.jobs, way.order, target, problem.limits, problem.constants)
        )
        length = self.overhead * waves + shared // problem.limits.ranks
        return way.spent + max(length, self.least * waves)

    def _peel(self, way: Way) -> Way | None:
        """Peel the fullest wave that the longest sample can lead; None where none is full."""
        problem, order = self.problem, way.order
        if not len(order):
            return None
        if self.work[order[0]] + self.overhead <= self.even(order, self.fewest(order)):
            return None
        jobs, work, width = problem.jobs, self.work, 2
        if len(problem.unit_tokens):
            jobs = self._apart(order, self.fewest(order))
            work, width = work - problem.jobs.encoder_ticks, problem.limits.node
        width = min(width, problem.limits.node, problem.limits.largest)
        targets, fills = leader_targets(
            order[:LEADERS], work, jobs, problem.limits, problem.constants
        )
        # Where even the fastest degree lasts longer than an even wave, there is no way around it.
        forced = len(targets) and targets.min() > self.even(order, self.fewest(order))
        best, best_fill = None, 0.0 if forced else LEAST_FILL
        for k in np.argsort(-fills, kind="stable")[:2]:
            done, strip = construct(
                order, int(targets[k]), width, width, True, True, 1,
                jobs, problem.limits, problem.constants,
            )  # fmt: skip
            inside = strip.microbatch[order] >= 0
            if not done or not inside.any():
                continue
            placed, layout = arrange(problem, strip, waves=1)
            if not placed:
                continue
            length = price(problem, layout).makespan
            fill = int(self.work[order[inside]].sum()) / (
                problem.limits.ranks * max(1, length - self.overhead)
            )
            if fill > best_fill:
                best = Way(order[~inside], (*way.peeled, layout), way.spent + length)
                best_fill = fill
        return best

    def fill_up(self, way: Way, found: list[tuple[int, int, Way]]) -> None:
        """Try the fewest waves for what is left, then more while that helps.

        Where nothing is peeled and the fewest end far above their floor, waves that long samples
        lead may do better: more of them wait until these have been tried.
        """
        self._fill(way, self.fewest(way.order), found, patient=not way.peeled)

    def go_on(self, found: list[tuple[int, int, Way]]) -> None:
        """Try more waves for what `fill_up` has put off."""
        if self.put_off is not None and not self.good:
            self._fill(self.put_off, self.fewest(self.put_off.order) + 1, found, patient=False)

    def _fill(
        self, way: Way, first: int, found: list[tuple[int, int, Way]], *, patient: bool
    ) -> None:
        fewest = self.fewest(way.order)
        node = min(self.problem.limits.node, self.problem.limits.largest)
        setting = Setting(102, min(node, 2), min(node, 2), False)
        if len(self.problem.unit_tokens):
            setting = settings(self.problem)[0]
        last: int | None = None
        for waves in range(first, max(fewest + 2, fewest * 7 // 5 + 1) + 1):
            floor = self.floor(way, waves)
            if self.best is not None and floor >= self.best.makespan:
                break
            value = self.attempt(way, waves, setting)
            if self.good:
                return
            if value is not None and len(way.order):
                found.append((value, waves, way))
            if not len(way.order) or (last is not None and (value is None or value > last)):
                break
            if patient and (value is None or value > floor * (1 + PUT_OFF)):
                self.put_off = way
                break
            last = value if value is not None else last

    def attempt(self, way: Way, waves: int, setting: Setting) -> int | None:
        """Build the rest of a way in so many waves; its value, None where it does not fit."""
        key = (len(way.peeled), waves, setting)
        if key in self.tried:
            return None
        self.tried.add(key)
        layouts = way.peeled
        if len(way.order):
            layout = self._rest(way, waves, setting)
            if layout is None:
                return None
            layouts = (*layouts, layout)
        found = price(self.problem, join(layouts))
        self.found.append(found)
        if self.best is None or found.makespan < self.best.makespan:
            self.best = found
        return found.makespan

    def _rest(self, way: Way, waves: int, setting: Setting) -> Layout | None:
        problem = self.problem
        target, jobs, encoder = self.even(way.order, waves), problem.jobs, 0
        if setting.apart:
            jobs = self._apart(way.order, waves)
            encoder = int(problem.jobs.encoder_ticks[way.order].sum())
            encoder //= problem.limits.ranks * waves
        target = max(target - encoder, self.least)
        if waves == 1:  # the longest sample may rule, not the work
            target = max(target, self.bound - way.spent - encoder)
        done, strip = construct(
            way.order, target * setting.percent // 100, setting.width, setting.ride,
            setting.best_fit, False, waves, jobs, problem.limits, problem.constants,
        )  # fmt: skip
        if not done:
            return None
        if not setting.apart:
            polish(problem, strip, rounds=ROUNDS + problem.limits.ranks * waves)
        placed, layout = arrange(problem, strip, waves=waves)
        return layout if placed else None

    def _apart(self, order: IntArray, waves: int) -> Jobs:
        """Samples whose encoder work is a second load, scaled so that both may fill a wave."""
        jobs = self.problem.jobs
        encoder = max(1, int(jobs.encoder_ticks[order].sum()))
        ranks = self.problem.limits.ranks
        llm = int(self.work[order].sum()) - encoder + ranks * waves * self.overhead
        llm = max(llm, ranks * waves * self.least)
        shadow = (jobs.encoder_ticks * (llm / encoder)).astype(np.int64)
        whole = int(WHOLE * llm / (ranks * waves))
        return without_encoder(jobs, shadow, whole, self.problem.constants)
