"""Ranks of app.smoke.collectives of which number 1 goes wrong, as the first argument says. For tests only.

dies: it is killed inside its first collective. absent: it never joins. stuck: it joins and never comes to a collective.
corrupts: its all-reduce gives one wrong value. raises: it raises inside its first collective.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist

from app.smoke import collectives

fault, victim = sys.argv[1], os.environ["RANK"] == "1"
reduce, mark = dist.all_reduce, collectives.mark


def marks(step: str) -> None:
    if victim and (fault, step) in (("absent", "join"), ("stuck", "first all_reduce")):
        time.sleep(3600)
    mark(step)


def reduces(tensor, *arguments, **named):  # type: ignore[no-untyped-def]
    if victim and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if victim and fault == "raises":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    result = reduce(tensor, *arguments, **named)
    if victim and fault == "corrupts":
        tensor[777] += 1
    return result


dist.all_reduce, collectives.mark = reduces, marks
collectives.main(["--backend", "gloo", "--sizes", "1", "--kinds", "all_reduce"])
