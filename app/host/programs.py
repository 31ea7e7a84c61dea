"""Runs a program of this project where its environment is: in a container, or in a venv without an engine.

The exit code is the program's own, and a signal to this process reaches it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from app.errors import WRONG_INPUT, WRONG_MACHINE, Fault
from app.host import compose, engine, images, venvs
from app.host.variants import IMAGE, ROOT, Variant, choose

RUNTIMES = ("auto", "docker", "venv")


def variant_in_use(cuda: str | None, root: Path = ROOT) -> Variant:
    """The variant that ``--cuda`` names; without it the one that was built last, else the default."""
    return choose(cuda or compose.read_settings(root).get("KIT_VARIANT"), root / "pinned")


def remainder(arguments: list[str]) -> list[str]:
    """What stands behind ``--``, word by word as typed: Invoke itself would join it into one string."""
    return arguments[arguments.index("--") + 1 :] if "--" in arguments else []


def pick_runtime(runtime: str) -> str:
    """``docker`` or ``venv``. ``auto`` is docker where an engine answers; otherwise says that and takes venv."""
    if runtime not in RUNTIMES:
        raise Fault(f"--runtime {runtime}: allowed are {', '.join(RUNTIMES)}", WRONG_INPUT)
    if runtime != "auto":
        return runtime
    try:
        engine.connect()
        images.buildx()
    except Fault as fault:
        print(f"no container: {fault}", file=sys.stderr)
        print("going on in a virtual environment from the same lock", file=sys.stderr, flush=True)
        return "venv"
    return "docker"


def wants_cpu(arguments: list[str]) -> bool:
    """Whether the program was told to use the CPU (the trainer's --accelerate cpu, smoke's --gpus 0), so that GPUs which stay unused are no surprise."""
    asked = {("--accelerate", "cpu"), ("--gpus", "0")}
    joined = [(flag, value) for flag, _, value in (word.partition("=") for word in arguments)]
    return any(pair in asked for pair in [*joined, *itertools.pairwise(arguments)])


def check_gpus(arguments: list[str]) -> None:
    """Raises Fault where the host has GPUs that no container would see: training on the CPU then is never meant."""
    client = engine.connect()
    with engine.told("asking the engine about GPUs"):
        gpus = engine.gpu_access(client.info(), engine.host_has_gpus())
    if gpus.blocked and not wants_cpu(arguments):
        raise Fault(
            f"{gpus.reason}, so it would train on the CPU: {engine.TOOLKIT}. Or use the GPUs without an engine: "
            "./inv train --runtime venv; or mean it: ./inv train -- --accelerate cpu",
            WRONG_MACHINE,
        )


def has_terminal() -> bool:
    """Whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def compose_command(
    service: str, arguments: list[str], root: Path, terminal: bool, name: str, *, entrypoint: str | None = None
) -> list[str]:
    """The command that runs a service once in a container of that name; without a terminal none is asked for."""
    return [
        *("docker", "compose", "--project-directory", str(root), "run", "--rm", "--name", name),
        *([] if terminal else ["-T"]),
        *(["--entrypoint", entrypoint] if entrypoint else []),
        service,
        *arguments,
    ]


def compose_environment(variant: Variant, image: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for docker compose that win over .env, so that ``--cuda`` counts for this run only."""
    return {**environment, "KIT_VARIANT": variant.cuda, "KIT_IMAGE": f"{variant.image}@{image}"}


def run_service(
    service: str,
    arguments: list[str],
    variant: Variant,
    root: Path = ROOT,
    *,
    entrypoint: str | None = None,
    terminal: bool | None = None,
) -> int:
    """Run a compose service once in the variant's image, which must be there; its exit code.

    docker compose itself, when signalled without a terminal, ends at once and leaves the container running. So it gets
    a session of its own, and signals go to the container, whose end then ends it.
    """
    terminal = has_terminal() if terminal is None else terminal
    name = f"{IMAGE}-{service}-{os.getpid()}-{int(time.time())}"
    environment = compose_environment(variant, compose.image_id(engine.connect(), variant))
    command = compose_command(service, arguments, root, terminal, name, entrypoint=entrypoint)
    sys.stdout.flush()
    child = subprocess.Popen(command, env=environment, cwd=root, start_new_session=not terminal)

    def hand_on(number: int, frame: object) -> None:
        kill = ["docker", "kill", "--signal", signal.Signals(number).name, name]
        if subprocess.run(kill, capture_output=True, check=False).returncode:
            child.send_signal(number)  # there is no container yet, or none any more

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    service: str, arguments: list[str], cuda: str | None = None, runtime: str = "auto", root: Path = ROOT
) -> NoReturn:
    """Run ``python -m app.<service>`` with these arguments and end this process with the program's exit code.

    Makes the environment first where it is missing. Relative paths start at the project folder in either runtime.
    """
    variant = variant_in_use(cuda, root)
    if pick_runtime(runtime) == "venv":
        python = venvs.ensure(variant, root)
        _become([str(python), "-m", f"app.{service}", *arguments], venvs.program_environment(variant, root), root)
    check_gpus(arguments)
    images.ensure(variant, root)
    raise SystemExit(run_service(service, arguments, variant, root))


def shell(cuda: str | None = None, runtime: str = "auto", root: Path = ROOT) -> NoReturn:
    """A shell inside the environment of a variant, with the same mounts, user and GPUs as training."""
    variant = variant_in_use(cuda, root)
    if pick_runtime(runtime) == "venv":
        venvs.ensure(variant, root)
        _become([os.environ.get("SHELL", "/bin/sh")], venvs.program_environment(variant, root), root)
    images.ensure(variant, root)
    raise SystemExit(run_service("train", [], variant, root, entrypoint="bash"))


def _become(command: list[str], environment: Mapping[str, str], folder: Path) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(folder)
    os.execvpe(command[0], command, dict(environment))
