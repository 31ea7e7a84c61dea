"""How the GPUs of one machine are connected: read from ``nvidia-smi topo`` text, in every layout it is seen in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: What each cell of ``nvidia-smi topo -m`` means, nearest first. NV# is # bonded NVLinks.
PATHS: dict[str, str] = {
    "X": "the same GPU",
    "NV": "NVLink",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, no host bridge",
    "PHB": "a PCIe host bridge (the CPU)",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}

#: NVML's nvmlDeviceGetTopologyCommonAncestor levels.
NVML_LEVELS: dict[int, str] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

#: NVML's nvmlGpuP2PStatus values, as ``nvidia-smi topo -p2p`` writes them.
NVML_P2P: dict[int, str] = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}

P2P_WORDS: dict[str, str] = {
    "OK": "granted",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported (the driver does not offer it on this card)",
    "TNS": "topology not supported",
    "DR": "disabled by registry key",
    "NS": "not supported",
    "U": "unknown",
}

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CELL = re.compile(r"NV\d+|NODE|PIX|PXB|PHB|SYS|X|OK|CNS|GNS|TNS|DR|NS|U|N/A")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|[a-z]+\w*_\d+")


@dataclass
class Topology:
    """The matrix between the GPUs: ``cells[i][j]`` is "X", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS" or "" if unread.

    ``numa`` and ``cpus`` hold, for each GPU, what the tool printed for its NUMA node and CPU list ("" when empty).
    """

    cells: list[list[str]]
    nics: list[str] = field(default_factory=list)
    numa: list[str] = field(default_factory=list)
    cpus: list[str] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        """Number of GPUs in the matrix."""
        return len(self.cells)

    def complete(self) -> bool:
        """False when a row is missing or a cell was not readable."""
        return all(len(row) == self.gpus and all(row) for row in self.cells)

    def path(self, i: int, j: int) -> str:
        """The kind of path between GPUs i and j: a key of PATHS, or "" when unread."""
        cell = self.cells[i][j] if j < len(self.cells[i]) else ""
        return "NV" if cell.startswith("NV") else cell

    def nvlinks(self, i: int, j: int) -> int:
        """Number of NVLinks that can carry traffic between GPUs i and j; 0 without NVLink."""
        cell = self.cells[i][j] if j < len(self.cells[i]) else ""
        return int(cell[2:]) if cell.startswith("NV") and cell[2:].isdigit() else 0

    def all_nvlink(self, members: list[int] | None = None) -> bool:
        """True when every pair of the members (default: all GPUs) is joined by NVLink, and there is a pair."""
        inside = list(range(self.gpus)) if members is None else members
        pairs = [(i, j) for i in inside for j in inside if i != j]
        return bool(pairs) and all(self.path(i, j) == "NV" for i, j in pairs)

    def table(self) -> str:
        """The matrix as text, one row a GPU."""
        head = "      " + " ".join(f"GPU{j:<3}" for j in range(self.gpus))
        rows = [f"GPU{i:<3}" + " ".join(f"{cell or '?':<6}" for cell in row) for i, row in enumerate(self.cells)]
        return "\n".join([head, *(row.rstrip() for row in rows)])


def _rows(text: str) -> tuple[list[str], dict[str, str]]:
    """Header devices and the rows by device name; the block ends at the legend."""
    devices: list[str] = []
    rows: dict[str, str] = {}
    for raw in _ESCAPE.sub("", text).splitlines():
        line = raw.strip(" \r").lstrip("|").rstrip()
        bare = line.strip()
        if bare.startswith(("Legend", "NIC Legend")):
            break
        head = bare.split(None, 1)[0] if bare else ""
        if not devices:
            # A header names devices and no path. Pastes fuse names ("NIC8NIC9"), so they are found, not split.
            names = _DEVICE.findall(re.split(r"CPU Affinity|NUMA", bare)[0])
            if len(names) >= 1 and names[0].startswith("GPU") and not re.search(r"(^|\s)X(\s|$)", bare):
                devices = names
        elif head in devices and head not in rows:
            rows[head] = bare[len(head) :]
    return devices, rows


def parse_topology(text: str) -> Topology:
    """Read ``nvidia-smi topo -m``: tab or space separated, with or without NICs, terminal codes, NUMA columns.

    Only the cells of the devices in the header are trusted; the columns after them vary between driver releases.
    Rows that are missing or cut off leave empty cells (``complete()`` is then False). Raises ValueError when the text
    has no matrix at all.
    """
    devices, rows = _rows(text)
    gpu_names = [name for name in devices if name.startswith("GPU")]
    if not gpu_names or not any(name in rows for name in gpu_names):
        raise ValueError("no GPU matrix in this text; expected the output of: nvidia-smi topo -m")
    width = len(devices)
    cells: list[list[str]] = []
    numa: list[str] = []
    cpus: list[str] = []
    for name in gpu_names:
        body = rows.get(name, "")
        found = list(_CELL.finditer(body))[:width]
        inside = [match.group() for match in found[: len(gpu_names)]]
        cells.append(inside + [""] * (len(gpu_names) - len(inside)))
        rest = body[found[-1].end() :] if len(found) == width else ""
        columns = rest.lstrip(" ").removeprefix("\t").split("\t") if "\t" in rest else rest.split()
        columns = [column.strip() for column in columns]
        cpus.append(columns[0] if columns else "")
        numa.append(columns[1] if len(columns) > 1 else "")
    return Topology(cells, [name for name in devices if not name.startswith("GPU")], numa, cpus)


def parse_p2p(text: str) -> list[list[str]]:
    """Read ``nvidia-smi topo -p2p r|w|rw``: the driver's grant for each ordered pair ("OK", "CNS", "GNS", ...).

    Raises ValueError when the text has no matrix.
    """
    devices, rows = _rows(text)
    if not devices or not all(name in rows for name in devices):
        raise ValueError("no peer-to-peer matrix in this text; expected the output of: nvidia-smi topo -p2p rw")
    return [[match.group() for match in _CELL.finditer(rows[name])][: len(devices)] for name in devices]
