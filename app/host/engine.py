"""The Docker engine: is it there, may we use it, which GPUs would it give, and proof containers with streamed output.

Every answer of the engine that a user can act on becomes a Fault with the next command.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.types
import requests

from app.errors import WRONG_MACHINE, Fault

NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")  #: one folder a GPU while NVIDIA's kernel module is loaded
WSL_GPU = Path("/dev/dxg")
CDI_KIND = "nvidia.com/gpu"

INSTALL = "install Docker Engine 26 or newer with its buildx and compose plugins (Debian: sudo .ci/engine start)"
TOOLKIT = (
    "install NVIDIA's container toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && "
    "sudo systemctl restart docker, and ./inv build again"
)

#: Parts of an engine's answer, and what to say. Texts of Docker 20 to 29, of CDI and of NVIDIA's container hook.
ANSWERS: tuple[tuple[str, str], ...] = (
    (
        'could not select device driver "nvidia"',
        "the engine has no NVIDIA toolkit (or Docker came as a snap, which cannot use it)",
    ),
    ('could not select device driver ""', "the engine has no NVIDIA toolkit (or Docker came as a snap)"),
    ("failed to discover GPU vendor from CDI", "the engine has no NVIDIA toolkit"),
    ("unknown or invalid runtime name: nvidia", "the engine has not loaded the nvidia runtime"),
    ('could not select device driver "cdi"', "this engine has CDI switched off (daemon.json: features.cdi)"),
    (
        "unresolvable CDI devices",
        "the engine finds no such GPU in its CDI files; after a driver change make them anew: "
        "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    ),
    ("unsatisfied condition: cuda>=", "the host's driver is too old for this image"),
    ("driver/library version mismatch", "the driver was upgraded without a restart of the machine: restart it"),
    ("nvml error", "NVIDIA's driver does not answer on the host; try nvidia-smi there"),
    ("no space left on device", "the engine's disk is full: docker system df shows what holds it"),
    ("manifest unknown", "the registry has no such image any more; --base local builds one from Debian's packages"),
    ("manifest for", "the registry has no such image; --base local builds one from Debian's packages"),
    ("no such host", "the engine cannot reach that registry"),
    ("connection refused", "the engine cannot reach that registry"),
    ("i/o timeout", "the engine cannot reach that registry in time"),
    ("toomanyrequests", "the registry limits pulls from here: docker login, or --base local"),
    ("unauthorized", "the registry wants a login: docker login"),
    ("client version", "the engine and this client speak no common version: upgrade the older one"),
)
GPU_ANSWERS = 5  #: so many of the first ANSWERS are mended by installing the toolkit


@dataclass(frozen=True)
class Gpus:
    """How a container of this engine gets the host's GPUs."""

    mode: str  #: "nvidia" (runtime or hook), "cdi", or "none"
    host: bool  #: whether the host seems to have NVIDIA GPUs
    reason: str  #: one clause for people

    @property
    def blocked(self) -> bool:
        """The host has GPUs that no container would see."""
        return self.host and self.mode == "none"


