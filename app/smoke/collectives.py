"""One rank of the NCCL checks: collectives of every size, or pair by pair, every value compared.

Started by ``ranks.run_ranks``. The device is LOCAL_RANK, or KIT_DEVICE where ranks are not the GPUs 0, 1, 2, ...
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

from app import processes
from app.smoke.stage import begin, finish, mark, tell

#: Elements of float32 in one row of the pattern; sizes are multiples of it on every rank.
ROW = 4096
PAIR_BYTES = 32 << 20


def main(arguments: list[str] | None = None) -> None:
    """Join, run what was asked, leave. Wrong values raise ValueError, which names the rank and the collective."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nccl")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[], metavar="MB", help="collectives of these sizes (2^20)"
    )
    parser.add_argument("--kinds", nargs="*", default=["all_reduce", "all_gather", "reduce_scatter"])
    parser.add_argument("--pairs", nargs="*", default=[], metavar="I-J", help="an all-reduce between these ranks alone")
    options = parser.parse_args(arguments)
    begin()
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("KIT_DEVICE", os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    mark("join")
    # The limits of smoke end a hang long before this timeout; it only must not be shorter.
    dist.init_process_group(
        options.backend,
        init_method=os.environ["KIT_RENDEZVOUS"],
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),
    )
    # The pairs come first: where P2P between two GPUs is broken, a collective of all would hang and name nobody.
    for pair in options.pairs:
        i, j = (int(part) for part in pair.split("-"))
        mark(f"pair {pair}")
        group = dist.new_group([i, j])
        if rank in (i, j):
            check_all_reduce(torch.empty(PAIR_BYTES // 4, device=device), rank, [i, j], group)
    mark("first all_reduce")
    check_all_reduce(torch.empty(ROW * 64, device=device), rank, list(range(world)), None)
    for megabytes in options.sizes:
        count = fitting(megabytes << 20, world, device)
        for kind in options.kinds:
            mark(f"{kind} {megabytes} MB")
            tell(**{f"{kind} {megabytes}": {"seconds": timed(kind, count, rank, world, device), "bytes": count * 4}})
    mark("leave")
    dist.barrier()
    finish()
    processes.end(0)


def fitting(size_bytes: int, world: int, device: Any) -> int:
    """Elements of float32 for a buffer of about ``size_bytes``: a multiple of the rows of all ranks, a sixth of what is
    free at most (the comparison needs copies)."""
    import torch

    if device.type == "cuda":
        size_bytes = min(size_bytes, torch.cuda.mem_get_info(device.index)[0] // 6)
    step = ROW * world
    return max(size_bytes // 4 // step, 1) * step


def rows(count: int, device: Any) -> Any:
    """The pattern: small whole numbers that float32 adds exactly, different in neighbouring places and rows."""
    import torch

    column = torch.arange(ROW, device=device, dtype=torch.float32) % 251
    row = torch.arange(count // ROW, device=device, dtype=torch.float32) % 97
    return column.unsqueeze(0) + row.unsqueeze(1)


def compare(got: Any, expected: Any, what: str, rank: int) -> None:
    """Raise ValueError with the number of wrong elements and the first of them."""
    import torch

    got = got.view(-1, ROW)
    if torch.equal(got, expected):
        return
    different = (got != expected).view(-1)
    first = int(different.nonzero()[0].item())
    raise ValueError(
        f"rank {rank}: {what} gave wrong values in {int(different.sum())} of {different.numel()} places, "
        f"first at {first}: {got.view(-1)[first].item()} instead of {expected.reshape(-1)[first].item()}"
    )


def check_all_reduce(buffer: Any, rank: int, members: list[int], group: Any) -> None:
    """All-reduce a pattern over ``members`` in place and compare every element."""
    import torch.distributed as dist

    base = rows(buffer.numel(), buffer.device)
    buffer.view(-1, ROW).copy_(base + 1000.0 * rank)
    dist.all_reduce(buffer, group=group)
    compare(buffer, base * len(members) + 1000.0 * sum(members), "all_reduce", rank)


def timed(kind: str, count: int, rank: int, world: int, device: Any) -> float:
    """Check one collective over ``count`` elements, then time it: seconds of the best of several runs on this rank."""
    import torch
    import torch.distributed as dist

    whole = torch.empty(count, device=device)
    part = torch.empty(count // world, device=device)
    if kind == "all_reduce":
        check_all_reduce(whole, rank, list(range(world)), None)

        def run() -> None:
            dist.all_reduce(whole)
    elif kind == "all_gather":
        base = rows(part.numel(), device)
        part.view(-1, ROW).copy_(base + 1000.0 * rank)

        def run() -> None:
            dist.all_gather_into_tensor(whole, part)

        run()
        for peer, piece in enumerate(whole.chunk(world)):
            compare(piece, base + 1000.0 * peer, f"all_gather from rank {peer}", rank)
    elif kind == "reduce_scatter":
        base = rows(count, device)
        whole.view(-1, ROW).copy_(base + 1000.0 * rank)

        def run() -> None:
            dist.reduce_scatter_tensor(part, whole)

        run()
        mine = base.chunk(world)[rank]
        compare(part, mine * world + 1000.0 * sum(range(world)), "reduce_scatter", rank)
    else:
        raise ValueError(f"unknown collective {kind}: all_reduce, all_gather, reduce_scatter")
    best = float("inf")
    for _ in range(3 if count * 4 > 128 << 20 else 10):
        _settle(device)
        start = time.perf_counter()
        run()
        _settle(device)
        best = min(best, time.perf_counter() - start)
    return best


def _settle(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
