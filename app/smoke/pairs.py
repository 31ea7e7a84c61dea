"""Copies between pairs of GPUs, every value compared: whether a path works is asked of the path, not of the driver."""

from __future__ import annotations

import argparse
import time
from typing import Any

from app.smoke.stage import begin, finish, mark, tell

COPY_BYTES = 256 << 20


def main(arguments: list[str] | None = None) -> None:
    """Copy along every ``SOURCE>TARGET`` pair of devices and tell, pair by pair, what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=COPY_BYTES)
    parser.add_argument("pairs", nargs="+", metavar="SOURCE>TARGET", help="cuda:0>cuda:1 ...")
    options = parser.parse_args(arguments)
    begin()
    import torch  # noqa: F401 - the import is a step that takes seconds; the first pair should not be blamed for it

    for pair in options.pairs:
        source, _, target = pair.partition(">")
        mark(pair)
        tell(**{pair: verified_copy(source, target, options.bytes)})
    finish()


def pattern(device: Any, size: int) -> Any:
    """``size`` int32 numbers that each device computes for itself, so that what arrives can be compared there."""
    import torch

    return ((torch.arange(size, device=device, dtype=torch.int64) * 2654435761 + 12345) % (1 << 31)).to(torch.int32)


def transfer(source: Any, target: Any) -> None:
    """The copy that is being tested: torch uses P2P where the driver grants it, else host memory."""
    target.copy_(source)


def verified_copy(source_name: str, target_name: str, size_bytes: int) -> dict[str, Any]:
    """Copy and compare. Keys: granted (bool or None), wrong (elements), first_wrong, elements, gbs."""
    import torch

    source, target = torch.device(source_name), torch.device(target_name)
    both = [device for device in (source, target) if device.type == "cuda"]
    granted = torch.cuda.can_device_access_peer(target.index, source.index) if len(both) == 2 else None
    for device in both:
        free = torch.cuda.mem_get_info(device.index)[0]
        size_bytes = min(size_bytes, free // 16)
    size = max(size_bytes // 4, 1)
    sent = pattern(source, size)
    got = torch.zeros(size, device=target, dtype=torch.int32)
    expected = pattern(target, size)

    def wait() -> None:
        for device in both:
            torch.cuda.synchronize(device)

    wait()
    transfer(sent, got)
    wait()
    different = got != expected
    wrong = int(different.sum().item())
    first = int(different.nonzero()[0].item()) if wrong else None
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        transfer(sent, got)
        wait()
        best = min(best, time.perf_counter() - start)
    return {"granted": granted, "wrong": wrong, "first_wrong": first, "elements": size, "gbs": size * 4 / best / 1e9}


if __name__ == "__main__":
    main()
