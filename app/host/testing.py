"""Runs every check of the project: lint, types and host tests here, the other tests in the environment of a variant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from app.errors import Fault
from app.host import compose, engine, images, programs, venvs
from app.host.variants import ROOT, Variant

HERE = ("host", "hardware", "engine")  #: folders of tests/ that need no torch; all others need a variant's environment


def parts(root: Path = ROOT) -> tuple[list[str], list[str]]:
    """The folders of tests that run on the host, and those that run in the environment."""
    found = sorted(path.name for path in (root / "tests").iterdir() if any(path.glob("test_*.py")))
    here = [f"tests/{name}" for name in found if name in HERE]
    inside = [f"tests/{name}" for name in found if name not in HERE]
    return here, inside


def marks(long: bool, with_engine: bool) -> list[str]:
    """pytest's options that leave out what cannot or should not run now."""
    left_out = [*([] if long else ["not long"]), *([] if with_engine else ["not engine"])]
    return ["-m", " and ".join(left_out)] if left_out else []


def container_command(variant: Variant, arguments: list[str], root: Path, who: compose.Owner) -> list[str]:
    """pytest in a throw-away container that reads this checkout, so that what is tested is what is here."""
    return [
        *("docker", "run", "--rm", "--init", "--shm-size", "1g", "--user", f"{who.uid}:{who.gid}"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--volume", f"{root}:/opt/kit:ro", "--workdir", "/opt/kit"),
        *("--env", "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis", "--env", "PYTHONDONTWRITEBYTECODE=1"),
        *(variant.image, "python", "-m", "pytest", "-p", "no:cacheprovider", *arguments),
    ]


def run(cuda: str, runtime: str, long: bool, extra: list[str], root: Path = ROOT) -> None:
    """Run all of it, in spite of failures on the way; raises Fault at the end that names what failed."""
    variant = programs.variant_in_use(cuda, root)
    where = programs.pick_runtime(runtime)
    here, inside = parts(root)
    beside = Path(sys.executable).parent
    inside_arguments = [*inside, *marks(long, True), *extra]
    environment: dict[str, str] = dict(os.environ)
    if where == "docker":
        images.ensure(variant, root)
        client = engine.connect()
        with engine.told("asking the engine what it is"):
            who = compose.owner(root, engine.is_rootless(client.info()))
        last = container_command(variant, inside_arguments, root, who)
    else:
        python = venvs.ensure(variant, root)
        environment = venvs.program_environment(variant, root)
        last = [str(python), "-m", "pytest", *inside_arguments]
    host_marks = marks(long, where == "docker")
    plan: list[tuple[str, list[str]]] = [
        ("ruff check", [str(beside / "ruff"), "check", "."]),
        ("ruff format", [str(beside / "ruff"), "format", "--check", "."]),
        ("mypy", [str(beside / "mypy")]),
        ("host tests", [sys.executable, "-m", "pytest", *here, *host_marks, *extra]),
        (f"tests in {where} {variant.cuda}", last),
    ]
    failed = []
    for name, command in plan:
        print(f"== {name}", flush=True)
        wanted = environment if command is last else None
        if subprocess.run(command, check=False, cwd=root, env=wanted, stdin=subprocess.DEVNULL).returncode:
            failed.append(name)
    if failed:
        raise Fault(f"failed: {', '.join(failed)} (each one's own words are above)", 1)
