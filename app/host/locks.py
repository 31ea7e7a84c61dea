"""Resolves requirements.in to a lock: every wheel with its hash, the same bytes each time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from app.errors import WRONG_MACHINE, Fault
from app.host import network
from app.host.variants import EVERY, PINNED, choose_several, lock_settings, locked_versions

TOOLS = "tools"  #: the folder of pinned/ that holds the host side's own lock

HEADER = """\
# Made by: ./inv lock --cuda {name}   (change requirements.in or pinned/lock.toml, never this file)
"""


def folders(cuda: str | None, pinned: Path = PINNED) -> list[Path]:
    """The folders whose lock ``--cuda`` asks for: a variant's, ``tools``, or with ``all`` every one."""
    if cuda == TOOLS:
        return [pinned / TOOLS]
    chosen = [variant.folder for variant in choose_several(cuda, pinned)]
    return [*chosen, pinned / TOOLS] if cuda == EVERY else chosen


def command(folder: Path, target: Path, values: dict[str, Any]) -> list[str]:
    """uv's command line for one lock.

    The target is empty, so that an older lock cannot steer the result, and nothing uploaded after ``as_of`` counts.
    No index address is written: the same lock serves every mirror.
    """
    if folder.name == TOOLS:
        platform = ["--universal", "--python-version", values["tools_python"]]
    else:
        platform = ["--python-platform", values["platform"], "--python-version", values["python"]]
    return [
        *uv(),
        *("pip", "compile", "--quiet", "--no-config", "--generate-hashes", "--only-binary", ":all:"),
        *("--no-emit-index-url", "--no-emit-find-links", "--no-header"),
        *("--exclude-newer", values["as_of"], *platform),
        *("--output-file", str(target), str(folder / "requirements.in")),
    ]


def uv() -> list[str]:
    """uv from the tools lock, as a command."""
    beside = Path(sys.executable).with_name("uv")
    if not beside.exists():
        raise Fault(f"no uv at {beside}: run this as ./inv, which installs pinned/tools", WRONG_MACHINE)
    return [str(beside)]


def resolve(folder: Path, values: dict[str, Any]) -> str:
    """The text of a folder's lock. Asks the package index; raises Fault with uv's own words where it cannot."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, "requirements.txt")
        done = subprocess.run(
            command(folder, target, values),
            capture_output=True,
            text=True,
            check=False,
            cwd=folder.parents[1],
            env=network.uv_environment(),
        )
        if done.returncode:
            raise Fault(explain(folder, done.stderr))
        text = target.read_text(encoding="utf-8")
    return HEADER.format(name=folder.name) + text


def explain(folder: Path, words: str) -> str:
    """One sentence before uv's own words."""
    lowered = words.lower()
    if "exclude-newer" in lowered or "upload time" in lowered:
        cause = "the index gives no upload times, or a pin is newer than as_of in pinned/lock.toml"
    elif any(sign in lowered for sign in ("failed to fetch", "error sending request", "connect", "dns")):
        cause = "the package index did not answer; set index-url in pip's configuration if you use a mirror"
    else:
        cause = "the requirements do not fit together"
    return f"cannot resolve {folder / 'requirements.in'}: {cause}. uv says:\n{words.strip()}"


def lock(cuda: str | None, pinned: Path = PINNED) -> None:
    """Write the locks that ``--cuda`` asks for, each at once or not at all, and say what changed."""
    values = lock_settings(pinned)
    for folder in folders(cuda, pinned):
        path = folder / "requirements.txt"
        old = locked_versions(path) if path.exists() else {}
        text = resolve(folder, values)
        same = path.exists() and path.read_text(encoding="utf-8") == text
        if not same:
            new = path.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            os.replace(new, path)
        now = locked_versions(path)
        print(f"{path}: {len(now)} packages, {'the same bytes as before' if same else 'written'}")
        for name in sorted(old.keys() | now.keys()):
            if old.get(name) != now.get(name):
                print(f"  {name}: {old.get(name, 'not there')} -> {now.get(name, 'gone')}")
