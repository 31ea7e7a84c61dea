"""What a link between GPUs should carry, worked out from what is there, with the rule that gave it.

Nothing here knows a machine by name: the figures come from the PCIe generation and width, the number of NVLinks and
the architecture that drives them, the number of GPUs and whether NVLink multicast (NVLS) is on. Where a part is not
known the expectation is "unknown". All rates are GB/s (10^9 bytes) in one direction.

Sources: PCI Express base specification (raw rate x 128/130 from generation 3 on); NVIDIA datasheets for NVLink; NCCL's
own per-link model (src/graph/topo.h, 2.28.9); bus bandwidth from nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.hardware.report import FAILED, PASSED, WARNING
from app.hardware.topology import PATHS, Topology

#: GB/s a lane and direction, by PCIe generation.
PCIE_LANE: dict[int, float] = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

#: GB/s a link and direction, by compute capability: (raw, what NCCL's kernels can drive).
NVLINK: dict[tuple[int, int], tuple[float, float]] = {
    (7, 0): (25.0, 20.0),
    (8, 0): (25.0, 20.0),
    (8, 6): (14.06, 12.0),
    (9, 0): (25.0, 20.6),
    (10, 0): (50.0, 40.1),
}

#: Below this share of the expectation something is broken rather than slow.
BROKEN = 0.25


@dataclass(frozen=True)
class Expectation:
    """What should be reached: ``floor`` is the least that raises no warning; both None when unknown. GB/s."""

    gbs: float | None
    floor: float | None
    rule: str

    def judge(self, measured: float) -> str:
        """The status of a measured rate. An unknown expectation passes: there is nothing to hold it against."""
        if self.floor is None or self.gbs is None or measured >= self.floor:
            return PASSED
        return FAILED if measured < BROKEN * self.floor else WARNING

    def words(self) -> str:
        """The expectation and its rule, for a report."""
        if self.floor is None:
            return f"no expectation: {self.rule}"
        return f"expected at least {self.floor:.1f} GB/s: {self.rule}"


def _unknown(why: str) -> Expectation:
    return Expectation(None, None, why)


def pcie(generation: int | None, width: int | None) -> float | None:
    """GB/s of a PCIe link in one direction, or None when generation or width is not known."""
    if not generation or not width or generation not in PCIE_LANE:
        return None
    return PCIE_LANE[generation] * width


def bus_bandwidth(collective: str, size: int, seconds: float, ranks: int) -> float:
    """Bus bandwidth in GB/s of a collective over ``size`` bytes, as nccl-tests defines it (doc/PERFORMANCE.md).

    ``size`` is the larger of the buffers: what every rank holds for all_reduce, the gathered whole for all_gather and
    the whole before scattering for reduce_scatter.
    """
    factor = {"all_reduce": 2 * (ranks - 1) / ranks}.get(collective, (ranks - 1) / ranks)
    return size / seconds / 1e9 * factor


def host_copy(generation: int | None, width: int | None) -> Expectation:
    """Copy between pinned host memory and one GPU, by the link's generation and width under load."""
    link = pcie(generation, width)
    if link is None:
        return _unknown("PCIe generation or width not readable")
    # 55 of 63 GB/s on Gen5 x16 and 25 of 31.5 on Gen4 x16 are usual; protocol overhead takes 12 to 20 %.
    return Expectation(link, 0.6 * link, f"60 % of PCIe Gen{generation} x{width} = {link:.1f} GB/s")


def peer_copy(
    topology: Topology,
    pair: tuple[int, int],
    *,
    capability: tuple[int, int] | None,
    slower_link: float | None,
    granted: bool,
) -> Expectation:
    """Copy from the first GPU of ``pair`` to the second.

    ``slower_link`` is the slower of their two PCIe links (GB/s), ``granted`` whether the driver allows P2P there.
    """
    i, j = pair
    links = topology.nvlinks(i, j)
    if links and granted:
        if capability not in NVLINK:
            return _unknown(f"NVLink rate of compute capability {capability} not in the table")
        raw = links * NVLINK[capability][0]
        return Expectation(raw, 0.7 * raw, f"70 % of {links} NVLinks x {NVLINK[capability][0]:g} = {raw:.0f} GB/s")
    if slower_link is None:
        return _unknown("PCIe generation or width not readable")
    path = topology.path(i, j)
    if not granted:
        share, why = 0.2, "without P2P the copy goes through host memory, twice over the link"
    elif path == "SYS":
        share, why = 0.25, "P2P across CPU sockets"
    else:
        share, why = 0.5, f"P2P over {PATHS.get(path, 'an unknown path')}"
    return Expectation(slower_link, share * slower_link, f"{share:.0%} of {slower_link:.1f} GB/s ({why})")


def all_reduce(
    topology: Topology, members: list[int], capability: tuple[int, int] | None, slowest_pcie: float | None, nvls: bool
) -> Expectation:
    """Bus bandwidth of a large all-reduce among ``members`` (GPU indices), one process a GPU, in one machine.

    NVLink between all: links of a GPU x NCCL's rate a link, whatever the number of GPUs, because a ring's bus bandwidth
    does not depend on it; with NVLS the switch adds up and may give more, never less. Otherwise the slowest PCIe link
    bounds the ring. Only for GPUs of one compute capability; pass None for a mixture.
    """
    n = len(members)
    if n < 2:
        return _unknown("one GPU has nobody to talk to")
    if topology.all_nvlink(members):
        if capability not in NVLINK:
            return _unknown(f"NVLink rate of compute capability {capability} not in the table")
        counts = {topology.nvlinks(i, j) for i in members for j in members if i != j}
        if len(counts) > 1:
            return _unknown("pairs have different numbers of NVLinks; NCCL's rings decide")
        # Behind a switch every pair shows all links of the GPU; a mesh without one splits them between the peers.
        # Which of the two it is does not show in the matrix, and the single pair's count is right for the first and a
        # safe lower bound for the second.
        links = counts.pop()
        rate = links * NVLINK[capability][1]
        more = "; NVLS is on and may give up to about 1.3 times as much" if nvls else "; NVLS is not used"
        rule = f"80 % of {links} NVLinks x {NVLINK[capability][1]:g} GB/s (NCCL's model) = {rate:.0f} GB/s{more}"
        return Expectation(rate, 0.8 * rate, rule)
    if slowest_pcie is None:
        return _unknown("PCIe generation or width not readable")
    if any(topology.path(i, j) == "NV" for i in members for j in members if i != j):
        what = "NVLink joins only some pairs, so a PCIe hop may bound the ring"
    else:
        what = "PCIe"
    # Eight cards on Gen5 x16 (63 GB/s) are reported at 28, four at 35 (NVIDIA/nccl#1639). How far below the link a
    # healthy PCIe machine ends depends on CPU and memory, so this floor only catches a wrong slot or a wrong path.
    floor = 0.2 * slowest_pcie
    return Expectation(
        slowest_pcie, floor, f"20 % of the slowest link, {slowest_pcie:.1f} GB/s ({what}); no prediction"
    )
