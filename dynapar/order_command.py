"""The command `dynapar check-order`: read the ranks' order logs of a run and replay them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dynapar.console import Cell, show_json, show_table
from dynapar.errors import SourceError
from dynapar.runtime.order import OrderLog, replay

PATTERN = "order_*.jsonl"


def check_order_command(run_dir: Path, *, json: bool) -> None:
    """Replay what the ranks of a run issued, and print what was replayed.

    Args:
        run_dir: The run's folder, with one log a rank.
        json: Print one JSON list instead of the table.

    Raises:
        SourceError: There is no log, or not one of each rank, or one that cannot be read.
        OrderError: Ranks would wait for each other, or the two ends of a message differ.
    """
    logs = read_logs(run_dir)
    replay(logs)
    cut = [f"order_{log.rank}.jsonl" for log in logs if log.cut]
    title = f"{run_dir}: the order holds"
    if cut:
        title += f" as far as it is known: {', '.join(cut)} was cut off while it was written"
    elif not any(log.operations for log in logs):
        title = f"{run_dir}: nothing was exchanged, so there is no order to check"
    rows = [_row(log) for log in logs]
    show_json(rows) if json else show_table(title, rows)


def read_logs(run_dir: Path) -> list[OrderLog]:
    """The logs of a run's ranks, by rank.

    Raises:
        SourceError: There is none, one cannot be read, a rank has two, or a rank that others
            exchange with has none.
    """
    if not run_dir.is_dir():
        raise SourceError(f"{run_dir} is no folder; expected the folder of a run")
    paths = sorted(run_dir.glob(PATTERN))
    if not paths:
        raise SourceError(
            f"{run_dir} has no order_RANK.jsonl; expected the folder of a run. Train with "
            "order_steps above 0, which writes them after so many steps"
        )
    logs = sorted((OrderLog.load(path) for path in paths), key=lambda log: log.rank)
    counts = Counter(log.rank for log in logs)
    if twice := [rank for rank, count in counts.items() if count > 1]:
        raise SourceError(
            f"{run_dir} has {counts[twice[0]]} order logs of rank {twice[0]}; expected one a rank. "
            "Move copies out of the folder"
        )
    if missing := sorted(_named(logs) - set(counts)):
        raise SourceError(
            f"{run_dir} has no order log of {_ranks(missing)}, which the others exchange with; "
            "expected one a rank. The run died before all were written: run it again"
        )
    return logs


def _named(logs: Sequence[OrderLog]) -> set[int]:
    """Every rank that a log speaks of."""
    return {
        rank
        for log in logs
        for op in log.operations
        for rank in (*op.members, *(peer for peer, _ in (*op.sends, *op.receives)))
    }


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _row(log: OrderLog) -> dict[str, Cell]:
    return {
        "rank": log.rank,
        "operations": len(log.operations),
        "messages": sum(len(op.sends) + len(op.receives) for op in log.operations),
        "bytes sent": sum(count for op in log.operations for _, count in op.sends),
    }
