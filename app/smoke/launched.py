"""What `accelerate launch` starts in smoke: two processes that form one world, agree on gradients and stay equal."""

from __future__ import annotations

from app import processes
from app.smoke.gloo import exchange
from app.smoke.stage import begin, finish, mark

WORLD = 2


def main() -> None:
    """Gather, exchange values over gloo, take one data-parallel step; everything is compared with arithmetic."""
    begin()
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.num_processes != WORLD:
        raise ValueError(f"accelerate launch was asked for {WORLD} processes and made {accelerator.num_processes}")
    rank = accelerator.process_index
    mark(f"gather on rank {rank}")
    ranks = accelerator.gather(torch.tensor([rank], device=accelerator.device)).tolist()
    if ranks != list(range(WORLD)):
        raise ValueError(f"gather returned {ranks}")
    exchange(rank, WORLD)

    mark(f"step on rank {rank}")
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.full((1, 4), float(rank + 1), device=accelerator.device)
    accelerator.backward(model(rows).sum())
    optimizer.step()
    # The gradient of rank r is r + 1 everywhere; data parallelism averages: 1.5, so the weight is 1 - 0.5 x 1.5.
    weight = accelerator.unwrap_model(model).weight.detach().float()
    if not torch.allclose(weight, torch.full_like(weight, 0.25)):
        raise ValueError(f"rank {rank}: after one averaged step the weight is {weight.tolist()}, not 0.25")
    mark(f"leave on rank {rank}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        finish(device=str(accelerator.device), world=WORLD, gloo=WORLD)
    processes.end(0)


if __name__ == "__main__":
    main()
