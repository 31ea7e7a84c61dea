"""The environment of a variant without an engine: a virtual environment from the same lock, proven like an image."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from app.errors import WRONG_MACHINE, Fault
from app.host import images, locks, network
from app.host.variants import ROOT, Variant

FOLDER = ".venvs"
READY = ".ready"  #: holds the hash of the lock that was installed and proven; absent in a half-made environment


def ensure(variant: Variant, root: Path = ROOT) -> Path:
    """The interpreter of the variant's environment, made and proven first where it is missing or its lock changed.

    Raises Fault where the machine has no fitting Python, the disk is too small, or the proof fails.
    """
    folder = root / FOLDER / variant.cuda
    python = folder / "bin" / "python"
    with _only_one(root / FOLDER / f"{variant.cuda}.lock"):
        if is_ready(folder, variant):
            return python
        _check_disk(variant, root)
        print(f"making {folder} from {variant.lock} (some minutes, once)", flush=True)
        shutil.rmtree(folder, ignore_errors=False) if folder.exists() else None
        environment = network.uv_environment()
        interpreter = find_python(variant, environment)
        _run([*locks.uv(), "venv", "--quiet", "--no-config", "--python", interpreter, str(folder)], environment)
        _run(
            [
                *(
                    *locks.uv(),
                    "pip",
                    "install",
                    "--no-config",
                    "--require-hashes",
                    "--no-deps",
                    "--only-binary",
                    ":all:",
                ),
                *("--link-mode", "hardlink" if _one_disk(root) else "copy"),
                *("--python", str(python), "--requirements", str(variant.lock)),
            ],
            environment,
        )
        print(f"proving {folder}: every import, every version, a training step", flush=True)
        done = subprocess.run(
            [str(python), *images.PROOF_COMMAND[1:]], check=False, env=program_environment(variant, root)
        )
        if done.returncode:
            raise Fault(
                f"{folder} does not hold what {variant.lock} says (what differs stands above): remove that folder and "
                "run "
                "this again",
                WRONG_MACHINE,
            )
        (folder / READY).write_text(variant.lock_hash, encoding="utf-8")
    return python


def is_ready(folder: Path, variant: Variant) -> bool:
    """Whether a whole, proven environment of this very lock is there and its interpreter still runs."""
    marker = folder / READY
    if not marker.exists() or marker.read_text(encoding="utf-8") != variant.lock_hash:
        return False
    python = folder / "bin" / "python"
    return python.exists() and subprocess.run([str(python), "-c", ""], check=False).returncode == 0


def find_python(variant: Variant, environment: Mapping[str, str]) -> str:
    """Path of an interpreter of the variant's Python version: on PATH, of pyenv, or one that uv keeps."""
    command = [*locks.uv(), "python", "find", "--no-config", "--no-python-downloads", "--system", variant.python]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environment))
    if done.returncode:
        raise Fault(
            f"variant {variant.cuda} without an engine needs Python {variant.python}, and none is here (the host "
            "side runs "
            f"on {sys.version.split()[0]}): sudo apt-get install python{variant.python} (Debian bookworm), or "
            f"{locks.uv()[0]} python install {variant.python}; with a Docker engine it is not needed",
            WRONG_MACHINE,
        )
    return done.stdout.strip()


def program_environment(variant: Variant, root: Path = ROOT) -> dict[str, str]:
    """The variables under which the programs of this project run without an image."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV", "KIT_IMAGE")
    }
    environment.update(KIT_VARIANT=variant.cuda, PYTHONPATH=str(root), PYTHONSAFEPATH="1")
    environment["PATH"] = f"{root / FOLDER / variant.cuda / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    return environment


def _check_disk(variant: Variant, root: Path) -> None:
    free = shutil.disk_usage(root).free / 1e9
    needed = variant.gigabytes + images.WHEELS_GIGABYTES
    if free < needed:
        raise Fault(
            f"the disk under {root} has {free:.1f} GB free, the environment of {variant.cuda} needs {needed:.1f} "
            "GB while it "
            "is made: make room, or move the project to a larger disk",
            WRONG_MACHINE,
        )


def _one_disk(root: Path) -> bool:
    """Whether uv's cache and the project share a file system, so that nothing is stored twice."""
    cache = Path(os.environ.get("UV_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home())
    return cache.exists() and cache.stat().st_dev == root.stat().st_dev


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, check=False, env=dict(environment))
    if done.returncode:
        raise Fault(
            f"{' '.join(command[1:4])} ended with {done.returncode} (uv's words are above): is the package index "
            "reachable? "
            "index-url of pip's configuration is used; run this again afterwards",
            WRONG_MACHINE,
        )


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Two makers at once: the second waits, then finds the work done."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
