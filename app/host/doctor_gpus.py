"""Doctor on driver and GPUs: which variant serves them, and what between them stands in the way."""

from __future__ import annotations

import re
from collections.abc import Iterable

from app.hardware.drivers import NATIVE, DriverVerdict, judge_driver, newest_cuda, numbers, serves, sm
from app.hardware.gpus import Machine
from app.hardware.health import COMFORTABLE_GB, judge_gpu
from app.hardware.report import Report, failed, passed, skipped, warning
from app.hardware.topology import P2P_WORDS, PATHS
from app.host.doctor_read import Readings
from app.host.variants import Variant
from app.smoke.explain import explain

NO_GPU = "no NVIDIA GPU on this machine"


def module_version(text: str | None) -> str | None:
    """Version of the loaded kernel module from /proc/driver/nvidia/version."""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text or "")
    return match[1] if match else None


def check_driver(readings: Readings, machine: Machine) -> Report:
    """The kernel's module against the libraries, and why there is no driver where a card is."""
    name = "driver"
    module = module_version(readings.file("/proc/driver/nvidia/version"))
    cards = [
        line for line in readings.run("lspci", keep="NVIDIA").text.splitlines() if re.search("VGA|3D|Display", line)
    ]
    library = machine.driver or _library_version(machine.problem)
    if module and library and numbers(module) != numbers(library):
        return failed(
            name,
            f"kernel module {module}, libraries {library}",
            "the driver was upgraded while the old module is loaded: running jobs go on, new ones fail",
            "reboot; then hold the driver package so that unattended upgrades leave it alone",
            module=module,
            library=library,
        )
    if machine.gpus and machine.driver:
        newest = newest_cuda(machine.driver)
        return passed(
            name,
            f"driver {machine.driver}, natively for CUDA up to {newest or '(before 11.0)'}; read by {machine.source}",
            driver=machine.driver,
            newest_cuda=newest,
        )
    known = explain(machine.problem)
    if module:
        return failed(
            name,
            f"kernel module {module} is loaded, but no GPU can be read: {machine.problem}",
            known.cause if known else "the driver does not answer",
            known.fix if known else "dmesg | grep -i nvrm; reboot",
        )
    if cards:
        loaded = readings.file("/proc/modules") or ""
        nouveau = "nouveau" in loaded
        return failed(
            name,
            f"{len(cards)} NVIDIA card(s) on the bus and no driver loaded ({machine.problem})",
            "the free nouveau driver holds the card" if nouveau else "no NVIDIA kernel module for this kernel",
            "install the distribution's NVIDIA driver (550 or newer suits most cards), then reboot; "
            "dmesg | grep -i nvidia says why a module does not load",
        )
    return skipped(name, f"{NO_GPU} ({machine.problem})")


def _library_version(problem: str) -> str | None:
    match = re.search(r"library version:\s*([\d.]+)", problem)
    return match[1] if match else None


def fitting(machine: Machine, variants: Iterable[Variant]) -> dict[str, tuple[DriverVerdict | None, list[str]]]:
    """For each variant the verdict on the driver and the GPUs that it holds no kernels for."""
    found = {}
    for variant in variants:
        driver = judge_driver(machine.driver, variant.torch_cuda) if machine.driver else None
        left_out = [
            f"GPU {gpu.index} {gpu.name} ({sm(gpu.capability)})"
            for gpu in machine.gpus
            if gpu.capability and not serves(list(variant.architectures), gpu.capability)
        ]
        found[variant.cuda] = (driver, left_out)
    return found


def choose_variant(machine: Machine, variants: dict[str, Variant]) -> str | None:
    """The variant to use: the newest that holds kernels for every GPU and runs with this driver."""
    table = fitting(machine, variants.values())
    runs = [cuda for cuda, (driver, left_out) in table.items() if not left_out and (driver is None or driver.runs)]
    return max(runs, key=numbers) if runs else None


