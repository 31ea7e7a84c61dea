"""What a person sees while training: lines on stderr, and a progress bar only where stderr is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


def say(line: str) -> None:
    """One line for the person at the terminal; stdout is kept for the result."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """A progress bar that is silent where stderr is not a terminal or ``shown`` is False. Use it in a ``with`` block."""

    def __init__(self, title: str, unit: str, total: int | None = None, done: int = 0, shown: bool = True) -> None:
        self._bar: Any = None
        if not (shown and sys.stderr.isatty()):
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = [
            SpinnerColumn(),
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
        ]
        if total is not None:
            columns[2:2] = [BarColumn()]
            columns += [TimeRemainingColumn(), TextColumn("{task.fields[note]}")]
        self._bar = Progress(*columns, console=Console(stderr=True), transient=total is None)
        self._task = self._bar.add_task(title, total=total, completed=done, note="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int = 1, note: str = "") -> None:
        if self._bar:
            self._bar.update(self._task, advance=count, note=note)
