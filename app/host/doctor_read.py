"""What doctor reads of a machine: live, or from a recording, so that a friend's machine is judged the same way.

A recording is one JSON file. Names of the host and the user, serial numbers, UUIDs, MAC and IP addresses are masked
before anything is kept.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any

from app.errors import WRONG_INPUT, Fault
from app.hardware.gpus import Machine
from app.host.variants import ROOT

FORMAT = 1
FILE = "doctor.json"
TIMEOUT = 30.0  #: seconds a command may take; a driver that hangs must not hang doctor
MISSING, HUNG = 127, 124  #: exit codes for a command that is not installed, or took longer than TIMEOUT
#: Environment variables that are read: settings that change what training does here.
VARIABLES = re.compile(
    r"NCCL_\w+|CUDA_\w+|TORCH_NCCL_\w+|HF_ENDPOINT|HF_HUB_OFFLINE|LD_LIBRARY_PATH|LD_PRELOAD|DOCKER_HOST|DOCKER_CONTEXT|"
    r"(?i:https?_proxy|no_proxy)|OMP_NUM_THREADS|TMPDIR|KIT_\w+"
)


@dataclass
class Output:
    """What a command printed (both streams) and its exit code."""

    code: int
    text: str

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0


@dataclass
class Disk:
    """A path that will be written, the mount it is on, and its room in bytes. None: not this host's."""

    path: str
    mount: str
    total: int
    free: int
    writable: bool


class Readings:
    """Everything that was read, by question. ``live`` asks the machine and remembers; a recording only remembers."""

    def __init__(self, known: dict[str, Any] | None = None, live: bool = False) -> None:
        self.known: dict[str, Any] = known or {"commands": {}, "files": {}, "listings": {}, "disks": {}, "facts": {}}
        self.live = live

    def _ask(self, kind: str, key: str, ask: Callable[[], Any]) -> Any:
        if key not in self.known[kind]:
            if not self.live:
                return None
            self.known[kind][key] = _mask(ask())
        return self.known[kind][key]

    def run(self, *command: str, keep: str = "", shorten: Callable[[str], str] | None = None) -> Output:
        """A command's output. ``keep`` is a regular expression of the lines worth keeping, ``shorten`` a rewriting."""

        def ask() -> dict[str, Any]:
            output = _execute(list(command))
            text = output.text
            if keep:
                text = "\n".join(line for line in text.splitlines() if re.search(keep, line))
            return asdict(Output(output.code, shorten(text) if shorten else text))

        found = self._ask("commands", " ".join(command), ask)
        return Output(**found) if found else Output(MISSING, "")

    def file(self, path: str) -> str | None:
        """Contents of a small file, or None where it is not there or may not be read."""

        def ask() -> str | None:
            try:
                return Path(path).read_text(errors="replace")[:20_000]
            except OSError:
                return None

        return self._ask("files", path, ask)

    def listing(self, pattern: str) -> list[str]:
        """Paths that match a pattern."""
        return self._ask("listings", pattern, lambda: sorted(glob(pattern))) or []

    def fact(self, name: str, ask: Callable[[], Any]) -> Any:
        """Anything else, as plain data."""
        return self._ask("facts", name, ask)

    def disk(self, purpose: str, path: str) -> Disk | None:
        """The disk behind a path that will be written; None where unknown."""
        found = self._ask("disks", purpose, lambda: asdict(_disk(path)))
        return Disk(**found) if found else None

    def disks(self) -> dict[str, Disk]:
        """Every disk read so far, by purpose."""
        return {purpose: Disk(**found) for purpose, found in self.known["disks"].items()}

    def machine(self) -> Machine:
        """The GPUs, read by a program of its own."""
        output = self.run(sys.executable if self.live else "python", "-m", "app.hardware.nvml")
        if output.code == HUNG:
            return Machine("none", f"the NVIDIA driver does not answer within {TIMEOUT:.0f} s")
        lines = output.text.strip().splitlines()
        if not output.ok or not lines:
            return Machine("none", lines[-1] if lines else "not recorded")
        return Machine.from_data(json.loads(lines[-1]))

    def environment(self) -> dict[str, str]:
        """The variables of VARIABLES that are set."""
        return self.fact("environment", lambda: {k: v for k, v in os.environ.items() if VARIABLES.fullmatch(k)}) or {}


