"""Faults that a user can mend, and the exit codes of every program here."""

from __future__ import annotations

DONE = 0
WRONG_INPUT = 2  #: wrong arguments or data
WRONG_MACHINE = 3  #: the machine or the environment does not fit
DIVERGED = 4  #: training diverged
STOPPED = 75  #: stopped by a signal after saving; the same command goes on from there


class Fault(Exception):
    """A fault to be told in one sentence: what is wrong, the value seen, what is allowed, the next command.

    Programs catch it once, in ``main``, print ``error: <sentence>`` on stderr and exit with ``code``.
    """

    def __init__(self, message: str, code: int = WRONG_INPUT) -> None:
        super().__init__(message)
        self.code = code
