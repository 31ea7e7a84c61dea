"""Doctor on the rest of the host: CPU, memory, disks, network, ports and settings that change what training does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from app.hardware.report import Report, failed, passed, skipped, warning
from app.host.doctor_read import Disk, Readings, temporary
from app.host.variants import ROOT

#: CPU cores and GB of memory a GPU: 16 cores and 64 GB are the floor for 8 GPUs.
CORES_A_GPU, GB_A_GPU = 2, 8
#: GB that should be free, by purpose: checkpoints of BERT-base are 1.3 GB each with the optimizer's state.
NEEDED_GB = {"project and output": 10.0, "temporary files": 2.0, "Hugging Face cache": 5.0}
PORTS = {29500: "torch's rendezvous, where the Accelerate file names no other", 6006: "TensorBoard"}


def _number(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdigit() else None


def check_cpu(readings: Readings, gpus: int) -> Report:
    """Cores and memory for this many GPUs, governor and swapping."""
    name = "CPU and memory"
    cores = readings.fact("cores", lambda: len(os.sched_getaffinity(0)))
    meminfo = readings.file("/proc/meminfo") or ""
    total = re.search(r"MemTotal:\s*(\d+)", meminfo)
    swap = re.search(r"SwapTotal:\s*(\d+)", meminfo)
    if not cores or not total:
        return skipped(name, "not recorded")
    memory = int(total[1]) * 1024 / 1e9
    told = f"{cores} cores, {memory:.0f} GB"
    if gpus:
        told += f"; at least {gpus * CORES_A_GPU} cores and {gpus * GB_A_GPU} GB for {gpus} GPUs"
    seen, causes, fixes = [], [], []
    if gpus and (cores < gpus * CORES_A_GPU or memory < gpus * GB_A_GPU):
        causes.append("tokenising and collating will be slower than the GPUs, or memory runs out")
        fixes.append("more cores or memory, or fewer GPUs at once")
    swappiness = _number(readings.file("/proc/sys/vm/swappiness"))
    if gpus and swappiness is not None and swappiness >= 60 and swap and int(swap[1]):
        seen.append(f"swappiness {swappiness} with {int(swap[1]) * 1024 / 1e9:.0f} GB of swap")
        causes.append("under pressure the kernel swaps out data that loaders need next")
        fixes.append("sudo sysctl vm.swappiness=10")
    governor = (readings.file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "").strip()
    driver = (readings.file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") or "").strip()
    # intel_pstate and amd-pstate call their dynamic mode "powersave"; elsewhere it pins the lowest frequency.
    if gpus and governor == "powersave" and "pstate" not in driver:
        seen.append(f"CPU governor {governor} ({driver})")
        causes.append("the CPU stays at its lowest frequency")
        fixes.append("sudo cpupower frequency-set -g performance")
    told = "; ".join([told, *seen])
    if causes:
        return warning(name, told, "; ".join(causes), "; ".join(fixes), cores=cores, memory_gb=round(memory, 1))
    return passed(name, told + (f", governor {governor}" if governor else ""), cores=cores, memory_gb=round(memory, 1))


def read_disks(readings: Readings, docker_root: str) -> dict[str, Disk]:
    """Every path that will be written, with its disk."""
    cache = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    readings.disk("project and output", str(ROOT))
    readings.disk("temporary files", temporary())
    readings.disk("Hugging Face cache", cache)
    if docker_root and (not readings.live or Path(docker_root).is_dir()):
        readings.disk("Docker images", docker_root)
    return readings.disks()


def check_disks(disks: dict[str, Disk], image_gb: float) -> Report:
    """Room on every path that is written, on its own mount; an image needs ``image_gb`` twice while it is built."""
    name = "disks"
    if not disks:
        return skipped(name, "not recorded")
    needed = {**NEEDED_GB, "Docker images": 2 * image_gb}
    lines, tight, full = [], [], []
    for purpose, disk in disks.items():
        free = disk.free / 1e9
        need = needed.get(purpose, 2.0)
        place = f"{disk.path} (on {disk.mount})" if disk.path != disk.mount else disk.path
        mark = "" if disk.writable or purpose == "Docker images" else ", not writable for you"
        lines.append(f"{purpose}: {free:.1f} of {disk.total / 1e9:.0f} GB free at {place}{mark}; {need:g} wanted")
        if free < 1 or (purpose == "Docker images" and free < image_gb):
            full.append(purpose)
        elif free < need or mark:
            tight.append(purpose)
    summary = "\n".join(lines)
    data = {purpose: {"free_gb": round(disk.free / 1e9, 1), "mount": disk.mount} for purpose, disk in disks.items()}
    if full:
        return failed(
            name,
            summary,
            f"no room for: {', '.join(full)}",
            "docker system prune frees images; DockerRootDir (data-root in daemon.json), HF_HOME and TMPDIR can move",
            **data,
        )
    if tight:
        return warning(
            name,
            summary,
            f"tight or not writable: {', '.join(tight)}",
            "free some space, or move it with HF_HOME, TMPDIR",
            **data,
        )
    return passed(name, summary, **data)


def interfaces(readings: Readings) -> list[tuple[str, bool, bool]]:
    """(name, up, has an address) of every network interface."""
    output = readings.run("ip", "-br", "addr")
    found = []
    if output.ok:
        for line in output.text.splitlines():
            parts = line.split()
            if len(parts) >= 2:
                name = parts[0].split("@")[0]
                found.append((name, parts[1] in ("UP", "UNKNOWN"), len(parts) > 2))
        return found
    for path in readings.listing("/sys/class/net/*"):
        state = (readings.file(f"{path}/operstate") or "").strip()
        if state:
            found.append((Path(path).name, state in ("up", "unknown"), True))
    return found


def nccl_choice(names: list[str]) -> list[str]:
    """The interfaces that NCCL takes if told nothing: ib*, else all but docker*, lo, virbr*, else docker*, else lo."""
    kinds = (
        lambda one: one.startswith("ib"),
        lambda one: not one.startswith(("docker", "lo", "virbr")),
        lambda one: one.startswith("docker"),
        lambda one: one.startswith("lo"),
    )
    return next((chosen for kind in kinds if (chosen := [name for name in names if kind(name)])), [])


def check_network(readings: Readings) -> Report:
    """Which interface NCCL would choose, and what to set where several machines train together."""
    name = "network"
    usable = [one for one, up, address in interfaces(readings) if up and address]
    if not usable:
        return skipped(name, "no interface could be read")
    chosen = nccl_choice(usable)
    virtual = [one for one in chosen if re.match(r"br-|veth|docker|virbr|lo$|tun|tap|cni|flannel|cali", one)]
    real = [one for one in chosen if one not in virtual]
    told = f"NCCL would use {', '.join(chosen)}"
    if real and not virtual:
        return passed(name, f"{told}; for several machines: NCCL_SOCKET_IFNAME={'='}{real[0]}", chosen=chosen)
    if real:
        return warning(
            name,
            f"{told}; of these {', '.join(virtual)} lead to no other machine",
            "for several machines NCCL may take a bridge or tunnel and hang at the start; one machine is not affected",
            f"on several machines: NCCL_SOCKET_IFNAME={'='}{real[0]} on this one (an = asks for exactly that name)",
            chosen=chosen,
        )
    return passed(name, f"{told}: one machine only, which is enough for training here", chosen=chosen)


def listening_ports(texts: Iterable[str]) -> list[int]:
    """TCP ports that are listened on, from the tables of /proc/net/tcp and tcp6."""
    found: set[int] = set()
    for text in texts:
        for line in text.splitlines()[1:]:
            parts = line.split()
            if len(parts) > 3 and parts[3] == "0A":
                found.add(int(parts[1].rsplit(":", 1)[1], 16))
    return sorted(found)


def _read_ports() -> list[int]:
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    return listening_ports(path.read_text() for path in tables)


def check_ports(readings: Readings) -> Report:
    """Whether the ports that training and TensorBoard use are free."""
    name = "ports"
    # Only the ports are kept: the tables also hold the addresses of everyone this machine talks to.
    listening = readings.fact("listening ports", _read_ports)
    if listening is None:
        return skipped(name, "not recorded")
    taken = {port: use for port, use in PORTS.items() if port in listening}
    if taken:
        told = ", ".join(f"{port} ({use})" for port, use in taken.items())
        return warning(
            name,
            f"taken: {told}",
            "another training or TensorBoard runs here",
            "main_process_port in the Accelerate file, KIT_TENSORBOARD_PORT in .env; ss -ltnp names the program",
        )
    return passed(name, "free: " + ", ".join(f"{port} ({use})" for port, use in PORTS.items()))


def check_settings(readings: Readings) -> Report:
    """Variables of this shell that change what training does, the toolkit on PATH, and where models come from."""
    name = "settings"
    seen = readings.environment()
    nccl = {key: value for key, value in seen.items() if key.startswith(("NCCL_", "TORCH_NCCL_"))}
    toolkit = re.search(r"release ([\d.]+)", readings.run("nvcc", "--version", keep="release").text)
    told = [f"models come from {seen.get('HF_ENDPOINT') or 'the standard hub'}"]
    told.append(
        f"CUDA toolkit {toolkit[1]} on PATH (not needed: the wheels bring CUDA)"
        if toolkit
        else "no CUDA toolkit on PATH (not needed)"
    )
    told += [f"{key}={value}" for key, value in sorted(seen.items()) if key not in ("HF_ENDPOINT", "TMPDIR")]
    causes, fixes = [], []
    if "compat" in seen.get("LD_LIBRARY_PATH", ""):
        causes.append("cuda-compat is on LD_LIBRARY_PATH: errors 803 and 804")
        fixes.append("take it off")
    if seen.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        causes.append("CUDA_VISIBLE_DEVICES hides every GPU")
        fixes.append("unset CUDA_VISIBLE_DEVICES")
    slowing = [key for key in nccl if key.endswith("_DISABLE") and nccl[key] not in ("", "0")]
    if slowing:
        causes.append(f"{', '.join(slowing)} switches off a way between GPUs")
        fixes.append("unset it unless ./inv smoke shows that it is needed")
    proxied = any(key.lower() in ("http_proxy", "https_proxy") for key in seen)
    if proxied and "localhost" not in seen.get("NO_PROXY", seen.get("no_proxy", "")):
        causes.append("a proxy is set and NO_PROXY does not name localhost: local traffic goes through the proxy")
        fixes.append("NO_PROXY=localhost,127.0.0.1 and the names of the other nodes")
    if causes:
        return warning(name, "; ".join(told), "; ".join(causes), "; ".join(fixes))
    return passed(name, "; ".join(told))
