"""NCCL's log in the formats of its releases, and the verdicts on bandwidth, transport and sweep."""

from __future__ import annotations

import pytest

from app.hardware.gpus import Gpu, Machine
from app.smoke.nccl import SETTINGS, bandwidth, collective_environment, judge_sweep, measured, transport, uses_nvls
from app.smoke.nccl_log import NcclLog, parse_log
from app.smoke.ranks import Ranks
from app.smoke.stage import Outcome

#: Lines as public reports have them (Megatron-LM#516, nccl-tests#188, nccl#1453, tinygrad/open-gpu-kernel-modules#22).
LOG_2_14 = """\
gpu:61:61 [0] NCCL INFO Bootstrap : Using eth0:172.17.0.3<0>
NCCL version 2.14.3+cuda11.7
gpu:61:90 [0] NCCL INFO Using network Socket
gpu:61:90 [0] NCCL INFO Channel 22/0 : 0[101c0] -> 1[101d0] via P2P/IPC/read
gpu:62:91 [1] NCCL INFO Channel 22/0 : 1[101d0] -> 0[101c0] via P2P/IPC/read
gpu:61:90 [0] NCCL INFO Connected all rings
gpu:61:61 [0] NCCL INFO 268435456 Bytes -> Algo 1 proto 2 time 1834.200924
"""
LOG_SHM = """\
node:1:1 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0.
node:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
node:2:2 [1] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct
"""
LOG_NET = """\
node:852751:852807 [1] NCCL INFO Channel 01/0 : 1[2a000] -> 0[27000] [send] via NET/Socket/0
node:852750:852807 [0] NCCL INFO Channel 01/0 : 0[27000] -> 1[2a000] [receive] via NET/Socket/0
"""
LOG_2_28 = """\
gpu:7:7 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
gpu:7:9 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
gpu:7:9 [0] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer
gpu:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
gpu:7:9 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM
gpu:7:7 [0] NCCL INFO AllReduce: 268435456 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}
gpu:7:7 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..7}
gpu:7:9 [0] transport/nvls.cc:254 NCCL WARN something odd
"""


def machine(n: int, cell: str, capability: tuple[int, int] = (8, 6), generation: int = 4) -> Machine:
    return Machine(
        "nvml",
        gpus=[Gpu(k, "x", capability=capability, pcie_gen_max=generation, pcie_width=16) for k in range(n)],
        cells=[["X" if i == j else cell for j in range(n)] for i in range(n)],
    )


def ranks(n: int, gbs: float) -> Ranks:
    """Ranks whose all-reduce reaches ``gbs`` of bus bandwidth; the last rank is the slowest and must count."""
    data = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        factor = (2 if kind == "all_reduce" else 1) * (n - 1) / n
        for size in (1, 256, 1024):
            data[f"{kind} {size}"] = {"seconds": (size << 20) * factor / gbs / 1e9, "bytes": size << 20}
    fast = {key: {**value, "seconds": value["seconds"] / 3} for key, value in data.items()}
    return Ranks([Outcome(0, "", 1.0, data=fast if rank < n - 1 else data) for rank in range(n)], None)


def test_formats_of_2_14() -> None:
    log = parse_log(LOG_2_14)
    assert log.version == "2.14.3"
    assert log.kinds() == {"P2P"}
    assert log.pairs("P2P") == [(0, 1), (1, 0)]
    assert log.algorithm(256 << 20) == "Ring/Simple"
    assert log.algorithm(1 << 20) == ""
    assert log.network == "Socket"
    assert log.nvls is None


def test_formats_of_2_28() -> None:
    log = parse_log(LOG_2_28)
    assert log.version == "2.28.9"
    assert log.algorithm(256 << 20) == "NVLS/Simple"
    assert log.algorithm(1 << 20) == "Ring/LL128"
    assert log.nvls is True
    assert log.channels == 24
    assert log.warnings == ["something odd"]


def test_an_empty_log_says_nothing() -> None:
    assert parse_log("").kinds() == set()


