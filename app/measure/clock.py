"""Where the time of an update goes, without making the GPU wait: events on its stream, read when a line is logged anyway."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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
        self.last_gradient: Any = None

    def end_backward_at(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """From now on what a part takes after the last of these gradients was computed is timed as ``communication``.

        For parameters whose gradients come last: behind them a backward pass only waits for the other processes.
        """
        for parameter in parameters:
            parameter.register_hook(self._note_gradient)

    def _note_gradient(self, gradient: torch.Tensor) -> None:
        if self.cuda:
            self.last_gradient = torch.cuda.Event(enable_timing=True)
            self.last_gradient.record()
        else:
            self.last_gradient = time.perf_counter()

    @contextmanager
    def part(self, name: str, communicates: bool = False) -> Iterator[None]:
        """Time what is launched inside under ``name``; see ``end_backward_at`` for a backward pass that ``communicates``."""
        self.last_gradient = None
        if self.cuda and name not in WAITED_ON_HOST:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            if communicates and self.last_gradient is not None:
                self.events.append(("communication", self.last_gradient, last))
                last = self.last_gradient
            self.events.append((name, first, last))
            return
        at = time.perf_counter()
        yield
        now = time.perf_counter()
        if communicates and self.last_gradient is not None:
            self.host["communication"] = self.host.get("communication", 0.0) + now - self.last_gradient
            now = self.last_gradient
        self.host[name] = self.host.get(name, 0.0) + now - at

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


class Later:
    """Numbers on a device, copied to the host without waiting; ``read`` waits if they are not there yet."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.done = values.clone() if not values.is_cuda else values, None
        if values.is_cuda:
            self.values = torch.empty_like(values, device="cpu", pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record()

    def read(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return [float(value) for value in self.values.reshape(-1)]
