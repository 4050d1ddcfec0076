"""`dynapar check-order` on whole runs, on runs that were cut off, and on what is no run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynapar.errors import SourceError
from dynapar.order_command import check_order_command, read_logs
from dynapar.runtime.order import OrderError, OrderLog

Batch = tuple[str, dict[int, int]]
"""A communicator, and the bytes exchanged with each peer, both ways."""


def save(folder: Path, *ranks: list[Batch]) -> None:
    for rank, batches in enumerate(ranks):
        log = OrderLog(rank)
        for communicator, peers in batches:
            rows = list(peers.items())
            log.record(communicator=communicator, operation="rows", sends=rows, receives=rows)
        log.save(folder / f"order_{rank}.jsonl")


def cut(folder: Path, rank: int, *, lines: int, rest: str = '["exchange", "ro') -> None:
    """Leave so many whole lines of a rank's log, and the beginning of one more."""
    path = folder / f"order_{rank}.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:lines]
    path.write_text("".join(kept) + rest)


PAIR: Batch = ("exchange", {1: 8})
BACK: Batch = ("exchange", {0: 8})


def test_a_log_that_was_cut_off_is_checked_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, [PAIR] * 3, [BACK] * 3)
    cut(tmp_path, 1, lines=2)
    check_order_command(tmp_path, json=False)
    title = capsys.readouterr().out.splitlines()[0].strip()
    assert title == (
        f"{tmp_path}: the order holds as far as it is known: order_1.jsonl was cut off while it "
        "was written"
    )
    check_order_command(tmp_path, json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["operations"] for row in rows] == [3, 1]


def test_a_rank_that_waits_for_one_that_was_cut_off_excuses_those_behind_it(
    tmp_path: Path,
) -> None:
    """2 waits for 1, which waits for 0, whose log ends."""
    save(
        tmp_path,
        [("exchange", {1: 8})],
        [("exchange", {0: 8}), ("exchange", {2: 4})],
        [("exchange", {1: 4})],
    )
    cut(tmp_path, 0, lines=1)
    check_order_command(tmp_path, json=True)


def test_a_cycle_beside_a_cut_is_still_named(tmp_path: Path) -> None:
    """0 waits for 2, whose log ends, but also for 1, which waits for 0 in the other order."""
    save(
        tmp_path,
        [("a", {1: 8, 2: 8}), ("b", {1: 8})],
        [("b", {0: 8}), ("a", {0: 8})],
        [("a", {0: 8})],
    )
    cut(tmp_path, 2, lines=1)
    with pytest.raises(OrderError) as caught:
        check_order_command(tmp_path, json=False)
    assert str(caught.value) == (
        "ranks wait for each other under NCCL's order: rank 0 is at operation 0 (rows on 'a') and "
        "waits for rank 1; rank 1 is at operation 0 (rows on 'b') and waits for rank 0"
    )


def test_without_a_cut_a_missing_end_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, [PAIR, PAIR], [BACK])
    with pytest.raises(OrderError, match=r"message 1 from rank 0 to rank 1 .* by rank 0 alone"):
        check_order_command(tmp_path, json=False)


def test_ranks_without_a_log_are_named(tmp_path: Path) -> None:
    save(tmp_path, [("exchange", {1: 8, 3: 8})], [BACK], [])
    with pytest.raises(SourceError) as caught:
        read_logs(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no order log of rank 3, which the others exchange with; expected one a "
        "rank. The run died before all were written: run it again"
    )


def test_the_members_of_a_collective_need_a_log(tmp_path: Path) -> None:
    log = OrderLog(0)
    log.record_collective(communicator="data", operation="sum", members=(0, 1, 2), size=8)
    log.save(tmp_path / "order_0.jsonl")
    with pytest.raises(SourceError, match="has no order log of ranks 1, 2, which"):
        read_logs(tmp_path)


def test_two_logs_of_a_rank_are_refused(tmp_path: Path) -> None:
    save(tmp_path, [])
    (tmp_path / "order_copy.jsonl").write_text((tmp_path / "order_0.jsonl").read_text())
    with pytest.raises(SourceError, match="has 2 order logs of rank 0; expected one a rank"):
        read_logs(tmp_path)


def test_a_rank_alone_has_nothing_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, [])
    check_order_command(tmp_path, json=False)
    title = capsys.readouterr().out.splitlines()[0].strip()
    assert title == f"{tmp_path}: nothing was exchanged, so there is no order to check"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "order_0.jsonl is empty; expected an order log. The run died while it wrote it"),
        ('{"version": 1, "ra', "order_0.jsonl is cut off in its first line; expected an order"),
        ('{"version": 1, "rank": 0}\n[]\n', r"is not an order log \(line 2: ValueError"),
        ('{"version": 1, "rank": 0}\n["a", "b"\n[]', r"is not an order log \(line 2: JSONDecode"),
    ],
)
def test_what_is_no_log_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "order_0.jsonl").write_text(text)
    with pytest.raises(SourceError, match=message):
        read_logs(tmp_path)


def test_a_folder_that_is_none_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="none is no folder; expected the folder of a run"):
        read_logs(tmp_path / "none")
    with pytest.raises(SourceError, match=r"has no order_RANK.jsonl; expected the folder of a run"):
        read_logs(tmp_path)


def test_a_log_is_whole_or_not_there(tmp_path: Path) -> None:
    save(tmp_path, [PAIR], [BACK])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["order_0.jsonl", "order_1.jsonl"]
