"""What NCCL says in its own log about what it chose: transports, algorithm, NVLS, network, warnings.

Formats of NCCL 2.14 to 2.28. The number in brackets behind a rank is a PCI bus in hexadecimal (2.14) or a device index
(2.20 and newer).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[[0-9a-f]+\] -> (\d+)\[[0-9a-f]+\](?: \[(?:send|receive)\])? via (\S+)"
)
_VERSION = re.compile(r"NCCL version ([\d.]+)")
_TUNED = re.compile(r"(\d+) Bytes -> Algo (\w+) proto (\w+)")
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_CHANNELS = re.compile(r"(\d+) coll channels")
_WARN = re.compile(r"NCCL WARN (.+)")
#: Numbers that releases before 2.24 print for algorithm and protocol.
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")


@dataclass
class NcclLog:
    """What was found. ``transports`` maps (source rank, target rank) to P2P, SHM or NET with its detail."""

    version: str = ""
    transports: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    tuned: dict[int, tuple[str, str]] = field(default_factory=dict)  #: bytes: (algorithm, protocol)
    nvls: bool | None = None  #: multicast support, None when the log does not say
    channels: int | None = None
    network: str = ""
    warnings: list[str] = field(default_factory=list)

    def kinds(self) -> set[str]:
        """P2P, SHM, NET: which are used at all."""
        return {way.split("/")[0] for ways in self.transports.values() for way in ways}

    def pairs(self, kind: str) -> list[tuple[int, int]]:
        """The ordered pairs of ranks that use a kind of transport."""
        return sorted(pair for pair, ways in self.transports.items() if any(way.split("/")[0] == kind for way in ways))

    def algorithm(self, size: int) -> str:
        """Algorithm and protocol of the logged size nearest to ``size`` bytes, or "" when not logged."""
        if not self.tuned:
            return ""
        nearest = min(self.tuned, key=lambda logged: abs(logged - size))
        if not 0.5 <= nearest / size <= 2:
            return ""
        return "/".join(self.tuned[nearest])


def parse_log(text: str) -> NcclLog:
    """Read a log of NCCL_DEBUG=INFO. Unknown lines are passed over; an empty text gives an empty result."""
    log = NcclLog()
    for line in text.splitlines():
        if match := _CHANNEL.search(line):
            log.transports.setdefault((int(match[1]), int(match[2])), set()).add(match[3])
        elif match := _TUNED.search(line):
            log.tuned[int(match[1])] = (_named(match[2], _ALGORITHMS), _named(match[3], _PROTOCOLS))
        elif match := _NVLS.search(line):
            log.nvls = (log.nvls or False) or match[1] is None
        elif match := _CHANNELS.search(line):
            log.channels = int(match[1])
        elif match := _WARN.search(line):
            log.warnings.append(match[1].strip())
        if "Using network" in line:
            log.network = line.rpartition("Using network")[2].strip()
        if not log.version and (match := _VERSION.search(line)):
            log.version = match[1]
    return log


def _named(text: str, names: tuple[str, ...]) -> str:
    """The name of a number, or of a name as some release spells it (RING, NVLS_TREE)."""
    if text.isdigit():
        return names[int(text)] if int(text) < len(names) else text
    return next((name for name in names if name.lower() == text.replace("_", "").lower()), text)
