"""Driver and GPUs judged from readings: every pair that a variant refuses, and containers that see no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from app.hardware.cuda import probe_cuda
from app.hardware.gpus import Gpu, Machine
from app.host.variants import variants
from app.smoke.devices import in_cuda_order, judge_devices
from app.smoke.explain import explain

VARIANTS = variants()


def reading(gpus: list[Gpu], driver: str = "580.65.06", error: str = "", code: int = 0, **more: Any) -> dict[str, Any]:
    n = len(gpus)
    matrix = [["X" if i == j else "PHB" for j in range(n)] for i in range(n)]
    machine = Machine("nvml", "", driver, "13.0", gpus, matrix, matrix)
    seen = [] if error else [{"bus_id": gpu.bus_id, "capability": list(gpu.capability or (0, 0))} for gpu in gpus]
    cuda = {"error": error, "code": code, "version": "13.0", "devices": seen}
    return {
        "machine": machine.as_data(),
        "cuda": cuda,
        "host_gpus": n,
        "nodes": [f"nvidia{k}" for k in range(n)],
        **more,
    }


def gpu(capability: tuple[int, int], index: int = 0) -> Gpu:
    return Gpu(index, "a GPU", f"0000:{index:02x}:00.0", capability, memory_mib=24576)


def statuses(data: dict[str, Any], cuda: str, wanted: int | None = None) -> dict[str, str]:
    variant = VARIANTS[cuda]
    reports, _ = judge_devices(data, variant.torch_cuda, list(variant.architectures), wanted)
    return {report.name: report.status for report in reports}


#: (compute capability, driver) that each variant must refuse, and why.
REFUSED = [
    ("11.7", (9, 0), "580.65.06", "GPU 0"),
    ("11.7", (12, 0), "580.65.06", "GPU 0"),
    ("11.7", (8, 6), "418.40.04", "driver"),
    ("12.1", (3, 7), "535.104.05", "GPU 0"),
    ("12.1", (10, 0), "580.65.06", "GPU 0"),
    ("12.1", (12, 0), "580.65.06", "GPU 0"),
    ("12.1", (8, 6), "470.161.03", "driver"),
    ("12.1", (8, 6), "515.48.07", "driver"),
    ("13.0", (7, 0), "580.65.06", "GPU 0"),
    ("13.0", (6, 1), "580.65.06", "GPU 0"),
    ("13.0", (8, 6), "535.104.05", "driver"),
    ("13.0", (9, 0), "575.57.08", "driver"),
]


@pytest.mark.parametrize(("cuda", "capability", "driver", "where"), REFUSED)
def test_refused(cuda: str, capability: tuple[int, int], driver: str, where: str) -> None:
    found = statuses(reading([gpu(capability)], driver), cuda)
    assert found[where] == "failed"
    other = {"GPU 0": "driver", "driver": "GPU 0"}[where]
    assert found[other] in ("passed", "warning")


@pytest.mark.parametrize("cuda", VARIANTS)
def test_served(cuda: str) -> None:
    assert set(statuses(reading([gpu((8, 6))]), cuda).values()) == {"passed"}


def test_an_old_but_sufficient_driver_warns() -> None:
    assert statuses(reading([gpu((8, 6))], "525.60.13"), "12.1")["driver"] == "warning"


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("Error 802: system not yet initialized", "cuda-802"),
        ("Error 803: system has unsupported display driver / cuda driver combination", "cuda-803"),
        ("Error 804: forward compatibility was attempted on non supported HW", "cuda-804"),
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "libcuda-missing"),
    ],
)
def test_cuda_that_does_not_start_is_explained(error: str, name: str) -> None:
    reports, machine = judge_devices(reading([gpu((8, 6))], error=error), "12.1", ["sm_86"], None)
    report = next(one for one in reports if one.name == "CUDA start")
    known = explain(error)
    assert known is not None and known.name == name
    assert (report.status, report.cause) == ("failed", known.cause)
    assert not machine.gpus


def nothing(problem: str, host: int = 0, nodes: int = 0) -> dict[str, Any]:
    cuda = {"error": "libcuda.so.1: cannot open shared object file", "code": None, "version": None, "devices": []}
    machine = Machine("none", problem).as_data()
    return {"machine": machine, "cuda": cuda, "host_gpus": host, "nodes": [f"nvidia{k}" for k in range(nodes)]}


def test_no_gpu_is_skipped_unless_gpus_are_expected() -> None:
    problem = "NVML: NVML Shared Library Not Found"
    assert statuses(nothing(problem), "12.1") == {"GPUs": "skipped"}
    assert statuses(nothing(problem), "12.1", wanted=2) == {"GPUs": "failed"}
    assert statuses(nothing(problem), "12.1", wanted=0) == {"GPUs": "skipped"}


def test_a_host_with_gpus_and_a_container_without() -> None:
    reports, _ = judge_devices(nothing("NVML Shared Library Not Found", host=4), "12.1", None, None)
    assert reports[0].status == "failed"
    assert "the host has 4 GPUs and this container was given none" in reports[0].summary
    assert statuses(nothing("", host=4), "12.1", wanted=0) == {"GPUs": "skipped"}


@pytest.mark.parametrize(
    ("problem", "word"), [("NVML: Driver/library version mismatch", "reboot"), ("NVML: Unknown Error", "GPU")]
)
def test_nvml_that_fails(problem: str, word: str) -> None:
    reports, _ = judge_devices(nothing(problem, host=1, nodes=1), "12.1", None, None)
    assert reports[0].status == "failed"
    assert word in reports[0].fix + reports[0].cause


def test_fewer_gpus_than_asked_for() -> None:
    data = reading([gpu((8, 6), 0), gpu((8, 6), 1)])
    assert statuses(data, "12.1", wanted=4)["CUDA start"] == "failed"
    assert statuses(data, "12.1", wanted=2)["CUDA start"] == "passed"


def test_cuda_order_is_not_nvml_order() -> None:
    data = reading([gpu((8, 6), 0), gpu((8, 9), 1), gpu((9, 0), 2)])
    machine = Machine.from_data(data["machine"])
    machine.cells = [["X", "PIX", "SYS"], ["PIX", "X", "NODE"], ["SYS", "NODE", "X"]]
    data["cuda"]["devices"] = [data["cuda"]["devices"][2], data["cuda"]["devices"][0]]
    seen = in_cuda_order(machine, data["cuda"])
    assert [(one.index, one.capability) for one in seen.gpus] == [(0, (9, 0)), (1, (8, 6))]
    assert seen.cells == [["X", "SYS"], ["SYS", "X"]]


def test_gpus_that_only_cuda_sees_still_count() -> None:
    data = reading([gpu((8, 6))])
    data["machine"] = Machine("none", "nvidia-ml-py is not installed").as_data()
    reports, machine = judge_devices(data, "12.1", ["sm_86"], None)
    assert len(machine.gpus) == 1
    assert machine.gpus[0].capability == (8, 6)
    assert not [report for report in reports if report.status == "failed"]


def test_mig_is_refused_for_several_gpus() -> None:
    one, two = gpu((8, 0), 0), gpu((8, 0), 1)
    one.mig = two.mig = True
    assert statuses(reading([one, two]), "12.1")["GPU 0"] == "failed"
    assert statuses(reading([one]), "12.1")["GPU 0"] == "warning"


def test_without_libcuda_the_reason_is_told() -> None:
    found = probe_cuda("libcuda-that-is-not-there.so.1")
    assert "cannot open shared object" in found["error"]
    assert found["devices"] == []
