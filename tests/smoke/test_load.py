"""Verdicts on a GPU under load, and the arithmetic of the checks, on readings instead of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.hardware.watch import Watcher
from app.smoke import gpu
from app.smoke.load import judge_load, rates


class Seen(Watcher):
    """A watcher with samples given instead of taken."""

    def __init__(self, **changed: Any) -> None:
        good = {"clock_mhz": 1900, "clock_max_mhz": 1980, "temperature_c": 60, "power_w": 600.0, "throttle": 0x4}
        self.samples = [{**good, "pcie_gen": 5, "pcie_width": 16, **changed} for _ in range(30)]
        self.problem = ""


def judged(seen: Seen, tflops: tuple[float, float, float] = (790, 795, 788), name: str = "NVIDIA H200") -> Any:
    return judge_load("GPU 0 load", name, "bf16", tflops, seen)


def test_a_healthy_card_at_its_power_cap_passes() -> None:
    report = judged(Seen())
    assert report.status == "passed"
    assert "80% of the datasheet's 989" in report.summary
    assert "software power cap" in report.summary


@pytest.mark.parametrize(
    ("seen", "tflops", "word"),
    [
        (Seen(throttle=0x20, temperature_c=92), (700, 700, 700), "too hot"),
        (Seen(throttle=0x40), (700, 700, 700), "too hot"),
        (Seen(throttle=0x80), (700, 700, 700), "power supply"),
        (Seen(), (600, 790, 400), "fell from 790 to 400"),
        (Seen(clock_mhz=345), (200, 200, 200), "less than 50%"),
    ],
)
def test_sick_cards_are_named(seen: Seen, tflops: tuple[float, float, float], word: str) -> None:
    report = judged(seen, tflops)
    assert report.status == "warning"
    assert word in report.cause


def test_an_unknown_card_is_not_held_against_another() -> None:
    report = judged(Seen(), (10, 10, 10), name="NVIDIA RTX PRO 6000")
    assert report.status == "passed"
    assert "no datasheet figure for this name" in report.summary


def test_without_nvml_the_reason_is_told() -> None:
    seen = Seen()
    seen.samples, seen.problem = [], "NVMLError: Not Found"
    assert "clocks not readable (NVMLError: Not Found)" in judged(seen).summary


def test_rates() -> None:
    # 2 x 1000^3 = 0.002 TFLOP a product; ten in 10 ms are 2 TFLOP/s, in 20 ms one.
    whole, first, last = rates([(0.01, 10)] * 3 + [(0.02, 10)] * 3, 1000)
    assert (first, last) == (pytest.approx(2.0), pytest.approx(1.0))
    assert whole == pytest.approx(4 / 3)


def test_precisions_by_architecture() -> None:
    assert gpu.precisions((3, 7)) == ["fp32"]
    assert gpu.precisions((7, 0)) == ["fp32", "fp16"]
    assert set(gpu.precisions((9, 0))) == {"fp32", "fp16", "tf32", "bf16"}


@pytest.mark.parametrize("precision", ["fp32", "tf32"])  # half precisions on a CPU are summed otherwise than on a GPU
def test_an_honest_product_is_within_tolerance(precision: str) -> None:
    assert gpu.product_error(precision, "cpu") < gpu.TOLERANCE[precision] / 3


def test_one_wrong_element_or_nan_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch.Tensor.__matmul__
    for wrong in (7.0, float("nan")):

        def spoiled(self, other, wrong=wrong):  # type: ignore[no-untyped-def]
            out = honest(self, other)
            if out.dtype == torch.float32:
                out[3, 4] += wrong
            return out

        monkeypatch.setattr(torch.Tensor, "__matmul__", spoiled)
        assert gpu.product_error("fp32", "cpu") > gpu.TOLERANCE["fp32"]


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "scaled_dot_product_attention"), reason="this torch has no fused attention"
)
def test_padded_attention_on_the_cpu() -> None:
    assert gpu.padded_attention("cpu") == ""
