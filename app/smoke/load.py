"""One GPU under load: copies to and from the host, then seconds of large products with its clocks, heat and power."""

from __future__ import annotations

import time
from typing import Any

from app.hardware.gpus import POWER_BITS, THERMAL_BITS, reasons
from app.hardware.links import host_copy
from app.hardware.peaks import dense_tflops
from app.hardware.report import PASSED, Report, failed, passed, warning
from app.hardware.watch import Watcher
from app.smoke.stage import mark

LOAD_SECONDS = 3.0
#: Share of the datasheet's dense rate that a healthy card reaches in a large product (H200: 80 %).
LEAST_OF_PEAK = 0.5
COPY_BYTES = 256 << 20


def wrong_numbers(name: str, summary: str, **data: Any) -> Report:
    """A failed report for a GPU that computes or copies wrongly."""
    return failed(
        name,
        summary,
        "this GPU, its memory or its driver computes wrong numbers",
        "lower any overclocking, check power and heat, another driver; compare with another card",
        **data,
    )


def copies(index: int, watcher: Watcher) -> Report:
    """Pinned copies to the GPU and back, values compared, held against the PCIe link as it is under load."""
    import torch

    name = f"GPU {index} host copies"
    device = torch.device("cuda", index)
    mark("host copies")
    numbers = torch.arange(COPY_BYTES // 4, dtype=torch.int32)
    host = numbers.pin_memory()
    back = torch.empty_like(host).pin_memory()
    there = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device=device)
    rates = {}
    watcher.start()
    for direction, target, source in (("to the GPU", there, host), ("from the GPU", back, there)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best, until = float("inf"), time.perf_counter() + 0.5
        while time.perf_counter() < until:
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
        rates[direction] = COPY_BYTES / best / 1e9
    watcher.stop()
    if not torch.equal(there, torch.arange(COPY_BYTES // 4, dtype=torch.int32, device=device)) or not torch.equal(
        back, numbers
    ):
        return wrong_numbers(name, "a copy between host and GPU came back with other values")
    generation, width = watcher.highest("pcie_gen"), watcher.highest("pcie_width")
    expected = host_copy(generation, width)
    slow = min(rates.values())
    told = ", ".join(f"{rate:.1f} GB/s {direction}" for direction, rate in rates.items())
    link = f"PCIe Gen{generation} x{width} under load" if generation else "PCIe link not readable"
    summary = f"{told}; {link}; {expected.words()}"
    data = {
        "gbs": rates,
        "pcie_gen": generation,
        "pcie_width": width,
        "expected_gbs": expected.gbs,
        "rule": expected.rule,
    }
    if expected.judge(slow) == PASSED:
        return passed(name, summary, **data)
    return warning(
        name,
        summary,
        "the link carries less than its generation and width should: a bad contact or riser, or a far NUMA node",
        "reseat the card; bind the process to the GPU's NUMA node; look for link errors with dmesg | grep -i aer",
        **data,
    )


def load(index: int, watcher: Watcher) -> Report:
    """Seconds of large products: the rate, whether it falls, and what the driver says about clocks, heat and power."""
    import torch

    name = f"GPU {index} load"
    device = torch.device("cuda", index)
    capability = torch.cuda.get_device_capability(index)
    # Before Volta half precision is emulated or slow, and one large product would take longer than this check.
    dtype_name = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype_name]
    mark("full load")
    roomy = torch.cuda.mem_get_info(index)[0] > 4 << 30
    size = 8192 if roomy and capability >= (7, 0) else 4096 if roomy else 2048
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    for _ in range(3):
        torch.matmul(a, b, out=out)
    torch.cuda.synchronize(device)
    slices: list[tuple[float, int]] = []  # (seconds, products)
    watcher.start()
    began = time.perf_counter()
    while time.perf_counter() - began < LOAD_SECONDS:
        start = time.perf_counter()
        for _ in range(10):
            torch.matmul(a, b, out=out)
        torch.cuda.synchronize(device)
        slices.append((time.perf_counter() - start, 10))
    watcher.stop()
    return judge_load(name, torch.cuda.get_device_name(index), dtype_name, rates(slices, size), watcher)


def rates(slices: list[tuple[float, int]], size: int) -> tuple[float, float, float]:
    """TFLOP/s over all slices, in the first third and in the last third; 2 n^3 operations a product."""
    work = 2 * size**3 / 1e12

    def rate(part: list[tuple[float, int]]) -> float:
        return work * sum(products for _, products in part) / sum(seconds for seconds, _ in part)

    third = max(1, len(slices) // 3)
    return rate(slices), rate(slices[:third]), rate(slices[-third:])


def judge_load(name: str, gpu: str, dtype: str, tflops: tuple[float, float, float], watcher: Watcher) -> Report:
    """The verdict on the load: rate against the datasheet where the card is known, its fall, heat, power, clocks."""
    rate, first, last = tflops
    peak = dense_tflops(gpu, dtype)
    clock, top = watcher.median("clock_mhz"), watcher.highest("clock_max_mhz")
    heat, power = watcher.highest("temperature_c"), watcher.highest("power_w")
    busy = watcher.samples[len(watcher.samples) // 3 :]
    hot = [s for s in busy if (s["throttle"] or 0) & THERMAL_BITS]
    brake = [s for s in busy if (s["throttle"] or 0) & 0x80]
    bits = 0
    for sample in busy:
        bits |= sample["throttle"] or 0
    against = f"{rate / peak:.0%} of the datasheet's {peak:g}" if peak else "no datasheet figure for this name"
    seen = [f"{rate:.0f} TFLOP/s {dtype} ({against})"]
    if clock and top:
        seen.append(f"{clock} of {top} MHz")
    if heat is not None:
        seen.append(f"{heat} C")
    if power is not None:
        seen.append(f"{power:.0f} W")
    words = reasons(bits & (THERMAL_BITS | POWER_BITS))
    if words:
        seen.append("limited by: " + ", ".join(words))
    if watcher.problem:
        seen.append(f"clocks not readable ({watcher.problem})")
    data = {"tflops": rate, "first_third": first, "last_third": last, "peak_tflops": peak, "clock_mhz": clock}
    data |= {"clock_max_mhz": top, "temperature_c": heat, "power_w": power, "throttle": bits, "dtype": dtype}
    found: list[tuple[str, str]] = []
    if busy and len(hot) > 0.2 * len(busy):
        found.append(
            (
                "the card is too hot and slows itself down",
                "clean fans and filters, more room between cards, a lower power limit",
            )
        )
    if busy and len(brake) > 0.2 * len(busy):
        found.append(
            ("the board asks the card to brake: power supply or cables", "one cable a connector, a stronger supply")
        )
    if last < 0.85 * first:
        found.append(
            (
                f"the rate fell from {first:.0f} to {last:.0f} within {LOAD_SECONDS:.0f} s",
                "heat or power: watch nvidia-smi dmon during a run",
            )
        )
    if peak and rate < LEAST_OF_PEAK * peak:
        found.append(
            (
                f"less than {LEAST_OF_PEAK:.0%} of the datasheet's rate",
                "clocks (nvidia-smi -q -d CLOCK), power limit, another program on this GPU",
            )
        )
    summary = ", ".join(seen)
    if found:
        return warning(name, summary, "; ".join(c for c, _ in found), "; ".join(f for _, f in found), **data)
    return passed(name, summary, **data)