def address(environment: Mapping[str, str] = os.environ) -> str | None:
    """Where the docker command finds its engine: DOCKER_HOST, else its current context's; None: the built-in one.

    The SDK knows DOCKER_HOST only; a rootless engine or Docker Desktop is known to the context alone.
    """
    if environment.get("DOCKER_HOST"):
        return environment["DOCKER_HOST"]
    if not shutil.which("docker"):
        return None
    command = ["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def connect(timeout_s: int = 120) -> docker.DockerClient:
    """A client of a running engine that answered. Raises Fault (exit code 3) that says what is in the way."""
    where = address()
    try:
        if where and where.startswith("ssh://"):
            client = docker.DockerClient(base_url=where, timeout=timeout_s, use_ssh_client=True)
        elif where and not os.environ.get("DOCKER_HOST"):
            client = docker.DockerClient(base_url=where, timeout=timeout_s)
        else:
            client = docker.from_env(timeout=timeout_s)
        client.ping()
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise _no_engine(where or "unix:///var/run/docker.sock", error) from None
    return client


def _no_engine(where: str, error: Exception) -> Fault:
    words = str(error)
    if "Permission denied" in words:
        user = getpass.getuser()
        return Fault(
            f"user {user} may not use the Docker engine at {where}: sudo usermod -aG docker {user}, log in anew "
            "and try "
            "again (or use ./inv train --runtime venv, which needs no engine)",
            WRONG_MACHINE,
        )
    if "Not supported URL scheme" in words or "Invalid bind address" in words:
        return Fault(f"DOCKER_HOST is '{where}': allowed are unix://, tcp:// and ssh:// addresses", WRONG_MACHINE)
    if "supported API version" in words or "client version" in words:
        return Fault(f"the Docker engine at {where} is too old or too new for this client: {words}", WRONG_MACHINE)
    return Fault(
        f"no Docker engine answers at {where}: start it (sudo systemctl start docker), or {INSTALL}; without "
        "an engine: "
        "./inv train --runtime venv",
        WRONG_MACHINE,
    )


def translate(error: Exception, doing: str) -> Fault:
    """The Fault for what the engine answered while ``doing`` something; its own words stay in it."""
    words = str(getattr(error, "explanation", None) or error).strip()
    for index, (sign, meaning) in enumerate(ANSWERS):
        if sign.lower() in words.lower():
            hint = f"; {TOOLKIT}" if index < GPU_ANSWERS else ""
            return Fault(f"{doing}: {meaning}{hint}. The engine says: {words}", WRONG_MACHINE)
    return Fault(f"{doing}: the engine says: {words}", WRONG_MACHINE)


@contextmanager
def told(doing: str) -> Iterator[None]:
    """Turns every error of the SDK inside the block into a Fault."""
    try:
        yield
    except docker.errors.DockerException as error:
        raise translate(error, doing) from error
    except requests.exceptions.RequestException as error:
        raise Fault(f"{doing}: the engine stopped answering: {error}", WRONG_MACHINE) from error


def host_has_gpus(proc: Path = NVIDIA_PROC, wsl: Path = WSL_GPU) -> bool:
    """Whether NVIDIA's kernel module serves at least one GPU here (or Windows passes one on)."""
    return (proc.is_dir() and any(proc.iterdir())) or wsl.exists()


def gpu_access(
    info: Mapping[str, Any],
    host: bool,
    which: Callable[[str], str | None] = shutil.which,
) -> Gpus:
    """How this engine gives GPUs to containers, from ``docker info`` and not from files a daemon may not have read."""
    if "nvidia" in (info.get("Runtimes") or {}):
        return Gpus("nvidia", host, "the engine has the nvidia runtime")
    if any(CDI_KIND in str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or ()):
        return Gpus("cdi", host, f"the engine discovered CDI devices {CDI_KIND}")
    folders = info.get("CDISpecDirs") or ()
    for folder in folders:
        for path in sorted(Path(folder).glob("*")):
            if path.suffix in (".yaml", ".yml", ".json") and CDI_KIND in path.read_text(errors="replace"):
                return Gpus("cdi", host, f"the engine reads CDI files, and {path} describes {CDI_KIND}")
    if which("nvidia-container-runtime-hook") or which("nvidia-cdi-hook"):
        return Gpus("nvidia", host, "NVIDIA's container hook is installed")
    if host:
        return Gpus(
            "none", host, "this host has NVIDIA GPUs, but the engine has neither the nvidia runtime nor CDI files"
        )
    return Gpus("none", host, "this host has no NVIDIA GPU and the engine no NVIDIA toolkit")


def may_lock_memory(client: docker.DockerClient, image: str) -> bool:
    """Whether this engine may grant unlimited locked memory; a rootless one and some sandboxes may not. Tries it."""
    unlimited = docker.types.Ulimit(name="memlock", soft=-1, hard=-1)
    with told("starting a container"):
        container = client.containers.create(image, ["true"], network_mode="none", ulimits=[unlimited])
        try:
            container.start()
            container.wait()
        except docker.errors.APIError as error:
            if "rlimit" not in str(error):
                raise
            return False
        finally:
            container.remove(force=True)
    return True


def is_rootless(info: Mapping[str, Any]) -> bool:
    """Whether the engine runs without root: there uid 0 of a container is the caller."""
    return any("name=rootless" in option for option in info.get("SecurityOptions") or ())


def free_gigabytes(info: Mapping[str, Any], usage: Callable[[str], Any] = shutil.disk_usage) -> float | None:
    """Free space where the engine keeps images, in 10^9 bytes; None where that folder is not this host's."""
    folder = str(info.get("DockerRootDir") or "")
    if not os.path.isdir(folder):
        return None
    return float(usage(folder).free) / 1e9


def run(
    client: docker.DockerClient,
    image: str,
    command: list[str],
    *,
    write: Callable[[str], object] = sys.stdout.write,
    **settings: Any,
) -> int:
    """Run a command in a new container, pass its output on as it comes, remove the container, return the exit code.

    ``settings`` go to the SDK's ``containers.create``. Raises Fault where the container cannot be made or started.
    """
    with told(f"running {' '.join(command)} in {image[:40]}"):
        container = client.containers.create(image, command, **settings)
        try:
            stream = container.attach(stream=True, logs=True)
            container.start()
            for chunk in stream:
                write(chunk.decode(errors="replace"))
            return int(container.wait()["StatusCode"])
        finally:
            container.remove(force=True, v=True)
