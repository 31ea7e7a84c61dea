"""Runs one stage of smoke in a process group of its own, with hard limits, so that smoke always ends.

The program of a stage calls ``begin`` first, ``mark`` before every step that might hang and ``finish`` at the end; its
parent reads those marks, so that it can say where a stage stopped. Standard library only.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from app.hardware.report import Report, failed
from app.smoke.explain import explain

ROOT = Path(__file__).resolve().parents[2]  #: the project folder, /opt/kit in an image
_FILE = "KIT_STAGE_FILE"
_TAIL = 20_000  #: characters of a stage's output that are kept


# ---- in the stage's own process


def begin() -> None:
    """Let the parent ask this process where it hangs (SIGUSR1 prints every thread's stack on stderr)."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    mark("started")


def mark(step: str) -> None:
    """Say which step begins now. Does nothing when the stage runs by itself."""
    _tell({"mark": step})


def tell(**data: Any) -> None:
    """Hand figures to the parent before the end, so that they are kept if a later step hangs."""
    _tell({"data": data})


def finish(reports: Sequence[Report] = (), **data: Any) -> None:
    """Hand the reports and any figures to the parent; prints them as JSON when the stage runs by itself."""
    message = {"reports": [asdict(report) for report in reports], "data": data}
    if not _tell(message):
        print(json.dumps(message, indent=2, ensure_ascii=False))


def _tell(message: dict[str, Any]) -> bool:
    path = os.environ.get(_FILE)
    if not path:
        return False
    line = json.dumps(message) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
    return True


# ---- in the parent


@dataclass
class Outcome:
    """How a stage ended. ``code`` is the exit status (negative: the signal), None when it was ended for hanging."""

    code: int | None
    hung: str  #: which limit was passed, or ""
    seconds: float
    marks: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    output: str = ""  #: the end of stdout and stderr together

    @property
    def finished(self) -> bool:
        """True when the stage came to its end and said so; its reports may still say failed."""
        return self.code == 0 and not self.hung

    @property
    def last(self) -> str:
        """The last step that began."""
        return self.marks[-1] if self.marks else "nothing"

    def words(self) -> str:
        """How it ended, for a report."""
        if self.hung:
            return f"{self.hung} in step '{self.last}'"
        if self.code is not None and self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name} in step '{self.last}'"
        return f"ended with exit status {self.code} in step '{self.last}'"


class Stage:
    """A running stage: a command in its own process group.

    ``limit`` is the wall time it may take, ``quiet`` the time it may stay without a new mark, both in seconds. The
    environment is the caller's, so the user's NCCL variables reach it, plus ``extra``.
    """

    def __init__(
        self, command: Sequence[str], *, limit: float, quiet: float, extra: Mapping[str, str] | None = None
    ) -> None:
        self.limit, self.quiet = limit, quiet
        self._folder = tempfile.TemporaryDirectory(prefix="smoke-")
        self._file = Path(self._folder.name, "marks")
        self._file.touch()
        self._output: IO[bytes] = open(Path(self._folder.name, "output"), "w+b")  # noqa: SIM115 - closed in outcome()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            **(extra or {}),
            _FILE: str(self._file),
        }
        self._start, self._wall = time.monotonic(), time.time()
        self._hung = ""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def lines(self) -> list[dict[str, Any]]:
        """What the stage has said so far. A line that is being written is left for later."""
        whole = self._file.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def marks(self) -> list[str]:
        """The steps that have begun."""
        return [line["mark"] for line in self.lines() if "mark" in line]

    def running(self) -> bool:
        """Whether the stage still runs; ends it when a limit has passed."""
        if self._process.poll() is not None:
            return False
        now = time.monotonic()
        # Marks are appended, so the file's time is the time of the last one. It is wall time: compare with wall time.
        silent = min(now - self._start, time.time() - self._file.stat().st_mtime)
        if now - self._start > self.limit:
            self.end(f"took longer than {self.limit:.0f} s")
        elif silent > self.quiet:
            self.end(f"made no progress for {self.quiet:.0f} s")
        else:
            return True
        return False

    def status(self) -> tuple[int | None, str]:
        """Exit status so far (None while it runs) and the limit that was passed, or ""."""
        return self._process.poll(), self._hung

    def end(self, why: str) -> None:
        """End the whole process group; ``why`` becomes the outcome's ``hung``. Asks for the stacks first."""
        self._hung = why
        if self._process.poll() is None:
            # Only a stage that has begun has a handler for this signal; a launcher in front of it would just die.
            if self.marks():
                _signal_group(self._process.pid, signal.SIGUSR1)
                time.sleep(0.3)
            _signal_group(self._process.pid, signal.SIGKILL)

    def outcome(self) -> Outcome:
        """Wait for the end, sweep up what is left of the group, and tell how it went."""
        while self.running():
            time.sleep(0.05)
        try:
            code: int | None = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # in the kernel, waiting for a driver: nothing can end it
            code = None
            self._hung += " and cannot be killed (it waits inside the driver)"
        _signal_group(self._process.pid, signal.SIGKILL)  # grandchildren, such as data loader workers
        said = self.lines()
        # A parent that waits for several stages in turn comes late to this one: the last mark tells when it was done.
        late = time.monotonic() - self._start
        seconds = min(late, self._file.stat().st_mtime - self._wall) if code == 0 and said else late
        self._output.seek(0)
        output = self._output.read().decode("utf-8", errors="replace")[-_TAIL:]
        self._output.close()
        self._folder.cleanup()
        reports = [Report(**report) for line in said for report in line.get("reports", [])]
        data = {key: value for line in said for key, value in line.get("data", {}).items()}
        marks = [line["mark"] for line in said if "mark" in line]
        return Outcome(None if self._hung else code, self._hung, seconds, marks, reports, data, output)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # gone already, or only a zombie is left
        return


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this project in this environment."""
    return [sys.executable, "-m", name, *arguments]


def reports_of(name: str, outcome: Outcome, fix: str) -> list[Report]:
    """The stage's own reports, or one that says how it broke off. Wall time goes to the first."""
    if outcome.finished and outcome.reports:
        reports = outcome.reports
    else:
        reports = [*outcome.reports, broken(name, outcome, fix)]
    if not reports[0].seconds:
        reports[0].seconds = round(outcome.seconds, 2)
    return reports


def broken(name: str, outcome: Outcome, fix: str, subject: str = "the stage") -> Report:
    """A failed report for a stage that did not come to its end; the cause is looked up in its output."""
    known = explain(outcome.output)
    last = last_words(outcome.output)
    return failed(
        name,
        f"{subject} {outcome.words()}" + (f": {last}" if last else ""),
        known.cause if known else "not in the catalogue of failures; the end of its output is in the JSON report",
        known.fix if known else fix,
        output=outcome.output[-4000:],
        marks=outcome.marks,
        seconds=round(outcome.seconds, 2),
    )


def last_words(output: str) -> str:
    """The line of an output that most likely names the error: the last exception, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        if "Error" in line.split(":", 1)[0] and ":" in line:
            return line[:300]
    return lines[-1][:300] if lines else ""
