"""GPUs and drivers that a variant does not serve are refused, and the one that does is named."""

from __future__ import annotations

import pytest
import torch

from app.errors import Fault
from app.hardware.gpus import Gpu, Machine
from app.train import launch, machine

CU121 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CU117 = ["sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86"]


@pytest.mark.parametrize(
    ("cuda", "kernels", "driver", "name", "capability", "said"),
    [
        ("12.1", CU121, "580.95.05", "NVIDIA B200", (10, 0), ["is sm_100", "./inv build --cuda 13.0"]),
        (
            "12.1",
            CU121,
            "570.86.15",
            "NVIDIA GeForce RTX 5090",
            (12, 0),
            ["is sm_120", "update the driver to 580.65.06"],
        ),
        ("13.0", CU130, "580.95.05", "Tesla V100-SXM2-32GB", (7, 0), ["is sm_70", "./inv build --cuda 12.1"]),
        ("13.0", CU130, "535.104.05", "NVIDIA A100-SXM4-80GB", (8, 0), ["is too old", "./inv build --cuda 12.1"]),
        (
            "12.1",
            CU121,
            "470.161.03",
            "NVIDIA GeForce RTX 3090",
            (8, 6),
            ["driver 470.161.03 is too old", "./inv build --cuda 11.7"],
        ),
        ("11.7", CU117, "550.54.14", "NVIDIA H200", (9, 0), ["is sm_90", "./inv build --cuda 12.1"]),
        ("12.1", CU121, "418.40", "Tesla K80", (3, 7), ["too old", "update the driver to 450.80.02"]),
    ],
)
def test_refused_with_the_variant_to_use(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str,
    kernels: list[str],
    driver: str,
    name: str,
    capability: tuple[int, int],
    said: list[str],
) -> None:
    monkeypatch.setattr(
        machine.nvml, "read", lambda: Machine("nvml", driver=driver, gpus=[Gpu(0, name, capability=capability)])
    )
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(Fault) as caught:
        machine.check_early(launch.resolve("gpu-fp16", 1, {}))
    assert caught.value.code == 3
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_what_is_served_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machine("nvml", driver="535.104.05", gpus=[Gpu(0, "NVIDIA GeForce RTX 4090", capability=(8, 9))])
    monkeypatch.setattr(machine.nvml, "read", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CU121)
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    machine.check_early(launch.resolve("gpu-fp16", 1, {}))
