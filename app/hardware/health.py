"""The state of one GPU, judged from its reading alone: what smoke and doctor both say about it."""

from __future__ import annotations

from app.hardware.drivers import serves, sm
from app.hardware.gpus import POWER_BITS, THERMAL_BITS, Gpu, Machine, reasons
from app.hardware.links import pcie
from app.hardware.report import FAILED, PASSED, WARNING, Report

#: GB of memory that fit BERT-base training at 512 tokens in comfort, and below which even small batches are tight.
COMFORTABLE_GB, TIGHT_GB = 24, 8


class _Findings:
    """Collects what is wrong with one GPU; the worst decides the status, all are told."""

    def __init__(self) -> None:
        self.status = PASSED
        self.seen: list[str] = []
        self.causes: list[str] = []
        self.fixes: list[str] = []

    def add(self, status: str, seen: str, cause: str, fix: str) -> None:
        if status == FAILED or self.status == PASSED:
            self.status = status
        # The worst comes first: it is what to mend first.
        at = 0 if status == FAILED else len(self.seen)
        self.seen.insert(at, seen)
        self.causes.insert(at, cause)
        self.fixes.insert(at, fix)


def describe(gpu: Gpu) -> str:
    """Name, architecture, memory and slot in one line; what is unknown is left out."""
    parts = [gpu.name or "unnamed GPU"]
    if gpu.capability:
        parts.append(sm(gpu.capability))
    if gpu.memory_mib:
        parts.append(f"{gpu.memory_mib / 1024:.0f} GiB")
    if gpu.pcie_width:
        generation = f"Gen{gpu.pcie_gen} now, Gen{gpu.pcie_gen_max} at most, " if gpu.pcie_gen else ""
        parts.append(f"PCIe {generation}x{gpu.pcie_width}")
    if gpu.nvlinks:
        parts.append(f"{gpu.nvlinks} NVLinks")
    if gpu.numa_node is not None:
        parts.append(f"NUMA node {gpu.numa_node}")
    return ", ".join(parts)


def judge_gpu(gpu: Gpu, kernels: list[str] | None, gpus: int) -> Report:
    """One GPU against the kernels of an environment (None: not judged) and the demands of training on ``gpus`` GPUs."""
    found = _Findings()
    for fault in gpu.faults:
        found.add(
            FAILED,
            fault,
            "the driver could not read this GPU: it may have fallen off the bus",
            "dmesg | grep -i xid; reboot; check power, riser and slot",
        )
    if kernels is not None and gpu.capability and not serves(kernels, gpu.capability):
        found.add(
            FAILED,
            f"architecture {sm(gpu.capability)} is not among the kernels {' '.join(kernels)}",
            "this environment holds no machine code for this GPU and no PTX to compile from",
            "use the variant that serves it: ./inv doctor names it",
        )
    _memory(gpu, found)
    _slot(gpu, gpus, found)
    if gpu.mig:
        found.add(
            FAILED if gpus > 1 else WARNING,
            "MIG is on",
            "NCCL cannot use several MIG slices as ranks, so data-parallel training across them is refused",
            f"nvidia-smi -i {gpu.index} -mig 0 (as root), or train on one slice",
        )
    if gpu.nvswitch and gpu.fabric_state in (1, 2):
        found.add(
            FAILED,
            f"NVLink fabric {'not started' if gpu.fabric_state == 1 else 'still starting'}",
            "Fabric Manager is missing, stopped or of another version than the driver (CUDA then says error 802)",
            "systemctl status nvidia-fabricmanager; install exactly the driver's version of it",
        )
    _power(gpu, found)
    summary = describe(gpu) + ("".join(f"; {seen}" for seen in found.seen))
    return Report(
        f"GPU {gpu.index}",
        found.status,
        summary,
        "; ".join(found.causes),
        "; ".join(found.fixes),
        data={
            "name": gpu.name,
            "capability": list(gpu.capability) if gpu.capability else None,
            "memory_mib": gpu.memory_mib,
            "pcie_gbs": pcie(gpu.pcie_gen_max, gpu.pcie_width),
            "numa_node": gpu.numa_node,
        },
    )


