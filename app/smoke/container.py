"""What the container gives: shared memory, limits, CPUs and memory, writable folders, a user. No torch."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import resource
import shutil
import tempfile
from pathlib import Path

from app.hardware.report import Report, failed, passed, skipped, warning

#: MiB of /dev/shm a rank: its loader's workers (4 workers x 2 batches ahead x 2 MiB) and, with several GPUs, NCCL's
#: segments (about 9.6 MB each, a dozen channels).
LOADER_MIB = 16
NCCL_MIB = 128
#: What a GPU's process should find: CPU cores and GB of memory (16 cores and 64 GB are the floor for 8 GPUs).
CORES_A_GPU = 2
GB_A_GPU = 8
CGROUP = Path("/sys/fs/cgroup")
STARTER = "start through `docker compose run smoke` or ./inv smoke"


def check_container(gpus: int) -> list[Report]:
    """All checks of the container for ``gpus`` GPUs (0: CPU only). Writes and removes small files in the folders."""
    return [
        check_shm(gpus),
        check_limits(),
        *check_cgroup(gpus),
        check_numa(),
        check_folders(folders()),
        check_user(),
    ]


def needed_shm_mib(gpus: int) -> int:
    """MiB that /dev/shm should have: the loaders of each rank, and NCCL's segments where several GPUs share memory."""
    ranks = max(gpus, 2)
    return ranks * LOADER_MIB + (gpus * NCCL_MIB if gpus > 1 else 0)


def check_shm(gpus: int, path: str = "/dev/shm") -> Report:
    """/dev/shm against what NCCL and the data loaders need."""
    name = "shared memory"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return failed(name, f"{path}: {error.strerror}", "no shared memory is mounted", STARTER)
    size, free, need = usage.total >> 20, usage.free >> 20, needed_shm_mib(gpus)
    rule = f"{path} has {free} of {size} MiB free; {need} MiB needed ({max(gpus, 2)} ranks x {LOADER_MIB} for loaders"
    rule += f" + {gpus} x {NCCL_MIB} for NCCL)" if gpus > 1 else ")"
    if free >= need:
        return passed(name, rule, size_mib=size, free_mib=free, needed_mib=need)
    return failed(
        name,
        rule,
        "too little shared memory: workers die with a bus error and NCCL says 'No space left on device'",
        "compose: shm_size on the service (not under build:), or ipc: host; docker run --shm-size 8g",
        size_mib=size,
        free_mib=free,
        needed_mib=need,
    )


def check_limits(infiniband: Path = Path("/dev/infiniband")) -> Report:
    """Locked memory (InfiniBand needs it without limit) and stack size."""
    name = "limits"
    locked, stack = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_STACK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    data = {"memlock_bytes": locked, "stack_bytes": stack, "open_files": files}
    summary = f"locked memory {_limit(locked)}, stack {_limit(stack)}, open files {_limit(files, unit=1)}"
    if infiniband.exists() and locked != resource.RLIM_INFINITY:
        return failed(
            name,
            summary + "; InfiniBand is here",
            "InfiniBand registers locked memory; with a limit NCCL fails with 'Cannot allocate memory'",
            "compose: ulimits: {memlock: -1}; docker run --ulimit memlock=-1",
            **data,
        )
    if stack != resource.RLIM_INFINITY and stack < 8 << 20:
        return warning(
            name,
            summary,
            "a stack below 8 MiB can overflow in threads of NCCL",
            "docker run --ulimit stack=67108864",
            **data,
        )
    if files != resource.RLIM_INFINITY and files < 1024:
        return warning(
            name, summary, "data loader workers need file descriptors", "docker run --ulimit nofile=65536", **data
        )
    return passed(name, summary, **data)


def _limit(value: int, unit: int = 1 << 20) -> str:
    if value == resource.RLIM_INFINITY:
        return "without limit"
    return f"{value // unit}" + (" MiB" if unit > 1 else "")


def _number(path: Path) -> int | None:
    """The first number of a cgroup file; None for "max" or where there is none."""
    try:
        first = path.read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(first) if first.lstrip("-").isdigit() and int(first) >= 0 else None


def memory_limit(root: Path = CGROUP) -> int | None:
    """Bytes that this cgroup may use, or None without a limit. Reads version 2, then version 1."""
    limit = _number(root / "memory.max")
    if limit is None:
        limit = _number(root / "memory" / "memory.limit_in_bytes")
    return limit if limit is not None and limit < 1 << 60 else None


