"""Whether this environment's kernels and CUDA run on these GPUs with this driver, and which variant does if not."""

from __future__ import annotations

import torch

from app.errors import WRONG_MACHINE, Fault
from app.hardware import nvml
from app.hardware.drivers import judge_driver, serves, sm
from app.host.variants import variants
from app.train.launch import Launch


def check_early(launch: Launch) -> None:
    """Raises Fault before any data is read if the driver, or every GPU there is, is not served. Makes no CUDA context."""
    if launch.cpu:
        return
    machine = nvml.read()
    kernels = torch.cuda.get_arch_list()
    cuda = str(torch.version.cuda)
    capabilities = [gpu.capability for gpu in machine.gpus if gpu.capability]
    if machine.driver and not judge_driver(machine.driver, cuda).runs:
        raise Fault(
            f"{judge_driver(machine.driver, cuda).sentence()}; {advice(machine.driver, capabilities)}", WRONG_MACHINE
        )
    if capabilities and not any(serves(kernels, c) for c in capabilities):
        gpu = machine.gpus[0]
        raise Fault(_unserved(gpu.name, capabilities[0], kernels, advice(machine.driver, capabilities)), WRONG_MACHINE)


def check_device(device: torch.device) -> None:
    """Raises Fault if the GPU of this process has no kernels in this torch: its first operation would fail."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    kernels = torch.cuda.get_arch_list()
    if not serves(kernels, capability):
        driver = nvml.read().driver
        raise Fault(
            _unserved(torch.cuda.get_device_name(device), capability, kernels, advice(driver, [capability])),
            WRONG_MACHINE,
        )


def _unserved(name: str, capability: tuple[int, int], kernels: list[str], what_to_do: str) -> str:
    have = ", ".join(k for k in kernels if k.startswith("sm_"))
    return (
        f"{name} is {sm(capability)}, and this torch ({torch.__version__}) has kernels for {have} alone; {what_to_do}"
    )


def advice(driver: str | None, capabilities: list[tuple[int, int]]) -> str:
    """Which variant runs here, or what has to change before one can."""
    serving = [v for v in variants().values() if all(serves(list(v.architectures), c) for c in capabilities)]
    running = [v for v in serving if driver is None or judge_driver(driver, v.cuda).runs]
    if running:
        return f"use the variant that does: ./inv build --cuda {running[-1].cuda}"
    if serving:
        return f"update the driver to {serving[0].driver_floor} or newer, then ./inv build --cuda {serving[0].cuda}"
    return "no variant of this project has kernels for it"
