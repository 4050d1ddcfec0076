"""Have all ranks agree on a step before it starts, ahead of training and off its groups.

One message a rank and step, on a gloo group that nothing else uses and only the loader's thread
calls, so that no exchange of training ever queues behind it. Every rank sees all messages and
judges them alike: ranks either all go on or all stop with the same error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import NamedTuple

import torch.distributed as dist

from dynapar.errors import ControlError
from dynapar.speeds import Pace

_logger = logging.getLogger(__name__)


class _Message(NamedTuple):
    """What one rank says about a step."""

    step: int
    digest: str
    fingerprint: str
    targets: int
    planned_targets: int
    stubs: tuple[str, ...]
    paces: tuple[Pace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know of a step after `ControlPlane.agree`; equal on all of them."""

    step: int
    targets: int
    """Targets of the whole step, as materialised: the N of the gradient rule."""
    targets_by_rank: tuple[int, ...]
    planned_by_rank: tuple[int, ...]
    """Targets that the plan expected each rank to count."""
    stubs: tuple[tuple[str, ...], ...]
    """By rank, the ids of the samples that it could not load."""
    paces: tuple[tuple[Pace, ...], ...]
    """By rank, what it measured in finished steps, as it was handed in."""


class ControlPlane:
    """One rank's end of the agreement; `agree` is a collective call of all ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        ranks: int,
        report: Callable[[str], None] = _logger.warning,
    ) -> None:
        """Use `group` for nothing else.

        Args:
            group: A gloo group of all ranks with a timeout (see `control_group`); None when there
                is one rank.
            rank: This rank.
            ranks: Ranks of the group.
            report: Gets, on rank 0 alone, a line for each rank whose materialised targets differ
                from the planned ones.

        Raises:
            ValueError: More ranks than one, and no group.
        """
        if group is None and ranks != 1:
            raise ValueError(f"ControlPlane has no group for {ranks} ranks; pass control_group()")
        self._group = group
        self._rank = rank
        self._ranks = ranks
        self._report = report

    def agree(
        self,
        *,
        step: int,
        digest: str,
        targets: int,
        planned_targets: int,
        stubs: Sequence[str],
        fingerprint: str,
        paces: Sequence[Pace] = (),
    ) -> Agreement:
        """Exchange what this rank knows of a step and check that all ranks mean the same one.

        A rank may learn here that another one could not load a sample that both share. All ranks
        see that, so all can make it a stub and agree on the same step once more.

        Args:
            step: The step; all ranks ask for the same one.
            digest: Of this rank's plan.
            targets: Targets that this rank counts, as materialised. Each target of the step is
                counted by one rank.
            planned_targets: The same by the plan.
            stubs: Ids of samples that this rank could not load.
            fingerprint: Of the index that this rank reads.
            paces: Measured in finished steps, to be handed to all ranks.

        Raises:
            ControlError: Steps, fingerprints or digests differ (both values and their ranks are
                named, on every rank), or a rank is gone or stays away longer than the timeout.
        """
        message = _Message(
            step, digest, fingerprint, targets, planned_targets, tuple(stubs), tuple(paces)
        )
        messages = self._gather(message)
        _check_equal(step, "work on different steps", [str(m.step) for m in messages])
        _check_equal(step, "read indexes of different content", [m.fingerprint for m in messages])
        _check_equal(step, "made different plans", [m.digest for m in messages])
        if self._rank == 0:
            for rank, said in enumerate(messages):
                if said.targets != said.planned_targets:
                    self._report(_difference(rank, said))
        return Agreement(
            step=step,
            targets=sum(m.targets for m in messages),
            targets_by_rank=tuple(m.targets for m in messages),
            planned_by_rank=tuple(m.planned_targets for m in messages),
            stubs=tuple(m.stubs for m in messages),
            paces=tuple(m.paces for m in messages),
        )

    def _gather(self, message: _Message) -> list[_Message]:
        if self._group is None:
            return [message]
        messages = [message] * self._ranks
        try:
            dist.all_gather_object(messages, message, group=self._group)
        except RuntimeError as error:
            raise ControlError(
                f"step {message.step}: rank {self._rank} lost touch with another rank while "
                f"agreeing on the step ({lost_reason(error)}). A rank ended or "
                "hangs: look for the first error in the logs of the other ranks"
            ) from error
        return messages


def lost_reason(error: BaseException) -> str:
    """Why a message between ranks failed, short enough for a line.

    Gloo's text begins with the place in its source and ends with advice; both are left out.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S*\.cc:\d+\] ", "", lines[0]).split(". ")[0]


def control_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make the control plane's gloo group; a collective call of all ranks of the run.

    Args:
        timeout: Longest wait for the slowest rank's loader. A rank that stays away longer ends
            the others with an error.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _check_equal(step: int, what: str, values: Sequence[str]) -> None:
    """Raise when the ranks' values differ, with each value and its ranks."""
    if len(set(values)) == 1:
        return
    first = {value: values.index(value) for value in reversed(values)}
    by_value = sorted(range(len(values)), key=lambda rank: first[values[rank]])
    groups = [
        f"{values[members[0]]!r} on {_named(members)}"
        for _, found in groupby(by_value, key=lambda rank: values[rank])
        for members in [list(found)]
    ]
    raise ControlError(
        f"step {step}: the ranks {what}: {'; '.join(groups)}. Expected one value: give all ranks "
        "the same index, costs, configuration and version of dynapar"
    )


def _named(ranks: Sequence[int]) -> str:
    """Ascending ranks as text, runs shortened: "ranks 0-2, 5"."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(texts)


def _difference(rank: int, said: _Message) -> str:
    why = f"stubs: {', '.join(said.stubs)}" if said.stubs else "and no stub explains it"
    return (
        f"step {said.step}: rank {rank} materialised {said.targets} targets where the plan has "
        f"{said.planned_targets} ({why})"
    )
