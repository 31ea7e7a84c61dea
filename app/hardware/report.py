"""One finding of smoke or doctor, the same shape for both, with its table for people and its JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

PASSED = "passed"
FAILED = "failed"
WARNING = "warning"
SKIPPED = "skipped"

_COLOURS = {PASSED: "green", FAILED: "bold red", WARNING: "yellow", SKIPPED: "dim"}


@dataclass
class Report:
    """One check and what came of it.

    ``summary`` says what was seen and, where something was expected, the rule that gave the expectation. ``cause`` and
    ``fix`` are filled for anything that is not plainly good; a skipped check says why in ``summary``. ``seconds`` is
    wall time. ``data`` holds the figures, units in their names.
    """

    name: str
    status: str
    summary: str
    cause: str = ""
    fix: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)


def passed(name: str, summary: str, **data: Any) -> Report:
    """A check that was made and is good."""
    return Report(name, PASSED, summary, data=data)


def failed(name: str, summary: str, cause: str, fix: str, **data: Any) -> Report:
    """A check that was made and is bad: training would fail, or give wrong numbers."""
    return Report(name, FAILED, summary, cause, fix, data=data)


def warning(name: str, summary: str, cause: str, fix: str, **data: Any) -> Report:
    """A check that was made: training works, but slower or less safely than this machine could."""
    return Report(name, WARNING, summary, cause, fix, data=data)


def skipped(name: str, why: str, **data: Any) -> Report:
    """A check that was not made, and why. Never counts as passed."""
    return Report(name, SKIPPED, why, data=data)


def timed(check: Callable[[], list[Report]]) -> list[Report]:
    """Run a check and put its wall time (seconds) into its first report."""
    start = perf_counter()
    reports = check()
    if reports and not reports[0].seconds:
        reports[0].seconds = round(perf_counter() - start, 3)
    return reports


def exit_code(reports: Iterable[Report]) -> int:
    """1 if anything failed, else 0. Warnings and skipped checks do not fail a run."""
    return int(any(report.status == FAILED for report in reports))


def counts(reports: Iterable[Report]) -> dict[str, int]:
    """How many reports have each status; every status is present."""
    total = {PASSED: 0, FAILED: 0, WARNING: 0, SKIPPED: 0}
    for report in reports:
        total[report.status] += 1
    return total


def write_json(path: Path, program: str, verdict: str, reports: list[Report]) -> None:
    """Write all reports for programs; creates the folder. Raises OSError when the path cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "program": program,
        "verdict": verdict,
        "exit_code": exit_code(reports),
        "counts": counts(reports),
        "reports": [asdict(report) for report in reports],
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show(program: str, reports: list[Report]) -> None:
    """Print the table for people on stdout: one row a check, cause and fix beneath what is not good."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:  # a pipe or a log file: 80 columns would fold every sentence
        console = Console(width=140)
    table = Table(title=program, title_justify="left", show_lines=False, expand=False)
    for column in ("check", "status", "what was seen", "s"):
        table.add_column(column, justify="right" if column == "s" else "left", overflow="fold")
    for report in reports:
        text = Text(report.summary)
        for label, more in (("cause: ", report.cause), ("fix: ", report.fix)):
            if more:
                text.append("\n" + label, style="bold")
                text.append(more)
        status = Text(report.status, style=_COLOURS[report.status])
        table.add_row(report.name, status, text, f"{report.seconds:.1f}" if report.seconds else "")
    console.print(table)
    console.print(", ".join(f"{number} {status}" for status, number in counts(reports).items() if number))