def test_shared_memory_is_fine_without_nvlink_and_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    log = parse_log(LOG_SHM)
    assert transport(machine(2, "PHB"), log).status == "passed"
    report = transport(machine(2, "NV4"), log)
    assert report.status == "failed"
    assert "NVLink joins [(0, 1), (1, 0)]" in report.summary
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    mine = transport(machine(2, "NV4"), log)
    assert mine.status == "passed"
    assert "NCCL_P2P_DISABLE=1" in mine.summary


def test_the_network_inside_one_machine_is_wrong() -> None:
    report = transport(machine(2, "PHB"), parse_log(LOG_NET))
    assert report.status == "failed"
    assert "shared memory" in report.cause


def test_a_log_without_transports_is_skipped() -> None:
    assert transport(machine(2, "PHB"), NcclLog()).status == "skipped"


def test_the_slowest_rank_counts() -> None:
    rates = measured(ranks(4, 40.0))
    assert rates["all_reduce"][256] == pytest.approx(40.0)
    assert rates["all_gather"][1024] == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("cell", "capability", "n", "gbs", "status"),
    [
        ("NV18", (9, 0), 8, 366.0, "passed"),
        ("NV18", (9, 0), 8, 180.0, "warning"),
        ("NV18", (9, 0), 8, 25.0, "failed"),
        ("PHB", (8, 6), 2, 12.0, "passed"),
        ("PHB", (8, 6), 2, 1.0, "failed"),
        ("NV6", (11, 0), 2, 1.0, "passed"),
    ],
)
def test_bandwidth(cell: str, capability: tuple[int, int], n: int, gbs: float, status: str) -> None:
    report = bandwidth(machine(n, cell, capability), ranks(n, gbs), parse_log(LOG_2_14))
    assert report.status == status, report.summary
    assert f"all-reduce of 256 MB: {gbs:.1f} GB/s" in report.summary
    assert ("expected at least" in report.summary) != ("no expectation" in report.summary)


#: Recorded on two H200 joined by 18 NVLinks, NCCL 2.28.9, NVLS off, 2026-11-30: GB/s of the all-reduce by size in MB.
TWO_H200 = {1: 21.8, 16: 155.7, 64: 234.3, 256: 275.4, 1024: 317.5}


def test_the_large_messages_are_judged_and_256_mb_are_shown() -> None:
    data = {
        f"{kind} {size}": {"seconds": (size << 20) * factor / gbs / 1e9, "bytes": size << 20}
        for kind, factor in (("all_reduce", 1), ("all_gather", 0.5), ("reduce_scatter", 0.5))
        for size, gbs in TWO_H200.items()
    }
    seen = Ranks([Outcome(0, "", 1.0, data=data) for _ in range(2)], None)
    report = bandwidth(machine(2, "NV18", (9, 0)), seen, parse_log(LOG_2_14))
    assert report.status == "passed", report.summary
    assert "all-reduce of 256 MB: 275.4 GB/s" in report.summary
    assert "the fastest, 1024 MB: 317.5 GB/s; expected at least 296.6 GB/s" in report.summary


def test_nvls_is_off_when_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    log = parse_log(LOG_2_28)
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    assert uses_nvls(log)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert not uses_nvls(log)


def test_the_users_variables_are_never_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.delenv(name, raising=False)
    assert set(collective_environment("/x")) == {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert "NCCL_DEBUG" not in collective_environment("/x")


def test_the_sweep_never_switches_multicast_on() -> None:
    assert [value for name, value in SETTINGS if name == "NCCL_NVLS_ENABLE"] == ["0"]


def test_a_sweep_tells_what_a_setting_is_worth() -> None:
    report = judge_sweep("sweep", [20.0, 20.4], {"NCCL_P2P_LEVEL=SYS": 24.0, "NCCL_ALGO=Tree": 15.0, "A=1": None}, [])
    assert "worth setting here: NCCL_P2P_LEVEL=SYS (+19%)" in report.summary
    assert "A=1: breaks" in report.summary
    noisy = judge_sweep("sweep", [20.0, 30.0], {"NCCL_P2P_LEVEL=SYS": 29.0}, ["NCCL_ALGO (you have set it)"])
    assert "no setting is worth it" in noisy.summary
    assert "you have set it" in noisy.summary
    assert judge_sweep("sweep", [20.0, None], {}, []).status == "failed"
