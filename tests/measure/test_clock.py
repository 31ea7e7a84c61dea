"""What the clock counts as waiting for other processes, and numbers that are read later."""

from __future__ import annotations

import time

import torch

from app.measure.clock import Later, StepClock


class Slow(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def test_what_follows_the_last_gradient_is_communication() -> None:
    first, last = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    clock = StepClock(torch.device("cpu"))
    clock.end_backward_at([last])
    with clock.part("backward", communicates=True):
        (Slow.apply(last, 0.05) * first).sum().backward()
        time.sleep(0.2)
    seen = clock.read()
    assert seen["communication"] >= 0.2
    assert seen["backward"] >= 0.05
    assert seen["backward"] + seen["communication"] <= seen["total"]
    with clock.part("backward"):
        last.sum().backward()
    assert "communication" not in clock.read()


def test_numbers_on_the_host_are_there_at_once() -> None:
    assert Later(torch.tensor([2.0, 3.5])).read() == [2.0, 3.5]
    assert Later(torch.tensor(7.0)).read() == [7.0]
