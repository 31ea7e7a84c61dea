"""The variants: what the folders of ``pinned/`` say, read and checked. No code here names a variant.

Imports the standard library only: the proof inside an image reads the same files with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10 on the host: the tools lock brings the same reader
    import tomli as tomllib

from app.errors import WRONG_INPUT, WRONG_MACHINE, Fault

ROOT = Path(__file__).resolve().parents[2]  #: the project folder, /opt/kit in an image
PINNED = ROOT / "pinned"
IMAGE = "bert-kit"  #: name of every image; the tag is the variant
EVERY = "all"  #: the word that stands for every variant

_PINNED_LINE = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)")


@dataclass(frozen=True)
class Variant:
    """One CUDA generation: the versions that its lock holds and the machines that it serves."""

    cuda: str  #: its name, for example the CUDA version of its wheels
    folder: Path
    default: bool
    summary: str
    python: str  #: major.minor
    torch: str
    torch_cuda: str  #: what torch.version.cuda says
    cudnn: str
    nccl: str
    triton: str | None  #: None: no Triton, hence no torch.compile
    driver_floor: str  #: oldest NVIDIA driver that can run it
    driver_native: str  #: driver that came with this CUDA
    architectures: tuple[str, ...]  #: "sm_50" ...: what torch's kernels were compiled for
    examples: str  #: GPUs that it serves, for people
    not_served: str
    can: Mapping[str, bool]
    huggingface: Mapping[str, str]
    packages: tuple[str, ...]  #: Debian packages in the image beyond Python
    gigabytes: float  #: unpacked image, 10^9 bytes

    @property
    def lock(self) -> Path:
        """Path of the lock: every wheel with its hash."""
        return self.folder / "requirements.txt"

    @property
    def lock_hash(self) -> str:
        """sha256 of the lock file, hex."""
        return file_hash(self.lock)

    @property
    def image(self) -> str:
        """Name and tag of its image."""
        return f"{IMAGE}:{self.cuda}"

    def locked(self) -> dict[str, str]:
        """Version of every package in the lock, by normalised name."""
        return locked_versions(self.lock)


def file_hash(path: Path) -> str:
    """sha256 of a file, hex. A missing file is a Fault that names the command which makes it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise Fault(f"{path} is missing: run ./inv lock --cuda {path.parent.name}", WRONG_MACHINE) from None


def normal_name(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503): lower case, runs of - _ . as one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(lock: Path) -> dict[str, str]:
    """Version by normalised name from a requirements file whose every line is ``name==version``."""
    found = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        match = _PINNED_LINE.match(line)
        if match:
            found[normal_name(match[1])] = match[2]
    return found


def asked_for(requirements: Path) -> list[str]:
    """Normalised names that a requirements.in asks for itself, in the order of the file."""
    names = []
    for line in requirements.read_text(encoding="utf-8").splitlines():
        match = re.match(r"^[A-Za-z0-9][A-Za-z0-9._-]*", line)
        if match:
            names.append(normal_name(match[0]))
    return names


def read_variant(folder: Path) -> Variant:
    """The variant in a folder. Raises Fault where variant.toml is wrong, with the key that is."""
    path = folder / "variant.toml"
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise Fault(f"{path} is no TOML: {error}") from None
    try:
        variant = Variant(
            cuda=data["cuda"],
            folder=folder,
            default=data["default"],
            summary=data["summary"],
            python=data["python"],
            torch=data["torch"]["version"],
            torch_cuda=data["torch"]["cuda"],
            cudnn=data["torch"]["cudnn"],
            nccl=data["torch"]["nccl"],
            triton=data["torch"].get("triton"),
            driver_floor=data["driver"]["floor"],
            driver_native=data["driver"]["native"],
            architectures=tuple(data["gpus"]["architectures"]),
            examples=data["gpus"]["examples"],
            not_served=data["gpus"]["not_served"],
            can=data["can"],
            huggingface=data["huggingface"],
            packages=_words(folder / "packages.txt"),
            gigabytes=float(data["image"]["gigabytes"]),
        )
    except KeyError as error:
        raise Fault(f"{path} lacks the key {error}: compare it with another variant's") from None
    if variant.cuda != folder.name:
        raise Fault(f'{path} says cuda = "{variant.cuda}", but its folder is named {folder.name}: they must agree')
    return variant


def variants(pinned: Path = PINNED) -> dict[str, Variant]:
    """Every variant by name, oldest CUDA first."""
    found = [read_variant(path.parent) for path in pinned.glob("*/variant.toml")]
    if not found:
        raise Fault(f"no variant in {pinned}: this is not a whole copy of the project", WRONG_MACHINE)
    return {variant.cuda: variant for variant in sorted(found, key=lambda one: _version_key(one.cuda))}


def default_variant(pinned: Path = PINNED) -> Variant:
    """The variant whose file says ``default = true``."""
    chosen = [variant for variant in variants(pinned).values() if variant.default]
    if len(chosen) != 1:
        names = ", ".join(variant.cuda for variant in chosen) or "none"
        raise Fault(f"exactly one variant.toml must say default = true; these do: {names}")
    return chosen[0]


def choose(cuda: str | None, pinned: Path = PINNED) -> Variant:
    """The variant of that name; without one KIT_VARIANT's, and without that the default.

    An unknown name is a Fault (exit code 2) that lists the ones there are.
    """
    known = variants(pinned)
    name = cuda or os.environ.get("KIT_VARIANT")
    if not name:
        return default_variant(pinned)
    if name not in known:
        where = "--cuda" if cuda else "KIT_VARIANT"
        raise Fault(f"unknown variant '{name}' ({where}): there are {', '.join(known)}", WRONG_INPUT)
    return known[name]


def choose_several(cuda: str | None, pinned: Path = PINNED) -> list[Variant]:
    """The variants that ``--cuda`` asks for: ``all``, several names with commas between, one, or the default."""
    if cuda == EVERY:
        return list(variants(pinned).values())
    if cuda and "," in cuda:
        return [choose(name.strip(), pinned) for name in cuda.split(",")]
    return [choose(cuda, pinned)]


def lock_settings(pinned: Path = PINNED) -> dict[str, Any]:
    """The values of pinned/lock.toml: how every lock is resolved."""
    return tomllib.loads((pinned / "lock.toml").read_text(encoding="utf-8"))


def locks_date(pinned: Path = PINNED) -> int:
    """The date of the locks in seconds since 1970: the time stamp of everything built from them."""
    return int(datetime.fromisoformat(lock_settings(pinned)["as_of"].replace("Z", "+00:00")).timestamp())


def _words(path: Path) -> tuple[str, ...]:
    """The words of a list file, comments aside."""
    lines = (line.partition("#")[0] for line in path.read_text(encoding="utf-8").splitlines())
    return tuple(word for line in lines for word in line.split())


def _version_key(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", name))
