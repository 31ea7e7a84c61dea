"""How a training process ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end(code: int) -> NoReturn:
    """End with ``code``: what is written is flushed, NCCL's group is destroyed, Python is not torn down.

    gloo's threads, whose peer may be gone already, have been seen to wait for each other for ever when their group is
    destroyed (torch 2.4), so its sockets are left to the kernel. And Python waits at its end for a loader's workers,
    which ignore its signal; without their parent they end by themselves.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl":
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
