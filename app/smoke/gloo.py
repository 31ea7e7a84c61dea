"""The CPU's collectives: gloo, every value compared. Runs as a rank of its own, or inside another program."""

from __future__ import annotations

import os
from datetime import timedelta

from app import processes
from app.smoke.stage import begin, finish, mark


def main() -> None:
    """Join the other ranks and compare what they exchange."""
    begin()
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mark("join")
    dist.init_process_group(
        "gloo",
        init_method=os.environ["KIT_RENDEZVOUS"],
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    exchange(rank, world)
    mark("leave")
    dist.barrier()
    finish(gloo=world)
    processes.end(0)


def exchange(rank: int, world: int) -> None:
    """Collectives in the default group, which must be of gloo. Raises ValueError on a wrong value."""
    import torch
    import torch.distributed as dist

    size = 1 << 16
    base = torch.arange(size, dtype=torch.float32) % 251
    mark("all_reduce")
    values = base + 1000 * rank
    dist.all_reduce(values)
    expected = base * world + 1000 * sum(range(world))
    wrong = int((values != expected).sum())
    if wrong:
        raise ValueError(f"rank {rank}: gloo's all_reduce gave wrong values in {wrong} of {size} places")
    mark("broadcast")
    values = base.clone() if rank == 0 else torch.zeros(size)
    dist.broadcast(values, src=0)
    if not torch.equal(values, base):
        raise ValueError(f"rank {rank}: gloo's broadcast did not bring rank 0's values")
    mark("all_gather")
    parts = [torch.zeros(size) for _ in range(world)]
    dist.all_gather(parts, base + rank)
    for peer, part in enumerate(parts):
        if not torch.equal(part, base + peer):
            raise ValueError(f"rank {rank}: gloo's all_gather brought wrong values from rank {peer}")


if __name__ == "__main__":
    main()
