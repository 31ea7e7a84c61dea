"""One GPU put to work: a kernel, products in every precision, an fp16 step, host copies, then seconds of full load."""

from __future__ import annotations

import argparse
import math
from typing import Any

from app.hardware.cuda import bus_id
from app.hardware.report import PASSED, Report, passed
from app.hardware.watch import Watcher
from app.smoke.load import copies, load, wrong_numbers
from app.smoke.stage import begin, finish, mark

#: Largest relative error of a product of two random 512 x 512 matrices against float64, by precision. Some ten times
#: the unit roundoff of the format: a healthy GPU stays far below, a wrong element lies far above.
TOLERANCE = {"fp32": 2e-5, "tf32": 4e-3, "fp16": 4e-3, "bf16": 3e-2}


def main(arguments: list[str] | None = None) -> None:
    """Report on CUDA device ``--device``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=int, required=True)
    options = parser.parse_args(arguments)
    index = options.device
    begin()
    mark("import torch")
    import torch

    mark("start CUDA")
    torch.cuda.set_device(index)
    free, total = torch.cuda.mem_get_info(index)
    reports = [compute(index)]
    watcher = Watcher(bus_id(index))
    if reports[0].status == PASSED:
        reports += [copies(index, watcher), load(index, watcher)]
    finish(reports, free_bytes=free, total_bytes=total)


def precisions(capability: tuple[int, int]) -> list[str]:
    """The precisions that a GPU of this compute capability multiplies in hardware."""
    found = ["fp32"]
    if capability >= (5, 3):
        found.append("fp16")
    if capability >= (8, 0):
        found += ["tf32", "bf16"]
    return found


def product_error(precision: str, device: Any) -> float:
    """Largest error of a 512 x 512 product on ``device`` against float64, relative to the largest element."""
    import torch

    generator = torch.Generator().manual_seed(512)
    a = torch.randn(512, 512, generator=generator, dtype=torch.float64)
    b = torch.randn(512, 512, generator=generator, dtype=torch.float64)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    a, b = a.to(dtype), b.to(dtype)
    exact = a.double() @ b.double()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        got = (a.to(device) @ b.to(device)).double().cpu()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    # A NaN must not pass: compare so that it counts as infinitely wrong.
    error = ((got - exact).abs().max() / exact.abs().max()).item()
    return float("inf") if math.isnan(error) else float(error)


def compute(index: int) -> Report:
    """A first kernel, products against float64, an fp16 step with the gradient scaler, attention with padding."""
    import torch

    name = f"GPU {index} compute"
    device = torch.device("cuda", index)
    capability = torch.cuda.get_device_capability(index)
    mark("first kernel")
    total = int(torch.ones(1 << 20, device=device, dtype=torch.int64).sum().item())
    if total != 1 << 20:
        return wrong_numbers(name, f"the sum of {1 << 20} ones came out as {total}")
    errors = {}
    for precision in precisions(capability):
        mark(f"matrix product {precision}")
        errors[precision] = product_error(precision, device)
    bad = {precision: error for precision, error in errors.items() if not error <= TOLERANCE[precision]}
    if bad:
        told = ", ".join(
            f"{precision} off by {error:.1e} (at most {TOLERANCE[precision]:g})" for precision, error in bad.items()
        )
        return wrong_numbers(name, f"matrix products differ from float64: {told}", errors=errors)
    steps = [fp16_step]
    if hasattr(torch.nn.functional, "scaled_dot_product_attention"):
        steps.append(padded_attention)
    for step in steps:
        mark(step.__name__.replace("_", " "))
        problem = step(device)
        if problem:
            return wrong_numbers(name, problem, errors=errors)
    told = ", ".join(f"{precision} {error:.0e}" for precision, error in errors.items())
    extra = ", padded attention equal to eager" if len(steps) > 1 else ""
    return passed(name, f"products against float64 ({told}), fp16 step with gradient scaler{extra}", errors=errors)


def fp16_step(device: Any) -> str:
    """One mixed-precision step whose gradient is compared with float32 on the CPU; "" or what is wrong."""
    import torch

    torch.manual_seed(16)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    rows = torch.randn(64, 128)
    model(rows).square().mean().backward()
    exact = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    model.to(device)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # A scale at which nothing overflows here, so that gradients which are not finite mean a fault.
    if hasattr(torch.amp, "GradScaler"):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    else:
        scaler = torch.cuda.amp.GradScaler(init_scale=1024.0)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(rows.to(device)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for want, parameter in zip(exact, model.parameters(), strict=True):
        if parameter.grad is None:
            return "an fp16 step left a parameter without a gradient"
        error = ((parameter.grad.cpu() - want).abs().max() / want.abs().max()).item()
        if not error <= 0.03:
            return f"the gradient of an fp16 step differs from float32 by {error:.1e} (at most 0.03)"
    scaler.step(optimizer)
    scaler.update()
    if any(torch.equal(old, new.detach()) for old, new in zip(before, model.parameters(), strict=True)):
        return "an fp16 step with the gradient scaler changed nothing: the scaler saw gradients that are not finite"
    return ""


def padded_attention(device: Any) -> str:
    """Fused attention with padding in fp16 against float32 by hand (some releases give NaN); "" or what is wrong."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(64)
    q, k, v = torch.randn(3, 2, 4, 64, 64, device=device, dtype=torch.float16)
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool, device=device)
    mask[1, ..., 40:] = False
    fused = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).float()
    scores = (q.float() @ k.float().transpose(-1, -2)) / 8
    eager = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.float()
    error = (fused - eager).abs().max().item()
    return "" if error <= 0.02 else f"fused attention with padding differs from eager by {error:.1e} (at most 0.02)"


if __name__ == "__main__":
    main()
