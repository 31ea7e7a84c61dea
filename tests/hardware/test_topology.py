"""Every layout of `nvidia-smi topo` that was seen in public reports reads into the right matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.hardware.topology import parse_p2p, parse_topology

RECORDINGS = Path(__file__).parent / "recordings"


def text_of(kind: str, name: str) -> str:
    source, _, text = (RECORDINGS / kind / f"{name}.txt").read_text(encoding="utf-8").partition("\n")
    assert source.startswith("# recorded "), f"{name} does not say where it comes from"
    return text


#: name: (GPUs, NICs, {(i, j): cell}, {gpu: (cpus, numa)})
LAYOUTS: dict[str, tuple[int, int, dict[tuple[int, int], str], dict[int, tuple[str, str]]]] = {
    "4gpu-phb-sys": (
        4,
        0,
        {(0, 1): "PHB", (0, 2): "SYS", (3, 2): "PHB"},
        {0: ("0-11,24-35", "0"), 3: ("12-23,36-47", "1")},
    ),
    "4xl40s-pix-pairs-no-leading-tab": (4, 0, {(0, 1): "PIX", (1, 2): "NODE", (2, 3): "PIX"}, {3: ("0-15,32-47", "0")}),
    "4xa100-nv12-nic-terminal-codes": (4, 1, {(0, 3): "NV12", (3, 0): "NV12"}, {2: ("32-63,96-127", "1")}),
    "8xa100-nvlink-pairs-spaces": (
        8,
        0,
        {(0, 1): "NV12", (0, 2): "NODE", (0, 7): "SYS", (6, 7): "NV12"},
        {7: ("32-63,96-127", "1")},
    ),
    "dgx-h100-fused-cells": (
        8,
        12,
        {(0, 7): "NV18", (7, 6): "NV18"},
        {0: ("0-55,112-167", "0"), 7: ("56-111,168-223", "1")},
    ),
    "dgx-a100-mlx5-columns": (8, 12, {(0, 1): "PXB", (0, 2): "SYS", (6, 7): "PXB"}, {0: ("112-127,240-255", "6-7")}),
    "5gpu-4090-5090-mixed-spaces": (
        5,
        0,
        {(0, 1): "SYS", (1, 2): "PHB", (3, 1): "NODE"},
        {0: ("8-15,24-31", "1"), 4: ("0-7,16-23", "0")},
    ),
    "8xv100-nv1-nv2-mesh": (
        8,
        2,
        {(0, 1): "NV1", (0, 2): "NV2", (0, 7): "NV2", (0, 4): "SYS", (6, 1): "NV2"},
        {5: ("24-47,72-95", "1")},
    ),
    "4gpu-nv4-empty-cpu-affinity": (4, 3, {(2, 3): "NV4"}, {0: ("0", "0"), 2: ("", "1")}),
    "one-h200-580": (1, 0, {(0, 0): "X"}, {0: ("0-15", "0")}),
    "one-gpu-gb10": (1, 0, {(0, 0): "X"}, {0: ("0-19", "0")}),
    "v100-numa-na": (1, 0, {(0, 0): "X"}, {0: ("0-31", "")}),
    "5x5090-node-phb": (5, 0, {(0, 4): "NODE", (3, 4): "PHB"}, {4: ("0-63", "0")}),
    "8x4090-sys-nics": (8, 2, {(0, 1): "SYS", (6, 7): "SYS"}, {6: ("56-111,168-223", "1")}),
    "4xa4000-all-node": (4, 0, {(0, 1): "NODE", (3, 0): "NODE"}, {1: ("0-23", "0")}),
    "2xa6000-nv4-pair-node": (4, 0, {(0, 1): "NV4", (1, 2): "NODE", (2, 3): "NV4"}, {0: ("0-31", "0")}),
}


def test_every_recording_has_an_expectation() -> None:
    recorded = {path.stem for path in (RECORDINGS / "topo").glob("*.txt")}
    assert recorded == LAYOUTS.keys() | {"h100-cut-off"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str) -> None:
    gpus, nics, cells, affinity = LAYOUTS[name]
    topology = parse_topology(text_of("topo", name))
    assert topology.gpus == gpus
    assert len(topology.nics) == nics
    assert topology.complete()
    for (i, j), cell in cells.items():
        assert topology.cells[i][j] == cell
    for gpu, (cpus, numa) in affinity.items():
        assert (topology.cpus[gpu], topology.numa[gpu]) == (cpus, numa)


@pytest.mark.parametrize("name", LAYOUTS)
def test_matrix_is_symmetric_and_its_diagonal_is_self(name: str) -> None:
    topology = parse_topology(text_of("topo", name))
    for i in range(topology.gpus):
        assert topology.cells[i][i] == "X"
        for j in range(topology.gpus):
            assert topology.cells[i][j] == topology.cells[j][i]


def test_tabs_lost_in_a_paste_give_the_same_matrix() -> None:
    for name in ("4gpu-phb-sys", "8xv100-nv1-nv2-mesh", "4xa4000-all-node"):
        text = text_of("topo", name)
        assert parse_topology(text.replace("\t", "    ")).cells == parse_topology(text).cells


def test_quoted_with_bars_gives_the_same_matrix() -> None:
    text = text_of("topo", "5x5090-node-phb")
    barred = "\n".join("| " + line for line in text.splitlines())
    assert parse_topology(barred).cells == parse_topology(text).cells


def test_a_cut_off_matrix_says_so_and_keeps_what_it_has() -> None:
    topology = parse_topology(text_of("topo", "h100-cut-off"))
    assert not topology.complete()
    assert topology.gpus == 8
    assert topology.nvlinks(0, 7) == 18
    assert topology.path(5, 0) == ""
    assert not topology.all_nvlink()


def test_nvlink_between_all_or_some() -> None:
    assert parse_topology(text_of("topo", "dgx-h100-fused-cells")).all_nvlink()
    pairs = parse_topology(text_of("topo", "8xa100-nvlink-pairs-spaces"))
    assert not pairs.all_nvlink()
    assert pairs.all_nvlink([0, 1])
    assert pairs.nvlinks(0, 1) == 12
    assert not parse_topology(text_of("topo", "one-gpu-gb10")).all_nvlink()


def test_text_without_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="nvidia-smi topo -m"):
        parse_topology("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    with pytest.raises(ValueError, match="topo -p2p"):
        parse_p2p("")


def test_p2p_grants() -> None:
    assert parse_p2p(text_of("p2p", "2x5090-gns")) == [["X", "GNS"], ["GNS", "X"]]
    patched = parse_p2p(text_of("p2p", "5x5090-patched-ok"))
    assert all(patched[i][j] == "OK" for i in range(5) for j in range(5) if i != j)