def _memory(gpu: Gpu, found: _Findings) -> None:
    if gpu.ecc_uncorrected:
        found.add(
            FAILED,
            f"{gpu.ecc_uncorrected} uncorrectable memory errors since the driver was loaded",
            "memory cells fail in a way that ECC cannot repair: results are lost or wrong",
            f"reset the GPU (nvidia-smi -i {gpu.index} -r) or reboot; if it comes back, replace the card",
        )
    if gpu.rows_failed:
        found.add(FAILED, "a memory row could not be replaced", "no spare rows are left", "replace the card")
    elif gpu.rows_pending:
        found.add(
            WARNING,
            "memory rows wait to be replaced",
            "a failing row was found; its replacement becomes active at the next reset",
            "reboot or reset the GPU",
        )
    if gpu.memory_mib and gpu.memory_used_mib and gpu.memory_used_mib > 0.1 * gpu.memory_mib:
        found.add(
            WARNING,
            f"{gpu.memory_used_mib} of {gpu.memory_mib} MiB are already used",
            "another program uses this GPU",
            "nvidia-smi shows which; end it, or leave this GPU out with CUDA_VISIBLE_DEVICES",
        )
    if gpu.memory_mib and gpu.memory_mib / 1024 < TIGHT_GB - 0.5:
        found.add(
            WARNING,
            f"{gpu.memory_mib / 1024:.0f} GiB of memory",
            f"{COMFORTABLE_GB} GB are comfortable for BERT-base at 512 tokens, below {TIGHT_GB} it is tight",
            "small --batch-size with accumulation, or a smaller preset",
        )


def _slot(gpu: Gpu, gpus: int, found: _Findings) -> None:
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        found.add(
            WARNING,
            f"x{gpu.pcie_width} of x{gpu.pcie_width_max} PCIe lanes",
            "the slot has fewer lanes than the card, a riser or M.2 card shares them, or the contact is bad",
            "another slot, the board's manual on lane sharing, reseat the card",
        )
    if gpus > 1 and gpu.bar1_mib and gpu.memory_mib and gpu.bar1_mib < gpu.memory_mib:
        found.add(
            WARNING,
            f"BAR1 is {gpu.bar1_mib} MiB, smaller than the memory",
            "Above 4G Decoding or Resizable BAR is off: peers reach only a window of this GPU's memory",
            "switch both on in the firmware setup (this matters where the driver offers P2P)",
        )


def _power(gpu: Gpu, found: _Findings) -> None:
    if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < 0.95 * gpu.power_default_w:
        found.add(
            WARNING,
            f"power limit {gpu.power_limit_w:.0f} W, the default is {gpu.power_default_w:.0f} W",
            "the card is held below its default power and slows down under load",
            f"nvidia-smi -i {gpu.index} -pl {gpu.power_default_w:.0f} (as root), if power and cooling allow",
        )
    bits = gpu.throttle or 0
    if bits & THERMAL_BITS:
        found.add(
            WARNING,
            f"slowed down now: {', '.join(reasons(bits & THERMAL_BITS))} at {gpu.temperature_c} C",
            "the card is too hot or the board asks it to slow down",
            "clean fans and filters, more room between cards, or a lower power limit",
        )
    elif bits & POWER_BITS & 0x80:
        found.add(
            WARNING,
            "slowed down now: hardware power brake",
            "the power supply or its cables cannot feed the card",
            "one cable a connector, a stronger supply",
        )
    if gpu.persistence is False:
        found.add(
            WARNING,
            "persistence mode is off",
            "the driver unloads the GPU between programs: every start waits for it",
            "nvidia-smi -pm 1 (as root), or enable nvidia-persistenced",
        )


def slower_pcie(machine: Machine, i: int, j: int) -> float | None:
    """GB/s of the slower PCIe link of two GPUs at the generation both can reach, or None when unknown."""
    return slowest_pcie(machine, [i, j])


def slowest_pcie(machine: Machine, members: list[int]) -> float | None:
    """GB/s of the slowest PCIe link among GPUs, at the highest generation of card and slot (idle GPUs drop theirs)."""
    rates = [pcie(machine.gpus[k].pcie_gen_max, machine.gpus[k].pcie_width) for k in members]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def common_capability(machine: Machine, members: list[int]) -> tuple[int, int] | None:
    """The compute capability that all members share, or None when they differ or it is unknown."""
    found = {machine.gpus[k].capability for k in members}
    return found.pop() if len(found) == 1 else None
