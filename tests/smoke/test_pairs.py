"""The verified copy: good on honest hardware, and a single flipped bit is found, placed and named."""

from __future__ import annotations

from app.hardware.gpus import Gpu, Machine
from app.smoke import gpu_checks, pairs
from app.smoke.gpu_checks import copy_all, judge_copy
from app.smoke.stage import Stage, module

TWO = Machine(
    "nvml",
    driver="580.65.06",
    gpus=[
        Gpu(k, "NVIDIA GeForce RTX 3090", capability=(8, 6), pcie_gen_max=4, pcie_width=16, memory_mib=24576)
        for k in range(2)
    ],
    cells=[["X", "PHB"], ["PHB", "X"]],
    p2p=[["X", "OK"], ["OK", "X"]],
)


def test_an_honest_copy() -> None:
    outcome = Stage(module("app.smoke.pairs", "--bytes", "4000000", "cpu>cpu"), limit=60, quiet=60).outcome()
    assert outcome.finished, outcome.output
    result = outcome.data["cpu>cpu"]
    assert (result["wrong"], result["elements"]) == (0, 1_000_000)
    assert result["gbs"] > 0


def test_one_flipped_bit_is_found_and_placed() -> None:
    command = module("tests.smoke.faults.corrupt_copy", "--bytes", "4000000", "cpu>cpu")
    outcome = Stage(command, limit=60, quiet=60).outcome()
    result = outcome.data["cpu>cpu"]
    assert (result["wrong"], result["first_wrong"]) == (1, 12345)
    report = judge_copy(TWO, (0, 1), {**result, "granted": True})
    assert report.status == "failed"
    assert report.name == "P2P 0>1"
    assert "1 of 1000000 values arrived wrong" in report.summary
    assert "NCCL_P2P_DISABLE=1" in report.fix


def test_the_pattern_differs_everywhere_near() -> None:
    numbers = pairs.pattern("cpu", 100_000)
    assert len(set(numbers.tolist())) > 99_000
    assert (numbers[1:] != numbers[:-1]).all()


def test_broken_pairs_are_named_and_patience_ends() -> None:
    results = copy_all([(0, 1), (1, 0), (0, 2)], device="cuda:9{}")  # no machine has these: every copy breaks
    words = [results[pair] for pair in ((0, 1), (1, 0), (0, 2))]
    assert "broken" in words[0] and "cuda:90>cuda:91" in words[0]["broken"]
    assert "broken" in words[1]
    assert words[2] == {"skipped": f"not tried after {gpu_checks.PATIENCE} broken pairs"}
    assert [judge_copy(TWO, (0, 1), word).status for word in words] == ["failed", "failed", "skipped"]


def test_slow_and_fast_copies() -> None:
    good = {"granted": True, "wrong": 0, "first_wrong": None, "elements": 10, "gbs": 25.0}
    assert judge_copy(TWO, (0, 1), good).status == "passed"
    slow = judge_copy(TWO, (0, 1), {**good, "gbs": 3.0})
    assert slow.status == "warning"
    assert "50% of 31.5 GB/s" in slow.summary
