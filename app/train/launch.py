"""From an Accelerate config file to training processes: what it asks, whether this machine has it, and the processes themselves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from app import processes
from app.errors import STOPPED, WRONG_MACHINE, Fault

SHIPPED = Path(__file__).resolve().parent.parent / "accelerate"
GRACE_S = 60.0  #: after one rank failed, the others get this long to end by themselves
IDLE: dict[str, tuple[Any, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "main_training_function": ("main",),
    "rdzv_backend": ("static", ""),
    "same_network": (True,),
    "downcast_bf16": ("no", False),
    "dynamo_backend": ("no", "NO"),
    "tpu_env": ([], None),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    "deepspeed_config": ({},),
    "fsdp_config": ({},),
    "megatron_lm_config": ({},),
    "mpirun_config": ({},),
    "fp8_config": ({},),
    "dynamo_config": ({},),
    "parallelism_config": ({},),
}
"""Keys that ``accelerate config`` writes and that ask nothing of this trainer at these values; any other value is refused."""
USED = (
    "distributed_type",
    "mixed_precision",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
    "use_cpu",
    "gradient_accumulation_steps",
    "enable_cpu_affinity",
    "debug",
    "num_cpu_threads_per_process",
)


@dataclass(frozen=True)
class Launch:
    """What the config file and the machine decide. ``local`` processes here of ``processes`` in all; ``gpus`` are CUDA indices."""

    config: str
    cpu: bool
    local: int
    processes: int
    machines: int
    machine_rank: int
    address: str
    port: int
    gpus: tuple[int, ...]
    precision: str  # no, fp16, bf16
    accumulation: int
    cpu_affinity: bool
    debug: bool
    threads: int  # OpenMP threads a process; 0: cores / processes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_config(named: str) -> tuple[str, dict[str, Any]]:
    """The name or path used, and the keys of the YAML or JSON file. Raises Fault for a missing or malformed file or an unusable key."""
    import yaml

    path = Path(named)
    names = sorted(p.stem for p in SHIPPED.glob("*.yaml"))
    if named in names:
        path = SHIPPED / f"{named}.yaml"
    elif not path.is_file():
        raise Fault(
            f"--accelerate {named}: neither a file nor one of {', '.join(names)}. Make one with: accelerate config --config_file {named}"
        )
    try:
        keys = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise Fault(f"{path} is no YAML: {' '.join(str(e).split())}") from None
    if not isinstance(keys, dict):
        raise Fault(f"{path} holds no keys; make one with: accelerate config --config_file {path}")
    wrong = []
    for key, value in keys.items():
        if key in IDLE and value not in IDLE[key]:
            wrong.append(f"{key}: {value!r} (allowed here is {IDLE[key][0]!r})")
        elif key not in IDLE and key not in USED:
            wrong.append(f"{key} (unknown)")
    if wrong:
        raise Fault(f"{path} has keys that would do nothing in this trainer: {'; '.join(wrong)}. Remove them.")
    return str(path), keys


def resolve(named: str, gpus: int, environment: Mapping[str, str]) -> Launch:
    """The launch that ``--accelerate`` asks for on a machine where torch sees ``gpus`` GPUs.

    ``auto`` takes every GPU in fp16, or the CPU where there is none. Raises Fault for what this machine does not have.
    """
    if named == "auto" and not gpus and host_has_gpus():
        raise Fault(
            f"this host has a GPU and torch sees none. {why_no_gpu()} To train on the CPU all the same: --accelerate cpu",
            WRONG_MACHINE,
        )
    chosen = {0: "cpu", 1: "gpu-fp16"}.get(gpus, "ddp-fp16") if named == "auto" else named
    path, keys = read_config(chosen)

    def whole(key: str, default: int, least: int) -> int:
        value = keys.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Fault(f"{path}: {key} is {value!r}, allowed is a whole number from {least}.")
        return value

    kind = str(keys.get("distributed_type", "NO"))
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise Fault(f"{path}: distributed_type is {kind}, allowed is 'NO', MULTI_GPU or MULTI_CPU.")
    cpu = bool(keys.get("use_cpu", False)) or kind == "MULTI_CPU"
    precision = str(keys.get("mixed_precision", "no")).strip().lower().replace("false", "no")
    if precision not in ("no", "fp16", "bf16"):
        raise Fault(f"{path}: mixed_precision is {precision!r}, allowed is 'no', fp16 or bf16.")
    if cpu and precision == "fp16":
        raise Fault(f"{path}: mixed_precision fp16 needs a GPU; on the CPU allowed is 'no' or bf16.", WRONG_MACHINE)
    if not cpu and not gpus:
        raise Fault(
            f"{path} asks for a GPU and torch sees none here. {why_no_gpu()} To train on the CPU: --accelerate cpu",
            WRONG_MACHINE,
        )
    chosen_gpus = _gpu_ids(path, keys.get("gpu_ids"), gpus)
    machines, rank = whole("num_machines", 1, 1), int(environment.get("KIT_MACHINE_RANK", keys.get("machine_rank", 0)))
    if not 0 <= rank < machines:
        raise Fault(
            f"{path}: machine_rank is {rank}, allowed is 0 to num_machines - 1 = {machines - 1}; every machine has its own."
        )
    address = environment.get("KIT_MAIN_PROCESS_IP") or str(keys.get("main_process_ip") or "127.0.0.1")
    if machines > 1 and address.startswith("192.0.2."):
        raise Fault(
            f"{path}: main_process_ip is the example {address}; set it, or KIT_MAIN_PROCESS_IP, to the first machine's address.",
            2,
        )
    if machines > 1 and address in ("127.0.0.1", "localhost", "::1"):
        raise Fault(
            f"{path}: main_process_ip {address} is reached by the first machine alone; give its address in the network of both."
        )
    default = 1 if kind == "NO" else (2 if cpu else len(chosen_gpus) * machines)
    processes = whole("num_processes", default, 1)
    if processes % machines:
        raise Fault(
            f"{path}: num_processes {processes} is not a multiple of num_machines {machines}; it counts the processes of all machines."
        )
    if kind == "NO" and processes > 1:
        raise Fault(f"{path}: num_processes {processes} needs distributed_type MULTI_GPU or MULTI_CPU; it is 'NO'.")
    local = processes // machines
    if not cpu and local > len(chosen_gpus):
        raise Fault(
            f"{path}: {local} processes on this machine, but {len(chosen_gpus)} GPUs to use (torch sees {gpus}); "
            f"set num_processes to {len(chosen_gpus) * machines}.",
            WRONG_MACHINE,
        )
    port = whole("main_process_port", 0, 0) if keys.get("main_process_port") is not None else 0
    if machines > 1 and not port:
        raise Fault(f"{path}: main_process_port is missing; give one that is open between the machines, such as 29500.")
    return Launch(
        path,
        cpu,
        local,
        processes,
        machines,
        rank,
        address,
        port,
        chosen_gpus[:local] if not cpu else (),
        precision,
        whole("gradient_accumulation_steps", 1, 1),
        bool(keys.get("enable_cpu_affinity", True)),
        bool(keys.get("debug", False)),
        whole("num_cpu_threads_per_process", 0, 0),
    )


def _gpu_ids(path: str, value: Any, gpus: int) -> tuple[int, ...]:
    if value in (None, "all"):
        return tuple(range(gpus))
    try:
        ids = tuple(int(part) for part in str(value).split(","))
    except ValueError:
        raise Fault(f"{path}: gpu_ids is {value!r}, allowed is all, or numbers such as 0,1.") from None
    if any(not 0 <= i < gpus for i in ids) or len(set(ids)) < len(ids):
        raise Fault(
            f"{path}: gpu_ids is {value}, but torch sees {gpus} GPUs, numbered from 0 (inside a container too); use all or some of 0 to {gpus - 1}.",
            WRONG_MACHINE,
        )
    return ids


def visible_gpus() -> int:
    """How many GPUs torch sees; makes no CUDA context."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def host_has_gpus() -> bool:
    """Whether the NVIDIA driver of the host has GPUs, also where this container was not given them: /proc is the kernel's."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def why_no_gpu() -> str:
    """A sentence on why torch sees no GPU, as far as this process can tell."""
    if Path("/proc/driver/nvidia/version").exists():
        if Path("/.dockerenv").exists():
            return "The host has an NVIDIA driver, so the container was started without its GPUs: run ./inv build, which sets that up."
        return "The NVIDIA driver is loaded, so something keeps torch from it: run ./inv doctor."
    return "No NVIDIA driver is loaded on this host."


def is_worker(environment: Mapping[str, str]) -> bool:
    """True in a process that a launcher (this one, torchrun, accelerate launch) started as one of several."""
    return int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" in environment


def run_processes(launch: Launch, program: str, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Start the local processes of a launch as ``python -m program``, pass signals on, wait; returns their exit code.

    75 when they left after a signal. When one fails, the others are told to end, and killed after GRACE_S seconds: a process whose peer is
    gone may hang in a collective for ever.
    """
    port = launch.port or _free_port()
    children: list[subprocess.Popen[bytes]] = []
    received: list[int] = []
    earlier = {
        s: signal.signal(s, lambda number, frame: received.append(number)) for s in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        for index in range(launch.local):
            environment = {**os.environ, **rank_environment(launch, index, port)}
            # A session of its own, so that Ctrl-C reaches this process alone and is passed on once.
            children.append(
                subprocess.Popen([sys.executable, "-m", program, *arguments], env=environment, start_new_session=True)
            )
        return _wait(children, received, say)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for number, handler in earlier.items():
            signal.signal(number, handler)


def rank_environment(launch: Launch, index: int, port: int) -> dict[str, str]:
    """The variables torch.distributed and Accelerate read, for local process ``index``."""
    cores = len(os.sched_getaffinity(0))
    made = {
        "RANK": str(launch.machine_rank * launch.local + index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(launch.processes),
        "LOCAL_WORLD_SIZE": str(launch.local),
        "MASTER_ADDR": launch.address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(launch.threads or os.environ.get("OMP_NUM_THREADS") or max(1, cores // launch.local)),
        "KIT_LAUNCHED": "1",
    }
    if launch.cpu:
        made["ACCELERATE_USE_CPU"] = "true"
    elif launch.gpus != tuple(range(launch.local)):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(max(launch.gpus) + 1)]
        made["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in launch.gpus)
    return made


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait(children: list[subprocess.Popen[bytes]], received: list[int], say: Callable[[str], None]) -> int:
    passed_on = 0
    failed = 0
    deadline = float("inf")
    while True:
        codes = [child.poll() for child in children]
        running = [child for child, code in zip(children, codes, strict=True) if code is None]
        while passed_on < len(received):
            for child in running:
                child.send_signal(received[passed_on])
            passed_on += 1
        for rank, code in enumerate(codes):
            if not failed and code not in (None, 0, STOPPED):
                failed = code if code > 0 else WRONG_MACHINE
                say(_obituary(rank, children[rank].pid, code, len(children)))
                deadline = time.monotonic() + GRACE_S
                for child in running:
                    child.terminate()
        if not running:
            return failed or (STOPPED if STOPPED in codes else 0)
        if time.monotonic() > deadline:
            say(f"the other processes did not end within {GRACE_S:.0f} s and are killed; the last checkpoint is whole")
            for child in running:
                child.kill()
            deadline = float("inf")
        time.sleep(0.05)


def _obituary(rank: int, pid: int, code: int, count: int) -> str:
    if code >= 0:
        return f"process {rank} of {count} ended with exit code {code}; the others are stopped"
    name = signal.Signals(-code).name
    more = (
        "; the kernel does this when memory runs out: use fewer workers, a smaller --batch-size, or more memory"
        if -code == signal.SIGKILL
        else ""
    )
    more = more or (
        "; /dev/shm is often too small: give the container a larger shm_size" if -code == signal.SIGBUS else ""
    )
    return f"process {rank} of {count} (pid {pid}) was ended by {name}{more}; the others are stopped, and the same command goes on from the last checkpoint"


def run_as_program(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run ``main`` on this process's arguments and end with its exit code."""
    try:
        code = main(sys.argv[1:])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
    processes.end(code)


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when the launcher is gone (prctl PR_SET_PDEATHSIG), so that no rank is left behind."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
