"""Driver, libcuda and the GPUs as NVML tells them; no torch, no kernel yet. A hung driver hangs only this stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from app.hardware.cuda import probe_cuda
from app.hardware.drivers import MINOR_VERSION, UNKNOWN, judge_driver
from app.hardware.gpus import Gpu, Machine
from app.hardware.health import judge_gpu
from app.hardware.nvml import read
from app.hardware.report import Report, failed, passed, skipped, warning
from app.smoke.explain import explain
from app.smoke.stage import begin, finish, mark


def main() -> None:
    """Read everything and hand it to the parent, which judges it together with the environment."""
    begin()
    mark("ask NVML")
    machine = read()
    mark("ask libcuda")
    cuda = probe_cuda()
    finish(machine=machine.as_data(), cuda=cuda, host_gpus=host_gpus(), nodes=device_nodes())


def host_gpus(root: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """GPUs that the kernel's driver has; the kernel shows them inside a container that was given none."""
    return len(list(root.iterdir())) if root.is_dir() else 0


def device_nodes(root: Path = Path("/dev")) -> list[str]:
    """The GPU device files that this container was given."""
    return sorted(path.name for path in root.glob("nvidia[0-9]*"))


def in_cuda_order(machine: Machine, cuda: dict[str, Any]) -> Machine:
    """The machine with only the GPUs that CUDA sees, in CUDA's order and numbered so; matrices follow."""
    buses = [gpu.bus_id.lower()[-12:] for gpu in machine.gpus]
    order = [buses.index(device["bus_id"]) if device["bus_id"] in buses else None for device in cuda["devices"]]
    gpus = []
    for position, (k, device) in enumerate(zip(order, cuda["devices"], strict=True)):
        major, minor = device["capability"]
        unnamed = Gpu(position, "GPU unknown to NVML", device["bus_id"], (major, minor))
        gpus.append(unnamed if k is None else replace(machine.gpus[k], index=position))
    known = [k for k in order if k is not None]
    whole = len(known) == len(order)
    cells = [[machine.cells[i][j] for j in known] for i in known] if machine.cells and whole else []
    p2p = [[machine.p2p[i][j] for j in known] for i in known] if machine.p2p and whole else []
    return Machine(machine.source, machine.problem, machine.driver, machine.cuda_driver, gpus, cells, p2p)


def judge_devices(
    data: dict[str, Any], torch_cuda: str | None, kernels: list[str] | None, wanted: int | None
) -> tuple[list[Report], Machine]:
    """The reports on driver and GPUs, and the machine as CUDA sees it.

    ``wanted`` is the number of GPUs that must be there (None: whatever is), ``kernels`` the architectures that torch
    was built for. When no GPU can be used the machine has none, and the reports say why.
    """
    machine, cuda = Machine.from_data(data["machine"]), data["cuda"]
    none = Machine("none", machine.problem)
    if wanted == 0:
        return [skipped("GPUs", "not asked for (--gpus 0)")], none
    if not machine.gpus and not cuda["devices"]:
        return [_no_gpu(machine, cuda, data["host_gpus"], data["nodes"], wanted)], none
    reports = [_driver(machine, torch_cuda)]
    if not cuda["devices"]:
        return [*reports, _libcuda(cuda)], none
    seen = in_cuda_order(machine, cuda)
    reports.append(
        passed("CUDA start", f"cuInit works, GPUs visible: {len(cuda['devices'])}, driver for CUDA {cuda['version']}")
        if wanted is None or len(cuda["devices"]) >= wanted
        else failed(
            "CUDA start",
            f"{wanted} GPUs were asked for, {len(cuda['devices'])} are visible",
            "the container was given fewer GPUs, or CUDA_VISIBLE_DEVICES hides some",
            "./inv doctor on the host; docker run --gpus all; unset CUDA_VISIBLE_DEVICES",
        )
    )
    reports += [judge_gpu(gpu, kernels, len(seen.gpus)) for gpu in seen.gpus]
    return reports, seen


def _no_gpu(machine: Machine, cuda: dict[str, Any], host: int, nodes: list[str], wanted: int | None) -> Report:
    name = "GPUs"
    known = explain(machine.problem) or explain(cuda["error"])
    if host and not nodes:
        return failed(
            name,
            f"the host has {host} GPUs and this container was given none",
            "it was started without --gpus, or compose without its GPU part",
            "./inv build writes the GPU part where Docker can give GPUs; ./inv doctor says what is missing; "
            "--gpus 0 checks the CPU only",
        )
    if nodes or wanted or (known and known.name in ("driver-library-mismatch", "gpus-vanished")):
        return failed(
            name,
            f"no GPU can be used ({machine.problem}; libcuda: {cuda['error'] or 'no device'})",
            known.cause if known else f"{wanted or len(nodes)} GPUs are expected and the driver shows none",
            known.fix if known else "./inv doctor on the host; --gpus 0 checks the CPU only",
        )
    return skipped(name, f"no NVIDIA GPU here ({machine.problem}); the CPU checks are made, the GPU checks are not")


def _driver(machine: Machine, torch_cuda: str | None) -> Report:
    name = "driver"
    if machine.driver is None or torch_cuda is None:
        return skipped(
            name, f"driver {machine.driver or 'unknown'}, torch for CUDA {torch_cuda or 'none'}: not compared"
        )
    verdict = judge_driver(machine.driver, torch_cuda)
    if verdict.kind == UNKNOWN:
        return skipped(name, verdict.sentence())
    if not verdict.runs:
        return failed(
            name,
            verdict.sentence(),
            f"this environment's CUDA needs driver {verdict.floor} or newer",
            "./inv doctor names the variant that this driver can run; or upgrade the driver",
        )
    if verdict.kind == MINOR_VERSION:
        return warning(
            name,
            verdict.sentence(),
            "the driver is older than the one that came with this CUDA",
            f"driver {verdict.native} or newer, before --compile is used",
        )
    return passed(name, verdict.sentence(), driver=machine.driver)


def _libcuda(cuda: dict[str, Any]) -> Report:
    known = explain(cuda["error"])
    return failed(
        "CUDA start",
        f"NVML sees the GPUs, but CUDA does not start: {cuda['error'] or 'no device is visible'}",
        known.cause if known else "CUDA_VISIBLE_DEVICES hides all GPUs, or the driver refuses them",
        known.fix if known else "unset CUDA_VISIBLE_DEVICES; ./inv doctor on the host",
    )


if __name__ == "__main__":
    main()
