"""Expected bandwidth, worked out by hand, and measured figures of healthy machines that must not be called slow."""

from __future__ import annotations

import pytest

from app.hardware.links import all_reduce, bus_bandwidth, host_copy, pcie, peer_copy
from app.hardware.report import FAILED, PASSED, WARNING
from app.hardware.topology import Topology


def mesh(n: int, cell: str) -> Topology:
    return Topology([["X" if i == j else cell for j in range(n)] for i in range(n)])


def test_pcie_rates() -> None:
    assert pcie(4, 16) == pytest.approx(31.5, abs=0.01)
    assert pcie(5, 16) == pytest.approx(63.0, abs=0.01)
    assert pcie(3, 4) == pytest.approx(3.94, abs=0.01)
    assert pcie(None, 16) is None
    assert pcie(9, 16) is None


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 1 GB in 10 ms is 100 GB/s of algorithm bandwidth; 8 ranks: x 2*7/8, and x 7/8.
    assert bus_bandwidth("all_reduce", 10**9, 0.01, 8) == pytest.approx(175.0)
    assert bus_bandwidth("all_gather", 10**9, 0.01, 8) == pytest.approx(87.5)
    assert bus_bandwidth("reduce_scatter", 10**9, 0.01, 2) == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("what", "topology", "capability", "nvls", "measured"),
    [
        ("8 H200, NVLS off", mesh(8, "NV18"), (9, 0), False, 366.0),
        ("4 H200, NVLS off", mesh(4, "NV18"), (9, 0), False, 363.3),
        ("8 H200, NVLS on", mesh(8, "NV18"), (9, 0), True, 473.0),
        ("8 A100 SXM", mesh(8, "NV12"), (8, 0), False, 230.0),
        ("2 A100 joined by NVLink", mesh(2, "NV12"), (8, 0), False, 208.0),
        ("8 RTX 5090 on PCIe 5, two sockets", mesh(8, "SYS"), (12, 0), False, 28.0),
        ("4 RTX 5090 on PCIe 5", mesh(4, "NODE"), (12, 0), False, 35.0),
    ],
)
def test_healthy_machines_pass(
    what: str, topology: Topology, capability: tuple[int, int], nvls: bool, measured: float
) -> None:
    expected = all_reduce(topology, list(range(topology.gpus)), capability, pcie(5, 16), nvls)
    assert expected.gbs is not None, what
    assert expected.judge(measured) == PASSED, f"{what}: {expected.words()}"


def test_sick_machines_do_not() -> None:
    nvlink = all_reduce(mesh(8, "NV18"), list(range(8)), (9, 0), pcie(5, 16), False)
    assert nvlink.judge(180.0) == WARNING  # half the links
    assert nvlink.judge(20.0) == FAILED  # over PCIe although NVLink is there
    slot = all_reduce(mesh(2, "PHB"), [0, 1], (8, 6), pcie(4, 16), False)
    assert slot.judge(2.5) == WARNING  # one card behind four lanes
    assert slot.judge(1.0) == FAILED  # sockets


def test_a_third_gpu_across_pcie_is_bounded_by_pcie() -> None:
    # nccl-tests#178: a pair of A100 gives 208, the third GPU, which hangs on PCIe, brings it down to 20: healthy.
    cells = [["X", "NV12", "NODE"], ["NV12", "X", "NODE"], ["NODE", "NODE", "X"]]
    expected = all_reduce(Topology(cells), [0, 1, 2], (8, 0), pcie(4, 16), False)
    assert expected.judge(20.0) == PASSED
    assert "some pairs" in expected.rule
    assert all_reduce(Topology(cells), [0, 1], (8, 0), pcie(4, 16), False).judge(20.0) == FAILED


def test_unknown_stays_unknown() -> None:
    for expected in (
        all_reduce(mesh(2, "NV6"), [0, 1], (11, 0), None, False),
        all_reduce(mesh(2, "PHB"), [0, 1], (8, 6), None, False),
        all_reduce(mesh(1, "X"), [0], (9, 0), 63.0, False),
        host_copy(None, 16),
        peer_copy(mesh(2, "NV6"), (0, 1), capability=(11, 0), slower_link=None, granted=True),
        peer_copy(mesh(2, "PHB"), (0, 1), capability=(8, 6), slower_link=None, granted=True),
    ):
        assert expected.gbs is None
        assert expected.judge(0.001) == PASSED
        assert expected.words().startswith("no expectation: ")


def test_host_copies() -> None:
    assert host_copy(5, 16).judge(55.1) == PASSED  # measured on an H200
    assert host_copy(4, 16).judge(6.5) == WARNING  # what four lanes give
    assert host_copy(1, 16).judge(2.9) == PASSED  # an honest figure for the link that is there


def test_peer_copies() -> None:
    nvlink = peer_copy(mesh(2, "NV18"), (0, 1), capability=(9, 0), slower_link=63.0, granted=True)
    assert nvlink.gbs == pytest.approx(450.0)
    assert nvlink.judge(396.4) == PASSED  # measured on 8 H200
    bridge = peer_copy(mesh(2, "NV4"), (0, 1), capability=(8, 6), slower_link=31.5, granted=True)
    assert bridge.gbs == pytest.approx(56.24)
    staged = peer_copy(mesh(2, "PHB"), (0, 1), capability=(8, 9), slower_link=31.5, granted=False)
    direct = peer_copy(mesh(2, "PHB"), (0, 1), capability=(8, 9), slower_link=31.5, granted=True)
    assert staged.floor is not None and direct.floor is not None
    assert staged.floor < direct.floor
    assert "host memory" in staged.rule
