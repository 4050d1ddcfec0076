"""The control plane over real gloo ranks: what they agree on, and how they all stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dynapar.control import Agreement, ControlPlane, control_group, lost_reason
from dynapar.errors import ControlError
from dynapar.speeds import Pace
from tests.distributed import TIMEOUT, run_ranks


def plane(rank: int, lines: list[str] | None = None, seconds: float = 60) -> ControlPlane:
    group = control_group(timedelta(seconds=seconds))
    report = lines.append if lines is not None else pytest.fail
    return ControlPlane(group, rank=rank, ranks=3, report=report)


def agree(
    control: ControlPlane, step: int = 4, digest: str = "d1", fingerprint: str = "f1"
) -> Agreement:
    return control.agree(
        step=step,
        digest=digest,
        targets=10,
        planned_targets=10,
        stubs=(),
        fingerprint=fingerprint,
    )


def check_agreement(rank: int) -> None:
    control = plane(rank)
    for step in range(3):
        agreed = control.agree(
            step=step,
            digest=f"digest {step}",
            targets=10**rank,
            planned_targets=10**rank,
            stubs=(),
            fingerprint="f1",
            paces=[Pace(1.0, 0.25 * rank)] * rank,
        )
        assert agreed == Agreement(
            step=step,
            targets=111,
            targets_by_rank=(1, 10, 100),
            planned_by_rank=(1, 10, 100),
            stubs=((), (), ()),
            paces=((), (Pace(1.0, 0.25),), (Pace(1.0, 0.5),) * 2),
        )


def check_counts_that_differ(rank: int) -> None:
    lines: list[str] = []
    control = plane(rank, lines)
    agreed = control.agree(
        step=7,
        digest="d1",
        targets=(100, 70, 31)[rank],
        planned_targets=(100, 90, 30)[rank],
        stubs=((), ("a17", "b2"), ())[rank],
        fingerprint="f1",
    )
    assert agreed.targets == 201
    assert agreed.planned_by_rank == (100, 90, 30)
    assert agreed.stubs == ((), ("a17", "b2"), ())
    expected = [
        "step 7: rank 1 materialised 70 targets where the plan has 90 (stubs: a17, b2)",
        "step 7: rank 2 materialised 31 targets where the plan has 30 (and no stub explains it)",
    ]
    assert lines == (expected if rank == 0 else [])


def check_all_stop(rank: int) -> None:
    """Each difference stops every rank, and with the same words."""
    control = plane(rank)
    with pytest.raises(ControlError, match=r"made different plans: 'd1' on ranks 0, 2; 'd2' on r"):
        agree(control, digest="d2" if rank == 1 else "d1")
    with pytest.raises(ControlError, match=r"'f1' on rank 0; 'f2' on ranks 1-2\. Expected one"):
        agree(control, fingerprint="f1" if rank == 0 else "f2")
    with pytest.raises(ControlError, match=r"on different steps: '4' on ranks 0-1; '5' on rank 2"):
        agree(control, step=5 if rank == 2 else 4)
    assert agree(control).targets == 30


def run_with_a_death(rank: int, folder: Path) -> None:
    """A rank of its own, not of `run_ranks`, which ends the others when one of them dies."""
    init = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=3, timeout=TIMEOUT)
    control = plane(rank)
    agree(control)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ControlError) as caught:
        agree(control, step=5)
    message = str(caught.value)
    assert f"step 5: rank {rank} lost touch with another rank" in message
    assert ".cc:" not in message
    os._exit(0)  # The groups cannot be taken down in good order any more.


def check_a_rank_that_stays_away(rank: int) -> None:
    control = plane(rank, seconds=1)
    agree(control)
    if rank != 1:
        with pytest.raises(ControlError, match=rf"step 5: rank {rank} lost touch"):
            agree(control, step=5)
    # Rank 1 waits here, on a group with a longer timeout, until the others have given up on it.
    dist.barrier()


@pytest.mark.parametrize(
    "check",
    [check_agreement, check_counts_that_differ, check_all_stop, check_a_rank_that_stays_away],
)
def test_three_ranks(check: Callable[[int], None], tmp_path: Path) -> None:
    run_ranks(check, 3, tmp_path)


def test_a_rank_that_died_is_an_error_on_the_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=run_with_a_death, args=(rank, tmp_path)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=90)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[/a/pair.cc:553] Connection closed by peer [127.0.0.1]:1. Look up\nx", None),
        ("Connection closed by peer [127.0.0.1]:1", None),
        ("", "RuntimeError"),
    ],
)
def test_a_lost_ranks_reason_is_short(text: str, reason: str | None) -> None:
    expected = reason or "Connection closed by peer [127.0.0.1]:1"
    assert lost_reason(RuntimeError(text)) == expected


def test_one_rank_needs_no_group() -> None:
    assert agree(ControlPlane(None, rank=0, ranks=1)).targets == 10


def test_ranks_without_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ControlPlane has no group for 2 ranks"):
        ControlPlane(None, rank=0, ranks=2)