def check_variants(machine: Machine, variants: dict[str, Variant], asked: str | None) -> Report:
    """Which variants serve these GPUs and this driver, which one to use, and why the others do not."""
    name = "variants"
    if not machine.gpus:
        default = next((variant.cuda for variant in variants.values() if variant.default), "")
        return skipped(name, f"{NO_GPU}: every variant runs on the CPU, {default} is the default", use=asked or default)
    lines = []
    table = fitting(machine, variants.values())
    for cuda, (driver, left_out) in table.items():
        reasons = [f"no kernels for {', '.join(left_out)}"] if left_out else []
        reasons += [driver.sentence()] if driver and driver.kind != NATIVE else []
        good = not left_out and (driver is None or driver.runs)
        lines.append(f"{cuda}: {'yes' if good else 'no'}" + (f" ({'; '.join(reasons)})" if reasons else ""))
    use = choose_variant(machine, variants)
    summary = "\n".join(lines)
    data = {"use": asked or use, "table": {cuda: {"left_out": gone} for cuda, (_, gone) in table.items()}}
    if asked and (table[asked][1] or (table[asked][0] and not table[asked][0].runs)):  # type: ignore[union-attr]
        driver, left_out = table[asked]
        cause = f"no kernels for {', '.join(left_out)}" if left_out else driver.sentence() if driver else ""
        fix = f"use ./inv build --cuda {use}" if use else _upgrade(machine, variants)
        return failed(name, summary, f"--cuda {asked}: {cause}", fix, **data)
    if use is None:
        return failed(
            name,
            summary,
            "no variant has kernels for all these GPUs and runs with this driver",
            _upgrade(machine, variants),
            **data,
        )
    return passed(name, f"{summary}\nuse {asked or use}", **data)


def _upgrade(machine: Machine, variants: dict[str, Variant]) -> str:
    """What to do where no variant fits: a newer driver if that helps, else fewer GPUs."""
    table = fitting(machine, variants.values())
    whole = [variants[cuda] for cuda, (_, left_out) in table.items() if not left_out]
    if whole:
        easiest = min(whole, key=lambda variant: numbers(variant.driver_floor))
        return f"upgrade the driver to {easiest.driver_floor} or newer, then ./inv build --cuda {easiest.cuda}"
    served = {cuda: len(machine.gpus) - len(gone) for cuda, (_, gone) in table.items()}
    best = max(served, key=lambda cuda: served[cuda])
    if served[best]:
        return f"./inv build --cuda {best} and leave out {', '.join(table[best][1])} with CUDA_VISIBLE_DEVICES"
    return (
        "these GPUs are older or newer than every variant; train on the CPU, or make a variant of your own in pinned/"
    )


def check_each_gpu(machine: Machine) -> list[Report]:
    """Memory, slot, power and heat of every GPU, as the driver tells them while idle."""
    reports = []
    for gpu in machine.gpus:
        report = judge_gpu(gpu, None, len(machine.gpus))
        if gpu.memory_mib and gpu.memory_mib / 1024 < COMFORTABLE_GB - 0.5:
            report.summary += f"; {COMFORTABLE_GB} GB are comfortable for BERT-base at 512 tokens"
        if gpu.temperature_c is not None:
            report.summary += f"; {gpu.temperature_c} C"
        if gpu.power_limit_w:
            report.summary += f", power limit {gpu.power_limit_w:.0f} W"
        reports.append(report)
    names = {gpu.name for gpu in machine.gpus}
    if len(names) > 1:
        reports.append(
            warning(
                "mixed GPUs",
                ", ".join(sorted(names)),
                "in data-parallel training every step waits for the slowest card",
                "leave the slower ones out with CUDA_VISIBLE_DEVICES, and measure both ways",
            )
        )
    return reports


