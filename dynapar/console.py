"""How commands show long work and tables: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Advance = Callable[[int, int], None]
"""(done, total), as often as one likes; `total` may change, 0 where it is not known yet."""

Cell = str | int | float


@contextmanager
def progress(label: str) -> Iterator[Advance]:
    """Show how far some work is, on standard error: a bar on a terminal, else a line each tenth.

    Args:
        label: What is being done, such as "indexing data.jsonl".
    """
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total or None)
    else:
        yield _PlainProgress(label)


class _PlainProgress:
    """Prints a line when another tenth is done."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._tenth = 0

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if tenth > self._tenth:
            self._tenth = tenth
            print(f"{self._label}: {done:,} of {total:,}", file=sys.stderr, flush=True)


def first_to_say(text: str, environ: Mapping[str, str]) -> bool:
    """Whether no other rank of this machine has said the same since the run was last started.

    Ranks that torchrun started share a folder, anew at each start, in which each may leave a reply
    to torchrun; the first to say something leaves a file there.

    Args:
        text: What is to be said.
        environ: The environment variables.
    """
    reply = environ.get("TORCHELASTIC_ERROR_FILE")
    if not reply:
        return True
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        (Path(reply).parents[1] / f"said_{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True  # better twice than not at all
    return True


def show_table(title: str, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Print rows with equal keys on standard output; numbers stand to the right."""
    # A pipe has no width: without one, rich folds at 80 columns.
    width = None if sys.stdout.isatty() else 10_000
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    table = Table()
    for name, value in rows[0].items() if rows else ():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(_text, row.values()))
    console.print(title, soft_wrap=True)  # a table's own title is folded to the table's width
    if rows:
        console.print(table)


def _text(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def show_json(value: object) -> None:
    """Print one JSON value on standard output, on one line."""
    print(json.dumps(value, allow_nan=False))
