"""nvidia-smi's text, recorded, reads into GPUs; what the driver does not offer stays None."""

from __future__ import annotations

import sys

import pytest

from app.hardware import nvml
from app.hardware.gpus import Gpu, Machine, reasons
from app.hardware.peaks import dense_tflops
from app.hardware.smi import QUERY, parse_query, parse_smi_table, read_smi
from tests.hardware.test_topology import text_of


def test_table_of_two_gpus() -> None:
    machine = parse_smi_table(text_of("smi", "2xa100-table"))
    assert (machine.driver, machine.cuda_driver) == ("535.104.05", "12.2")
    assert [(gpu.index, gpu.name, gpu.bus_id, gpu.memory_mib) for gpu in machine.gpus] == [
        (0, "NVIDIA A100-SXM4-80GB", "00000000:27:00.0", 81920),
        (1, "NVIDIA A100-SXM4-80GB", "00000000:2A:00.0", 81920),
    ]
    assert [gpu.name for gpu in parse_smi_table(text_of("smi", "2xquadro-table")).gpus] == ["Quadro RTX 4000"] * 2


def test_table_of_one_h200() -> None:
    machine = parse_smi_table(text_of("smi", "one-h200-table"))
    assert (machine.driver, machine.cuda_driver) == ("580.159.04", "13.0")
    assert [(gpu.name, gpu.memory_mib) for gpu in machine.gpus] == [("NVIDIA H200", 143771)]


def test_header_of_an_old_driver() -> None:
    machine = parse_smi_table(text_of("smi", "old-driver-header"))
    assert (machine.driver, machine.cuda_driver) == ("470.161.03", "11.4")


@pytest.mark.parametrize(("name", "words"), [("no-driver", "couldn't communicate"), ("mismatch", "version mismatch")])
def test_a_failing_nvidia_smi_is_a_problem_in_its_own_words(name: str, words: str) -> None:
    machine = parse_smi_table(text_of("smi", name))
    assert machine.source == "none"
    assert words in machine.problem


ROW = (
    "0, NVIDIA GeForce RTX 3090, 00000000:21:00.0, 24576, 412, 8.6, 1, 3, 4, 16, Disabled, [N/A], [N/A], "
    "350.00, 350.00, 41, 210, 2100\n"
)


def test_query_row() -> None:
    (gpu,) = parse_query(ROW, list(QUERY))
    assert gpu.name == "NVIDIA GeForce RTX 3090"
    assert gpu.capability == (8, 6)
    assert (gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max) == (1, 3, 4, 16)
    assert gpu.persistence is False
    assert gpu.mig is None
    assert gpu.ecc_uncorrected is None
    assert gpu.power_limit_w == 350.0


def test_a_row_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="17 values for 18 fields"):
        parse_query(ROW.replace(", 2100", ""), list(QUERY))


def test_old_driver_without_compute_cap() -> None:
    asked = []

    def run(command: list[str]) -> tuple[int, str]:
        asked.append(command)
        if command == ["nvidia-smi"]:
            return 0, text_of("smi", "2xa100-table")
        if "compute_cap" in command[1]:
            return 2, 'Field "compute_cap" is not a valid field to query.\n'
        if command[1].startswith("--query"):
            return 0, ROW.replace("8.6, ", "").replace("Disabled, [N/A], ", "Disabled, ")
        if command[1:] == ["topo", "-m"]:
            return 0, text_of("topo", "one-gpu-gb10")
        return 1, ""

    machine = read_smi(run)
    assert machine.source == "nvidia-smi"
    assert [gpu.capability for gpu in machine.gpus] == [None]
    assert machine.cells == [["X"]]
    assert len([command for command in asked if command[-1].startswith("--format")]) == 2


def test_no_nvidia_smi_at_all() -> None:
    assert read_smi(lambda command: (127, "")).problem == "nvidia-smi is not installed"


def test_readings_survive_json() -> None:
    machine = Machine("nvml", "", "580.65.06", "13.0", [Gpu(0, "x", capability=(9, 0), nvlinks=18)], [["X"]], [["X"]])
    data = machine.as_data()
    data["gpus"][0]["capability"] = list(data["gpus"][0]["capability"])  # what JSON makes of a tuple
    assert Machine.from_data(data) == machine


def test_without_the_library_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine = nvml.read_nvml()
    assert machine.source == "none"
    assert "nvidia-ml-py" in machine.problem


def test_throttle_bits_in_words() -> None:
    assert reasons(0x1) == []
    assert reasons(0x4 | 0x40) == ["software power cap", "hardware thermal slowdown"]


def test_a_relative_of_a_known_card_is_unknown() -> None:
    assert dense_tflops("NVIDIA GeForce RTX 4090", "bf16") == 165.2
    assert dense_tflops("NVIDIA GeForce RTX 4090 D", "bf16") is None
    assert dense_tflops("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16") is None
    assert dense_tflops("Tesla V100-SXM2-16GB", "bf16") is None
