"""Where the time of an update goes, without making the GPU wait: events on its stream, read when a line is logged anyway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WAITED_ON_HOST = ("data",)  #: parts in which the device idles because the host has nothing for it yet


class StepClock:
    """Seconds spent in named parts of the updates since the last ``read``.

    On a GPU a part is the time between two events on the current stream; ``data`` is measured on the host. On the CPU all are host times.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.host: dict[str, float] = {}
        self.events: list[tuple[str, Any, Any]] = []
        self.began = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is launched inside under ``name``."""
        if self.cuda and name not in WAITED_ON_HOST:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            self.events.append((name, first, last))
            return
        at = time.perf_counter()
        yield
        self.host[name] = self.host.get(name, 0.0) + time.perf_counter() - at

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside (evaluation, a checkpoint) out of ``total``; waits for the device first."""
        if self.cuda:
            torch.cuda.synchronize()
        at = time.perf_counter()
        yield
        self.began += time.perf_counter() - at

    def read(self) -> dict[str, float]:
        """Seconds of every part and ``total`` (wall) since the last call; waits for the device, and starts anew."""
        if self.cuda:
            torch.cuda.synchronize()
        parts = dict(self.host)
        for name, first, last in self.events:
            parts[name] = parts.get(name, 0.0) + first.elapsed_time(last) / 1e3
        now = time.perf_counter()
        parts["total"] = now - self.began
        self.host, self.events, self.began = {}, [], now
        return parts
