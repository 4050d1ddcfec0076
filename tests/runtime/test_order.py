"""The replay passes what NCCL would run and names what it would not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynapar.errors import SourceError
from dynapar.runtime.order import OrderError, OrderLog, replay


def logs_of(
    *ranks: list[tuple[str, list[tuple[int, int]], list[tuple[int, int]]]],
) -> list[OrderLog]:
    logs = []
    for rank, operations in enumerate(ranks):
        log = OrderLog(rank)
        for communicator, sends, receives in operations:
            log.record(communicator=communicator, operation="rows", sends=sends, receives=receives)
        logs.append(log)
    return logs


def test_a_symmetric_exchange_passes() -> None:
    replay(logs_of([("c", [(1, 8)], [(1, 4)])], [("c", [(0, 4)], [(0, 8)])]))


def test_a_ring_of_three_passes_and_a_later_pair_too() -> None:
    ring = [("c", [((r + 1) % 3, 8)], [((r + 2) % 3, 8)]) for r in range(3)]
    pair = [("c", [(1, 2)], []), ("c", [], [(0, 2)])]
    replay(logs_of([ring[0], pair[0]], [ring[1], pair[1]], [ring[2]]))


def test_two_messages_in_crossed_order_are_a_cycle() -> None:
    first = [("a", [(1, 8)], []), ("b", [], [(1, 8)])]
    second = [("b", [(0, 8)], []), ("a", [], [(0, 8)])]
    with pytest.raises(OrderError, match=r"rank 0 is at operation 0 .* waits for rank 1; rank 1"):
        replay(logs_of(first, second))


def test_a_cycle_over_three_ranks_is_named() -> None:
    # Each rank first sends to the next one and only then receives: nobody is at work on both ends.
    ranks = [[("c", [((r + 1) % 3, 8)], []), ("c", [], [((r + 2) % 3, 8)])] for r in range(3)]
    with pytest.raises(OrderError, match=r"rank 0 .* waits for rank 1; rank 1 .* waits for rank 2"):
        replay(logs_of(*ranks))


def test_a_reduction_ahead_of_a_ring_is_a_cycle() -> None:
    """The hazard that the closing pass exists for: gloo would get through."""
    early, late = OrderLog(0), OrderLog(1)
    early.record_collective(communicator="data", operation="all_reduce", members=(0, 1), size=64)
    for log, peer in ((early, 1), (late, 0)):
        log.record(communicator="ring", operation="rows", sends=[(peer, 8)], receives=[(peer, 8)])
    late.record_collective(communicator="data", operation="all_reduce", members=(0, 1), size=64)
    with pytest.raises(OrderError, match="all_reduce"):
        replay([early, late])


def test_a_lost_message_and_unequal_ends_are_named() -> None:
    with pytest.raises(OrderError, match=r"message 0 from rank 0 to rank 1 .* rank 0 alone"):
        replay(logs_of([("c", [(1, 8)], [])], []))
    with pytest.raises(OrderError, match="8 bytes on rank 0 and 4 on rank 1"):
        replay(logs_of([("c", [(1, 8)], [])], [("c", [], [(0, 4)])]))


def test_collectives_that_differ_are_named() -> None:
    logs = [OrderLog(rank) for rank in range(2)]
    logs[0].record_collective(communicator="d", operation="all_reduce", members=(0, 1), size=64)
    logs[1].record_collective(communicator="d", operation="broadcast", members=(0, 1), size=64)
    with pytest.raises(OrderError, match=r"rank . issued .* rank . "):
        replay(logs)


def test_a_log_survives_its_file(tmp_path: Path) -> None:
    log = logs_of([("c", [(1, 8)], [(1, 4)])])[0]
    log.record_collective(communicator="d", operation="all_reduce", members=(0, 1), size=64)
    log.save(tmp_path / "log")
    assert OrderLog.load(tmp_path / "log") == log


@pytest.mark.parametrize("text", ["[]\n", "nonsense\n", '{"rank": 0}\n[1]\n', "{}\n"])
def test_a_file_that_is_no_order_log_is_bad_input(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text(text)
    with pytest.raises(SourceError, match=r"bad is not an order log \(.*order_steps") as caught:
        OrderLog.load(tmp_path / "bad")
    assert caught.value.exit_code == 2
