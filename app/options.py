"""Options of a program as one dataclass, from which its command line is made, so that both always agree."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, TypeVar

from app.errors import Fault

T = TypeVar("T")


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that carries its help text and argparse settings."""
    make: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return field(**make, metadata={"help": help, **more})


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are Faults, so that every fault looks the same."""

    def error(self, message: str) -> Any:
        raise Fault(f"{message}. See {self.prog} --help.")


def parser(made_of: type[Any], program: str, description: str) -> argparse.ArgumentParser:
    """The command line of a dataclass whose fields are ``option``s."""
    made = _Parser(
        prog=program,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for f in dataclasses.fields(made_of):
        settings = dict(f.metadata)
        settings["help"] = settings["help"].replace("%", "%%")  # argparse formats it
        flag = "--" + f.name.replace("_", "-")
        if f.type == "bool":
            made.add_argument(flag, action="store_true", help=settings["help"])
            continue
        if f.type in ("int", "float"):
            settings["type"] = {"int": int, "float": float}[str(f.type)]
        made.add_argument(flag, default=f.default, **settings)
    return made


def parse(made_of: type[T], program: str, description: str, arguments: Sequence[str]) -> T:
    """Arguments to a checked ``made_of``; raises Fault, or SystemExit(0) after --help."""
    given = vars(parser(made_of, program, description).parse_args(list(arguments)))
    return made_of(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


class Check:
    """Gathers every option of ``options`` that is out of range, to raise one Fault for all."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.wrong: list[str] = []
        for f in dataclasses.fields(options):
            if f.metadata.get("choices"):
                self.need(getattr(options, f.name) in f.metadata["choices"], f.name, " or ".join(f.metadata["choices"]))
            if f.type == "float":
                self.need(math.isfinite(getattr(options, f.name)), f.name, "a finite number")

    def need(self, ok: bool, name: str, allowed: str) -> None:
        if not ok:
            flag = "--" + name.replace("_", "-")
            self.wrong.append(f"{flag} is {getattr(self.options, name)!r}, allowed is {allowed}")

    def done(self) -> None:
        """Raises Fault if anything was wrong."""
        if self.wrong:
            raise Fault("wrong options: " + "; ".join(self.wrong) + ". See --help.")
