"""What is known of the GPUs of a machine; ``nvml.py`` and ``smi.py`` fill it.

Readings are plain data, so that a recording judges the same way as the machine it came from. No serial number or UUID
is read. A value that the driver does not offer is None: unknown, not zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.hardware.topology import Topology

#: nvmlClocksEventReasons bits and what each says.
THROTTLE: dict[int, str] = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock",
    0x200: "board limit",
    0x400: "reliability",
}
#: Reasons that say the card cannot cool itself or is not fed enough.
THERMAL_BITS = 0x8 | 0x20 | 0x40
POWER_BITS = 0x4 | 0x80
#: The power supply told the card to slow down; 0x4, its own power limit, is what a card at full load runs into.
POWER_BRAKE_BIT = 0x80


@dataclass
class Gpu:
    """One GPU as the driver numbers it (which may differ from CUDA's order; ``bus_id`` joins the two)."""

    index: int
    name: str
    bus_id: str = ""
    capability: tuple[int, int] | None = None
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    bar1_mib: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None  #: what card and slot can do together
    pcie_gen_card: int | None = None  #: what the card alone can do
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None  #: since the driver was loaded
    rows_pending: bool | None = None  #: memory rows wait for a reset to be replaced
    rows_failed: bool | None = None  #: a memory row could not be replaced
    power_limit_w: float | None = None
    power_default_w: float | None = None
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    throttle: int | None = None  #: bits of THROTTLE
    nvlinks: int | None = None  #: links that are up
    nvswitch: bool | None = None  #: a link ends at a switch
    fabric_state: int | None = None  #: 0 not supported, 1 not started, 2 in progress, 3 completed
    numa_node: int | None = None
    faults: list[str] = field(default_factory=list)

    def throttled(self) -> list[str]:
        """The reasons in words; empty when none or unknown."""
        return reasons(self.throttle or 0)


@dataclass
class Machine:
    """All GPUs, the driver, and how the GPUs are joined. ``problem`` is why nothing could be read, in NVML's words."""

    source: str  #: "nvml", "nvidia-smi" or "none"
    problem: str = ""
    driver: str | None = None
    cuda_driver: str | None = None  #: newest CUDA the driver knows, "13.0"
    gpus: list[Gpu] = field(default_factory=list)
    cells: list[list[str]] = field(default_factory=list)
    p2p: list[list[str]] = field(default_factory=list)  #: the driver's grant for reads, ordered pairs

    @property
    def topology(self) -> Topology:
        """The matrix between the GPUs."""
        return Topology(self.cells)

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Machine:
        """The inverse of ``as_data``. Raises TypeError on an unknown field."""
        gpus = []
        for item in data.get("gpus", []):
            gpu = Gpu(**item)
            gpu.capability = (gpu.capability[0], gpu.capability[1]) if gpu.capability else None
            gpus.append(gpu)
        return Machine(**{**data, "gpus": gpus})


def reasons(bits: int) -> list[str]:
    """Throttle bits in words, without "idle"."""
    return [word for bit, word in THROTTLE.items() if bits & bit and bit != 0x1]


def numa_node(bus_id: str) -> int | None:
    """NUMA node of a PCI device from sysfs; None when unknown or when the machine has no NUMA nodes."""
    path = Path("/sys/bus/pci/devices") / bus_id.lower()[-12:] / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
