"""One rank of the CPU check of torch.distributed: the gloo backend, every value compared."""

from __future__ import annotations

import os
from datetime import timedelta

from app.smoke.stage import begin, finish, mark


def main() -> None:
    """Join the other ranks and run all_reduce, broadcast and all_gather. Raises AssertionError on a wrong value."""
    begin()
    import torch
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
    size = 1 << 16
    base = torch.arange(size, dtype=torch.float32) % 251
    mark("all_reduce")
    values = base + 1000 * rank
    dist.all_reduce(values)
    expected = base * world + 1000 * sum(range(world))
    if not torch.equal(values, expected):
        raise ValueError(
            f"rank {rank}: all_reduce gave wrong values in {int((values != expected).sum())} of {size} places"
        )
    mark("broadcast")
    values = base.clone() if rank == 0 else torch.zeros(size)
    dist.broadcast(values, src=0)
    if not torch.equal(values, base):
        raise ValueError(f"rank {rank}: broadcast did not bring rank 0's values")
    mark("all_gather")
    parts = [torch.zeros(size) for _ in range(world)]
    dist.all_gather(parts, base + rank)
    for peer, part in enumerate(parts):
        if not torch.equal(part, base + peer):
            raise ValueError(f"rank {rank}: all_gather brought wrong values from rank {peer}")
    mark("leave")
    dist.barrier()
    dist.destroy_process_group()
    finish(world=world)


if __name__ == "__main__":
    main()