def live() -> Readings:
    """Readings of this machine; nothing is read before it is asked for."""
    return Readings(live=True)


def load(folder: Path) -> Readings:
    """Readings from a recording. Raises Fault (2) where there is none or it is of another format."""
    path = folder / FILE if folder.is_dir() else folder
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Fault(
            f"{path} does not exist: make it on the other machine with ./inv doctor --record DIR", WRONG_INPUT
        ) from None
    except (OSError, ValueError) as error:
        raise Fault(
            f"{path} is no recording of doctor ({error}): ./inv doctor --record DIR makes one", WRONG_INPUT
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise Fault(
            f"{path} has format {data.get('format') if isinstance(data, dict) else None}, not {FORMAT}", WRONG_INPUT
        )
    for command in data["commands"].values():
        command["text"] = "\n".join(command["text"])
    return Readings({key: data[key] for key in ("commands", "files", "listings", "disks", "facts")})


def save(readings: Readings, folder: Path) -> Path:
    """Write everything that was read into ``folder`` and return the file; text line by line, so that it can be read."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = {
        _name(key): {"code": value["code"], "text": value["text"].split("\n")}
        for key, value in readings.known["commands"].items()
    }
    document = {"format": FORMAT, "source": "this machine", **readings.known, "commands": commands}
    path = folder / FILE
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _name(command: str) -> str:
    """The key of a command in a recording: the path of this Python says nothing to others."""
    return command.replace(sys.executable, "python", 1)


def _execute(command: list[str]) -> Output:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
            env=environment,
        )
    except (FileNotFoundError, PermissionError):
        return Output(MISSING, "")
    except subprocess.TimeoutExpired:
        return Output(HUNG, "")
    return Output(done.returncode, done.stdout + done.stderr)


def _disk(path: str) -> Disk:
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    mount = place.resolve()
    while not os.path.ismount(mount):
        mount = mount.parent
    return Disk(path, str(mount), usage.total, usage.free, os.access(place, os.W_OK))


def temporary() -> str:
    """Folder of temporary files."""
    return tempfile.gettempdir()


def _masks() -> Iterable[tuple[str, str]]:
    host, home = socket.gethostname(), str(Path.home())
    yield re.escape(str(ROOT)) + r"(?![\w.-])", "PROJECT"
    if home != "/":
        yield re.escape(home) + r"(?![\w.-])", "~"
    yield r"\bGPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", "GPU-masked"
    yield r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "masked"
    yield r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b", "00:00:00:00:00:00"
    yield r"\b(\d{1,3})\.\d{1,3}\.\d{1,3}\.\d{1,3}(?=/|\b(?!\.))(?!\d)", r"\1.x.x.x"
    yield r"\b(fe80|[23][0-9a-f]{3}|fd[0-9a-f]{2}):[0-9a-f:]+", r"\1::x"
    yield r"(?i)(serial\s*(?:number)?\s*[:=]\s*)\S+", r"\1masked"
    yield r"://[^/@\s]+@", "://masked@"
    if len(host) > 2:
        yield rf"\b{re.escape(host)}\b", "host"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    if len(user) > 2 and user != "root":
        yield rf"\b{re.escape(user)}\b", "user"


def _mask(value: Any) -> Any:
    """The value without what would name a machine, a card or a person."""
    if isinstance(value, str):
        for pattern, replacement in _masks():
            value = re.sub(pattern, replacement, value)
        return value
    if isinstance(value, dict):
        return {key: _mask(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mask(item) for item in value]
    return value