def cpu_limit(root: Path = CGROUP) -> float:
    """CPU cores that this process may use: its affinity, cut by the cgroup's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    quota, period = _number(root / "cpu.max"), 100_000
    with contextlib.suppress(OSError, IndexError, ValueError):
        period = int((root / "cpu.max").read_text().split()[1])
    if quota is None:
        quota = _number(root / "cpu" / "cpu.cfs_quota_us")
        period = _number(root / "cpu" / "cpu.cfs_period_us") or period
    return min(cores, quota / period) if quota else cores


def killed_for_memory(root: Path = CGROUP) -> int:
    """How many processes of this cgroup were killed because its memory limit was reached."""
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdigit():
                    return int(value)
    return 0


def total_memory() -> int:
    """Bytes of memory that the machine reports. Raises OSError where /proc is not mounted."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def check_cgroup(gpus: int, root: Path = CGROUP) -> list[Report]:
    """CPU cores and memory that this container may use, against the number of GPUs."""
    cores = cpu_limit(root)
    limit, total = memory_limit(root), total_memory()
    memory = min(limit or total, total) / 1e9
    killed = killed_for_memory(root)
    data = {"cores": cores, "memory_gb": round(memory, 1), "limited": limit is not None, "killed_for_memory": killed}
    where = "limit of the container" if limit is not None and limit < total else "whole machine"
    summary = f"{cores:g} CPU cores, {memory:.1f} GB of memory ({where})"
    if gpus:
        summary += f"; at least {gpus * CORES_A_GPU} cores and {gpus * GB_A_GPU} GB for {gpus} GPUs"
    name = "CPU and memory"
    if killed:
        return [
            warning(
                name,
                f"{summary}; {killed} processes of this container were already killed for memory",
                "the memory limit was reached; such processes end with -9 and without a message",
                "raise the container's memory limit, or use fewer --num-workers",
                **data,
            )
        ]
    if memory < max(2, gpus * GB_A_GPU) or cores < gpus * CORES_A_GPU:
        return [
            warning(
                name,
                summary,
                "reading and collating data will be slower than the GPUs, or memory runs out",
                "raise the limits of the container (compose: deploy.resources.limits, mem_limit, cpus)",
                **data,
            )
        ]
    return [passed(name, summary, **data)]


def check_numa(root: Path = Path("/sys/devices/system/node")) -> Report:
    """How many NUMA nodes there are and which CPUs this process may use. The GPUs' nodes are in their own reports."""
    name = "NUMA"
    nodes = sorted(int(path.name[4:]) for path in root.glob("node[0-9]*"))
    if not nodes:
        return skipped(name, f"{root} does not tell the NUMA nodes")
    cpus = sorted(os.sched_getaffinity(0))
    lists = {}
    for node in nodes:
        with contextlib.suppress(OSError):
            lists[node] = (root / f"node{node}" / "cpulist").read_text().strip()
    text = ", ".join(f"node {node}: CPUs {cpulist}" for node, cpulist in lists.items())
    return passed(name, f"{len(nodes)} NUMA node(s) ({text}); this process may use {len(cpus)} CPUs", nodes=lists)


def folders() -> dict[str, Path]:
    """Every folder that training writes to, by what it is for."""
    home = Path(os.environ.get("HOME", "/"))
    found = {
        "output": Path.cwd() / "out",
        "temporary files": Path(tempfile.gettempdir()),
        "Hugging Face cache": Path(os.environ.get("HF_HOME", home / ".cache" / "huggingface")),
    }
    for variable in ("KIT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if os.environ.get(variable):
            found[variable] = Path(os.environ[variable])
    return found


def check_folders(wanted: dict[str, Path]) -> Report:
    """Write a small file into each folder (or the nearest one above that exists) and tell the free space."""
    name = "folders"
    free: dict[str, float] = {}
    wrong: list[str] = []
    for purpose, path in wanted.items():
        place = path
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            with tempfile.NamedTemporaryFile(dir=place, prefix=".smoke-") as probe:
                probe.write(b"x" * 4096)
            free[purpose] = round(shutil.disk_usage(place).free / 1e9, 1)
        except OSError as error:
            wrong.append(f"{purpose} {path}: {error.strerror}")
    room = ", ".join(f"{purpose} {wanted[purpose]} ({gigabytes} GB free)" for purpose, gigabytes in free.items())
    if wrong:
        return failed(
            name,
            "cannot write: " + "; ".join(wrong) + (f"; fine: {room}" if room else ""),
            f"user {os.getuid()}:{os.getgid()} may not write there; Docker creates a missing mount as root",
            "on the host: mkdir -p out data && sudo chown -R $(id -u):$(id -g) out data; then " + STARTER,
            free_gb=free,
        )
    least = min(free.values())
    if least < 2:
        return warning(name, room, "less than 2 GB free", "free some space, or point HF_HOME elsewhere", free_gb=free)
    return passed(name, room, free_gb=free)


def check_user() -> Report:
    """A name for the user id (torch.compile asks for one) and a home that can be written."""
    name = "user"
    uid, gid = os.getuid(), os.getgid()
    home = os.environ.get("HOME", "")
    try:
        entry = pwd.getpwuid(uid).pw_name
    except KeyError:
        entry = ""
    try:
        user = getpass.getuser()
    except (KeyError, OSError) as error:
        return warning(
            name,
            f"uid {uid} has no entry in /etc/passwd and no USER is set ({error})",
            "torch.compile and the caches ask for the user's name and fail without one",
            STARTER + " (it sets USER and HOME), or set USER yourself",
            uid=uid,
            gid=gid,
        )
    if not home or not os.access(home, os.W_OK):
        return warning(
            name,
            f"uid {uid} ({user}): HOME is {home or 'not set'} and cannot be written",
            "libraries keep caches and settings in HOME",
            STARTER + ", or set HOME to a folder that this user may write",
            uid=uid,
            gid=gid,
        )
    told = "" if entry else ", no entry in /etc/passwd but USER is set"
    return passed(name, f"uid {uid}:{gid} is {user}, HOME {home}{told}", uid=uid, gid=gid)
