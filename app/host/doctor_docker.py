"""Doctor on the Docker engine: what the daemon that answers has loaded, not what a file says."""

from __future__ import annotations

import json
import re
from typing import Any

from app.hardware.drivers import numbers
from app.hardware.report import Report, failed, passed, skipped, warning
from app.host.doctor_read import HUNG, MISSING, Readings
from app.smoke.explain import explain

CDI = "nvidia.com/gpu"
NO_ENGINE = "no engine answers; ./inv train --runtime venv needs none"
#: What is kept of `docker info`: the rest is long, and names things that nobody asked for.
_KEPT = (
    *("ServerVersion", "CgroupDriver", "CgroupVersion", "DockerRootDir", "OperatingSystem", "SecurityOptions"),
    *("Runtimes", "DefaultRuntime", "DiscoveredDevices", "CDISpecDirs", "ServerErrors", "NCPU", "MemTotal", "Driver"),
)


def shorten_info(text: str) -> str:
    """`docker info` as JSON with only what doctor judges. Text that is no JSON stays as it is."""
    for line in text.splitlines():
        if line.startswith("{"):
            whole = json.loads(line)
            info = {key: whole[key] for key in _KEPT if key in whole}
            info["Runtimes"] = {name: {} for name in whole.get("Runtimes") or {}}
            info["Context"] = (whole.get("ClientInfo") or {}).get("Context", "")
            return json.dumps(info)
    return text


def info_of(readings: Readings) -> tuple[dict[str, Any], str]:
    """What the daemon says of itself, and why it says nothing ("" when it answers)."""
    output = readings.run("docker", "info", "--format", "{{json .}}", shorten=shorten_info)
    if output.code == MISSING:
        return {}, "docker is not installed"
    if output.code == HUNG:
        return {}, "docker info does not come back: the daemon hangs"
    line = next((one for one in output.text.splitlines() if one.startswith("{")), "")
    info = json.loads(line) if line else {}
    if info.get("ServerErrors") or not info.get("ServerVersion"):
        errors = info.get("ServerErrors") or [
            output.text.strip().splitlines()[-1] if output.text.strip() else "no answer"
        ]
        return {}, str(errors[0])
    return info, ""


def version_of(text: str) -> tuple[int, ...]:
    """The leading dotted number of a version text ("v2.26.1-4": 2, 26, 1); empty when there is none."""
    match = re.search(r"\d+(?:\.\d+)+", text)
    return numbers(match[0]) if match else ()


def check_engine(readings: Readings) -> tuple[Report, dict[str, Any]]:
    """The daemon: does it answer, which one is it."""
    name = "Docker engine"
    info, problem = info_of(readings)
    if problem:
        known = explain(problem)
        missing = problem == "docker is not installed"
        make = warning if missing else failed
        return (
            make(
                name,
                problem,
                known.cause if known else "containers cannot be started",
                (known.fix if known else "install Docker Engine 26 or newer with buildx and compose")
                + "; without an engine: ./inv train --runtime venv",
            ),
            {},
        )
    version = str(info["ServerVersion"])
    kinds = []
    if any("rootless" in str(option) for option in info.get("SecurityOptions") or ()):
        kinds.append("rootless")
    if "snap" in str(info.get("DockerRootDir", "")):
        kinds.append("snap")
    if "Docker Desktop" in str(info.get("OperatingSystem", "")):
        kinds.append("Docker Desktop")
    context = info.get("Context") or "default"
    told = f"Engine {version}, context {context}" + (f", {' and '.join(kinds)}" if kinds else "")
    data = {"version": version, "context": context, "kinds": kinds}
    if "snap" in kinds:
        return (
            warning(
                name,
                told,
                "Docker from a snap cannot use the NVIDIA toolkit and sees only your home folder",
                "sudo snap remove docker; install Docker Engine from its own or the distribution's packages",
                **data,
            ),
            info,
        )
    if version_of(version) < (23,):
        return (
            warning(name, told, "older than what this project was tried with", "Docker Engine 26 or newer", **data),
            info,
        )
    return passed(name, told, **data), info


def check_plugins(readings: Readings, info: dict[str, Any]) -> Report:
    """buildx, which builds the image, and compose, which starts it."""
    name = "buildx and compose"
    if not info:
        return skipped(name, NO_ENGINE)
    buildx, compose = readings.run("docker", "buildx", "version"), readings.run("docker", "compose", "version")
    found = {
        "buildx": version_of(buildx.text) if buildx.ok else (),
        "compose": version_of(compose.text) if compose.ok else (),
    }
    told = ", ".join(f"{tool} {'.'.join(map(str, version)) or 'missing'}" for tool, version in found.items())
    missing = [tool for tool, version in found.items() if not version]
    if missing:
        return failed(
            name,
            told,
            f"the docker command on PATH knows no {' and no '.join(missing)}",
            "install the docker-buildx and docker-compose (v2) plugins; or an older docker comes first on PATH",
        )
    if found["compose"] < (2, 20):
        return warning(name, told, "an old compose", "compose 2.24 or newer")
    return passed(name, told)


def gpu_mode(readings: Readings, info: dict[str, Any]) -> str:
    """How this daemon gives GPUs: "nvidia" (runtime), "cdi", "hook" or ""."""
    if "nvidia" in (info.get("Runtimes") or {}):
        return "nvidia"
    if any(CDI in str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or ()):
        return "cdi"
    for folder in info.get("CDISpecDirs") or ():
        for path in readings.listing(f"{folder}/*"):
            if CDI in (readings.file(path) or ""):
                return "cdi"
    hooks = ("/usr/bin/nvidia-container-runtime-hook", "/usr/bin/nvidia-cdi-hook")
    return "hook" if any(readings.listing(hook) for hook in hooks) else ""


def check_gpu_runtime(readings: Readings, info: dict[str, Any], gpus: int) -> Report:
    """Whether containers of this daemon get the GPUs, and the trap of systemd's reload."""
    name = "GPUs in containers"
    if not info:
        return skipped(name, NO_ENGINE)
    if not gpus:
        return skipped(name, "no NVIDIA GPU on this machine")
    mode = gpu_mode(readings, info)
    runtimes = ", ".join(sorted(info.get("Runtimes") or {}))
    if not mode:
        kinds = "rootless " if any("rootless" in str(one) for one in info.get("SecurityOptions") or ()) else ""
        return failed(
            name,
            f"the {kinds}daemon has the runtimes {runtimes}, no CDI description of {CDI} and no NVIDIA hook",
            "the NVIDIA Container Toolkit is not installed, or this daemon was not told and restarted",
            "install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && "
            "sudo systemctl restart docker"
            + (" (rootless: nvidia-ctk runtime configure --config=$HOME/.config/docker/daemon.json)" if kinds else ""),
        )
    told = {"nvidia": "nvidia runtime", "cdi": "CDI", "hook": "NVIDIA's hook"}[mode]
    if mode != "cdi" and info.get("CgroupDriver") == "systemd" and not readings.listing("/dev/char/195:*"):
        return warning(
            name,
            f"{told}, cgroup driver systemd, no /dev/char links for the GPUs",
            "the next systemctl daemon-reload (unattended upgrades do it) takes the GPUs away from running containers: "
            "'Failed to initialize NVML: Unknown Error'",
            "sudo nvidia-ctk system create-dev-char-symlinks --create-all, or use CDI",
        )
    return passed(name, f"{told}; runtimes {runtimes}; cgroup driver {info.get('CgroupDriver')}")