def check_topology(machine: Machine) -> Report:
    """How the GPUs are joined and where the driver grants P2P."""
    name = "topology"
    if len(machine.gpus) < 2:
        return skipped(name, "fewer than two GPUs" if machine.gpus else NO_GPU)
    matrix = machine.topology
    if not matrix.cells:
        return skipped(name, "neither NVML nor nvidia-smi topo -m tells how the GPUs are joined")
    paths = {matrix.path(i, j) for i in range(matrix.gpus) for j in range(matrix.gpus) if i != j}
    told = "; ".join(PATHS[path] for path in PATHS if path in paths)
    text = f"{matrix.gpus} GPUs joined by {told}\n{matrix.table()}"
    grants = {machine.p2p[i][j] for i in range(len(machine.p2p)) for j in range(len(machine.p2p)) if i != j}
    if grants:
        text += "\nP2P: " + ", ".join(P2P_WORDS.get(grant, grant) for grant in sorted(grants))
        text += "; ./inv smoke tests whether it works"
    return passed(name, text, cells=matrix.cells, p2p=machine.p2p)


def check_fabric(readings: Readings, machine: Machine) -> Report:
    """Fabric Manager where NVLink switches are."""
    name = "fabric manager"
    if not machine.gpus:
        return skipped(name, NO_GPU)
    if not any(gpu.nvswitch for gpu in machine.gpus):
        return skipped(name, "no NVLink switch here, so it is not needed")
    states = sorted({gpu.fabric_state for gpu in machine.gpus if gpu.fabric_state is not None})
    switches = readings.listing("/proc/driver/nvidia-nvswitch/devices/*")
    if not switches:
        return passed(
            name,
            f"the switches are not visible here (a virtual machine): its host runs the manager; fabric states {states}",
        )
    active = readings.run("systemctl", "is-active", "nvidia-fabricmanager").text.strip().splitlines()
    version = re.search(r"(\d+\.\d+(?:\.\d+)?)", readings.run("nv-fabricmanager", "--version").text)
    if active[:1] != ["active"]:
        return failed(
            name,
            f"{len(switches)} NVLink switches, nvidia-fabricmanager is {active[0] if active else 'not installed'}",
            "without Fabric Manager CUDA does not start on this machine (error 802)",
            f"install nvidia-fabricmanager {machine.driver} exactly, then systemctl enable --now nvidia-fabricmanager",
        )
    if version and machine.driver and version[1] != machine.driver:
        return failed(
            name,
            f"Fabric Manager {version[1]}, driver {machine.driver}",
            "both must be of the same version (CUDA else says error 802)",
            f"install nvidia-fabricmanager {machine.driver}",
        )
    return passed(name, f"{len(switches)} NVLink switches, Fabric Manager {version[1] if version else ''} is active")


def check_iommu(readings: Readings, machine: Machine) -> Report:
    """IOMMU and PCIe access control, which send peer traffic through the CPU or astray."""
    name = "IOMMU and ACS"
    if len(machine.gpus) < 2:
        return skipped(name, "matters between GPUs: fewer than two here" if machine.gpus else NO_GPU)
    if all(machine.topology.all_nvlink([i, j]) for i in range(len(machine.gpus)) for j in range(i)):
        return skipped(name, "all GPUs talk over NVLink, which neither touches")
    options = readings.file("/proc/cmdline") or ""
    units = readings.listing("/sys/class/iommu/*")
    control = readings.run("lspci", "-vvv", keep=r"^\S.*(?:bridge|NVIDIA)|ACSCtl:").text
    redirected = len(re.findall(r"ACSCtl:.*(?:SrcValid\+|ReqRedir\+)", control))
    passthrough = "iommu=pt" in options
    told = f"{len(units)} IOMMU units" + (", iommu=pt" if passthrough else "")
    told += f", ACS redirects on {redirected} bridges" if "ACSCtl" in control else ", ACS not readable without root"
    if redirected or (units and not passthrough):
        return warning(
            name,
            told,
            "traffic between GPUs goes through the CPU's IOMMU: slow, and on some boards it hangs or corrupts data",
            "bare metal: IOMMU (VT-d, AMD-Vi) and ACS off in the firmware, or iommu=pt on the kernel's command line; "
            "./inv smoke proves what P2P does here",
            units=len(units),
            acs=redirected,
        )
    return passed(name, told, units=len(units), acs=redirected)
