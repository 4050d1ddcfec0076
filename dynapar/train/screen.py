"""What a run shows while it runs: plain lines, and a bar below them on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Screen:
    """Prints a run's lines; quiet on all ranks but the first."""

    def __init__(self, *, steps: int, start: int, show: bool):
        """Show steps `start` to `steps`; nothing at all without `show`."""
        self._show = show
        self._bar: Progress | None = None
        if show and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            )
            self._task = self._bar.add_task("training", total=steps, completed=start)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._show:
            print(line, flush=True)

    def done(self, steps: int) -> None:
        """Move the bar to `steps` steps done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=steps)
