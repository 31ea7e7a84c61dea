"""Names the cause of a failure from its text: ``python -m app.smoke.explain FILE`` (``-`` reads stdin).

The catalogue is ``failures.toml``. Standard library only, so that a trainer can call it while it is dying.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10 on the host: the tools lock brings the same reader
    import tomli as tomllib

from app.errors import DONE, WRONG_INPUT

CATALOGUE = Path(__file__).with_name("failures.toml")
_LONGEST_LINE = 400


@dataclass(frozen=True)
class Explanation:
    """A failure that was recognised: its name in the catalogue, why it happens, what to do, and the line that told."""

    name: str
    cause: str
    fix: str
    line: str

    def __str__(self) -> str:
        return f"{self.name}\n  seen:  {self.line}\n  cause: {self.cause}\n  fix:   {self.fix}"


@dataclass(frozen=True)
class _Failure:
    name: str
    pattern: re.Pattern[str]
    cause: str
    fix: str


@cache
def _catalogue() -> tuple[_Failure, ...]:
    data = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
    return tuple(
        _Failure(name, re.compile("|".join(f"(?:{one})" for one in entry["patterns"])), entry["cause"], entry["fix"])
        for name, entry in data.items()
    )


def explain_all(text: str) -> list[Explanation]:
    """Every failure of the catalogue that ``text`` shows, the most telling first; empty when none is known."""
    found = []
    for failure in _catalogue():
        match = failure.pattern.search(text)
        if match:
            start = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.end())
            line = text[start : len(text) if end < 0 else end].strip()
            found.append(Explanation(failure.name, failure.cause, failure.fix, line[:_LONGEST_LINE]))
    return found


def explain(text: str) -> Explanation | None:
    """The most telling failure that ``text`` (a log, or an exception with its trace) shows; None when unknown."""
    found = explain_all(text)
    return found[0] if found else None


def main(arguments: list[str] | None = None) -> int:
    """Explain a log file; 0 when a cause was found, 1 when it is unknown, 2 when the file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m app.smoke.explain", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="a log, or - for standard input")
    options = parser.parse_args(arguments)
    try:
        if options.file == "-":
            text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
        else:
            text = Path(options.file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        print(f"error: cannot read {options.file}: {error.strerror}; give a log file, or - for stdin", file=sys.stderr)
        return WRONG_INPUT
    found = explain_all(text)
    if not found:
        print("unknown: no failure of the catalogue is in this text. Run ./inv smoke and ./inv doctor on the machine.")
        return 1
    print(found[0])
    if len(found) > 1:
        print("also seen: " + ", ".join(other.name for other in found[1:]))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
