"""The base image: Debian bookworm slim from a registry by digest, from Debian's packages, or one of the user's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors
import requests

from app.errors import WRONG_MACHINE, Fault
from app.host import engine, network
from app.host.variants import ROOT, locks_date

LOCAL = "bert-kit-base:bookworm"  #: name of the base made here
SUITE = "bookworm"
REGISTRY_TIMEOUT_S = 20
#: What Debian's own slim images leave out.
SLIM = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*", "/usr/share/lintian/*")


@dataclass(frozen=True)
class Base:
    """The base of a build."""

    image: str | None  #: a reference, or None: the one that the Dockerfile names
    why: str  #: one clause for people


def named_in_dockerfile(root: Path = ROOT) -> str:
    """The reference, with digest, that the Dockerfile builds from when nothing else is said."""
    match = re.search(r"^ARG KIT_BASE=(\S+)$", (root / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    if not match:
        raise Fault(
            "the Dockerfile has no line ARG KIT_BASE=...: this is not a whole copy of the project", WRONG_MACHINE
        )
    return match[1]


def resolve(client: docker.DockerClient, choice: str | None, root: Path = ROOT) -> Base:
    """The base for ``--base``: registry, local, an image of the user's, or (None) the registry's where one answers."""
    if choice == "local":
        return make_local(client, "made from Debian's packages, as asked")
    reference = named_in_dockerfile(root)
    if choice and choice != "registry":
        _require(client, choice)
        return Base(choice, f"{choice}, as asked")
    silence = registry_silence(client, reference)
    if silence is None:
        return Base(None, f"{reference} from the registry")
    if choice == "registry":
        raise Fault(
            f"--base registry: {reference} cannot be had: {silence}. Without a registry: ./inv build --base local "
            "builds the "
            "base from Debian's packages, --base IMAGE takes one that you have",
            WRONG_MACHINE,
        )
    print(f"the container registry does not give {reference.split('@')[0]} ({silence})", flush=True)
    return make_local(client, "made from Debian's packages, since no container registry gave it")


def registry_silence(client: docker.DockerClient, reference: str) -> str | None:
    """None where the engine has that image or its registry offers it, else why not, in the engine's words."""
    if _has(client, reference):
        return None
    try:
        engine.connect(timeout_s=REGISTRY_TIMEOUT_S).api.inspect_distribution(reference)
    except docker.errors.DockerException as error:
        return str(getattr(error, "explanation", None) or error).strip()
    except requests.exceptions.Timeout:
        return f"no answer within {REGISTRY_TIMEOUT_S} s"
    return None


def make_local(client: docker.DockerClient, why: str) -> Base:
    """Debian bookworm slim built by mmdebstrap and imported, once. Asks Debian's mirrors, needs mmdebstrap."""
    if _has(client, LOCAL):
        return Base(LOCAL, f"{LOCAL}, {why}")
    _require_mmdebstrap()
    with tempfile.TemporaryDirectory(prefix="kit-base-") as scratch:
        archive = Path(scratch, "base.tar")
        print(f"making {LOCAL} with mmdebstrap (about half a minute, once)", flush=True)
        done = subprocess.run(
            mmdebstrap(archive),
            check=False,
            capture_output=True,
            text=True,
            env={**network.uv_environment(), "SOURCE_DATE_EPOCH": str(locks_date())},
        )
        if done.returncode:
            raise Fault(
                f"mmdebstrap could not make a Debian {SUITE}: no answer from Debian's mirrors? It says: "
                f"{done.stderr.strip()[-500:]}",
                WRONG_MACHINE,
            )
        repository, _, tag = LOCAL.partition(":")
        with engine.told(f"importing {LOCAL}"):
            client.api.import_image_from_file(str(archive), repository=repository, tag=tag)
    return Base(LOCAL, f"{LOCAL}, {why}")


def mmdebstrap(archive: Path) -> list[str]:
    """The command that makes the base; with SOURCE_DATE_EPOCH set it gives the same bytes again."""
    exclude = [f"--dpkgopt=path-exclude={pattern}" for pattern in SLIM]
    return [
        *("mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates", *exclude),
        *("--dpkgopt=path-include=/usr/share/doc/*/copyright", SUITE, str(archive)),
    ]


def _require_mmdebstrap() -> None:
    """Installs mmdebstrap where that needs no question (root on a Debian machine), else raises Fault."""
    if shutil.which("mmdebstrap"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing mmdebstrap with apt-get", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "mmdebstrap"]):
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment)
        if shutil.which("mmdebstrap"):
            return
    raise Fault(
        "a local base needs mmdebstrap: sudo apt-get install mmdebstrap (Debian, Ubuntu), then run this "
        "again; or --base IMAGE "
        "with a Debian bookworm image that you have",
        WRONG_MACHINE,
    )


def _require(client: docker.DockerClient, image: str) -> None:
    silence = registry_silence(client, image)
    if silence is not None:
        raise Fault(f"--base {image}: the engine has no such image and cannot get it: {silence}", WRONG_MACHINE)


def _has(client: docker.DockerClient, image: str) -> bool:
    with engine.told(f"looking for {image}"):
        try:
            client.images.get(image)
        except docker.errors.ImageNotFound:
            return False
    return True
