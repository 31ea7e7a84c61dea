"""The GPUs of this machine from nvidia-smi's text, live or recorded, where NVML cannot be used."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Callable
from typing import Any

from app.hardware.gpus import Gpu, Machine, numa_node
from app.hardware.topology import parse_p2p, parse_topology

#: Fields asked of nvidia-smi, in order, and the attribute of Gpu each fills.
QUERY: dict[str, str] = {
    "index": "index",
    "name": "name",
    "pci.bus_id": "bus_id",
    "memory.total": "memory_mib",
    "memory.used": "memory_used_mib",
    "compute_cap": "capability",
    "pcie.link.gen.current": "pcie_gen",
    "pcie.link.gen.max": "pcie_gen_max",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max",
    "persistence_mode": "persistence",
    "mig.mode.current": "mig",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
    "power.limit": "power_limit_w",
    "power.default_limit": "power_default_w",
    "temperature.gpu": "temperature_c",
    "clocks.sm": "clock_sm_mhz",
    "clocks.max.sm": "clock_sm_max_mhz",
}


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and output of a command; status 127 when it is not there, 124 when it hung for 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return 127, ""
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout + done.stderr


def read_smi(run: Callable[[list[str]], tuple[int, str]] = _run) -> Machine:
    """Read the machine from nvidia-smi's text. ``run`` gives (status, output) of a command, live or recorded."""
    status, header = run(["nvidia-smi"])
    if status == 127:
        return Machine("none", "nvidia-smi is not installed")
    machine = parse_smi_table(header)
    if not machine.driver:
        return machine
    fields = list(QUERY)
    status, table = run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    if status and "not a valid field" in table:  # drivers before 510 do not know compute_cap, before 450 not MIG
        fields = [name for name in fields if name not in ("compute_cap", "mig.mode.current")]
        status, table = run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    if status == 0 and table.strip():
        machine.gpus = parse_query(table, fields)
    status, matrix = run(["nvidia-smi", "topo", "-m"])
    if status == 0 and "GPU0" in matrix:
        machine.cells = parse_topology(matrix).cells
    status, matrix = run(["nvidia-smi", "topo", "-p2p", "r"])
    if status == 0 and "GPU0" in matrix:
        machine.p2p = parse_p2p(matrix)
    return machine


def parse_smi_table(text: str) -> Machine:
    """Driver, newest CUDA, and the GPUs' names and memory from the table that plain ``nvidia-smi`` prints."""
    head = re.search(r"Driver Version:\s*([\d.]+)(?:.*?CUDA Version:\s*([\d.]+|N/A|ERR!))?", text)
    if head is None:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "no output")
        return Machine("none", first)
    gpus = []
    rows = re.findall(
        r"^\|\s+(\d+)\s+(\S.*?)\s+(?:On|Off)\s+\|\s+([0-9A-Fa-f:.]+).*?$(?:\n.*?/\s*(\d+)MiB.*?$)?", text, re.MULTILINE
    )
    for index, name, bus, memory in rows:
        gpus.append(Gpu(int(index), name, bus, memory_mib=int(memory) if memory else None))
    cuda = head.group(2) if head.group(2) and head.group(2)[0].isdigit() else None
    return Machine("nvidia-smi", "", head.group(1), cuda, gpus)


def parse_query(text: str, fields: list[str]) -> list[Gpu]:
    """The GPUs from ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``. "[N/A]" and the like become None."""
    gpus = []
    for row in csv.reader(text.strip().splitlines(), skipinitialspace=True):
        if len(row) != len(fields):
            raise ValueError(f"nvidia-smi gave {len(row)} values for {len(fields)} fields: {row}")
        gpu = Gpu(0, "")
        for name, cell in zip(fields, row, strict=True):
            setattr(gpu, QUERY[name], _cell(QUERY[name], cell.strip()))
        gpu.numa_node = numa_node(gpu.bus_id)
        gpus.append(gpu)
    return gpus


def _cell(attribute: str, text: str) -> Any:
    if attribute in ("name", "bus_id"):
        return text
    if attribute in ("persistence", "mig"):
        return {"Enabled": True, "Disabled": False}.get(text)
    if attribute == "capability":
        parts = text.split(".")
        return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(part.isdigit() for part in parts) else None
    try:
        return float(text) if attribute.endswith("_w") else int(float(text))
    except ValueError:
        return None
