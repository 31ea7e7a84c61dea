"""What a run says of the heat and power of its GPUs, from samples given instead of taken; and where its processes run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.train import startup
from app.train.telemetry import Telemetry

GOOD = {"temperature_c": 60, "power_w": 650.0, "throttle": 0x4}  # at its own power limit, as a busy card is
ALONE = SimpleNamespace(num_processes=1, device=torch.device("cpu"))


def telemetry(samples: list[dict[str, Any]]) -> Telemetry:
    made = Telemetry(torch.device("cpu"))
    made.watcher = SimpleNamespace(samples=samples, stop=lambda: None)  # type: ignore[assignment]
    return made


def test_a_cpu_has_nothing_to_tell() -> None:
    assert Telemetry(torch.device("cpu")).window(ALONE) == {}
    assert Telemetry(torch.device("cpu")).advice() == []


def test_a_busy_card_at_its_power_limit_is_well() -> None:
    seen = telemetry([GOOD] * 20)
    values = seen.window(ALONE)
    assert values == {
        "gpu_hot_share": 0.0, "gpu_power_brake_share": 0.0, "gpu_temperature_c": 60.0, "gpu_power_w": 650.0,
    }  # fmt: skip
    assert seen.window(ALONE) == {}
    assert seen.advice() == []


@pytest.mark.parametrize(("bit", "words"), [(0x20, "for heat in 20% of 50"), (0x80, "by the power brake in 20% of 50")])
def test_a_slowed_card_is_named_with_what_to_do(bit: int, words: str) -> None:
    seen = telemetry([GOOD] * 40 + [{**GOOD, "throttle": bit}] * 10)
    seen.window(ALONE)
    (line,) = seen.advice()
    assert "GPU of process 0" in line and words in line


def test_a_driver_that_tells_nothing() -> None:
    values = telemetry([{"temperature_c": None, "power_w": None, "throttle": None}]).window(ALONE)
    assert values == {"gpu_hot_share": 0.0, "gpu_power_brake_share": 0.0}


def test_a_process_stays_beside_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.sched_getaffinity(0)
    for node, cpus in enumerate(("0-1,8", "2-3")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    assert startup.cpus_of("0-1,8\n") == {0, 1, 8}
    monkeypatch.setattr(startup, "bus_id", lambda index: "0000:3d:00.0")
    monkeypatch.setattr(startup, "numa_node", lambda bus: 0)
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: chosen.append(set(cpus)))
    gpu = torch.device("cuda", 0)
    startup.pin_to_numa_node(SimpleNamespace(cpu_affinity=True), gpu, tmp_path)  # type: ignore[arg-type]
    assert chosen == [{0, 1, 8} & here]
    startup.pin_to_numa_node(SimpleNamespace(cpu_affinity=False), gpu, tmp_path)  # type: ignore[arg-type]
    startup.pin_to_numa_node(SimpleNamespace(cpu_affinity=True), torch.device("cpu"), tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(startup, "numa_node", lambda bus: None)
    startup.pin_to_numa_node(SimpleNamespace(cpu_affinity=True), gpu, tmp_path)  # type: ignore[arg-type]
    assert len(chosen) == 1
