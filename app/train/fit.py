"""The largest micro-batch that fits, found before the first update with the longest sequences there are."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from app.errors import WRONG_MACHINE, Fault
from app.train.batches import PackedShape, target_counts

SPARE = 0.04  #: share of the GPU's memory left alone: fragments, and what other libraries allocate
CPU_TOKENS = 8192  #: the most tokens of a micro-batch on a CPU, which gains nothing from more


def divide(sequences: int, fits: Callable[[int], bool]) -> tuple[int, int]:
    """``sequences`` of a process and update as (micro-batch, accumulation), fewest rounds first. Raises Fault if one alone does not fit."""
    for rounds in range(1, sequences + 1):
        if sequences % rounds == 0 and fits(sequences // rounds):
            return sequences // rounds, rounds
    raise Fault(
        f"--global-batch-size: not even one sequence a micro-batch fits in this GPU's memory ({sequences} a process were tried in every "
        "division); use a smaller --max-length or --model",
        WRONG_MACHINE,
    )


def longest(
    lengths: np.ndarray, rows: np.ndarray, shape: PackedShape | None, batch: int, fraction: float
) -> np.ndarray:
    """The row numbers of the longest sequences that one micro-batch can hold."""
    ordered = rows[np.argsort(-lengths[rows], kind="stable")]
    if shape is None:
        return ordered[:batch]
    inside = (np.cumsum(lengths[ordered]) <= shape.tokens) & (np.arange(len(ordered)) < shape.sequences)
    if shape.targets:
        inside &= np.cumsum(target_counts(lengths[ordered], fraction)) <= shape.targets
    return ordered[inside]


def passes(learner: Any, accelerator: Any, tensors: dict[str, Any]) -> bool:
    """Whether a training pass over ``tensors``, an evaluation pass beside it, the optimizer's moments and a buffer for gradients fit on the GPU.

    Leaves no gradients and an empty cache behind; the same answer in every process, which all must call it.
    """
    device = accelerator.device
    room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    room -= int(SPARE * torch.cuda.mem_get_info(device)[1])
    # AdamW's two moments, and the buffer in which gradients of several micro-batches or processes add up
    moments = sum(12 * p.numel() for p in learner.parameters() if p.requires_grad)
    try:
        fits = _peak(learner, accelerator, tensors) + moments <= room
    except RuntimeError as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        fits = False
    for parameter in learner.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    if accelerator.num_processes > 1:
        answer = torch.tensor(int(fits), device=device)
        torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MIN)
        fits = bool(answer.item())
    return fits


def _peak(learner: Any, accelerator: Any, tensors: dict[str, Any]) -> int:
    """Bytes of both passes together: recorded passes keep theirs while an evaluation runs."""
    device = accelerator.device
    torch.cuda.reset_peak_memory_stats(device)
    with accelerator.autocast():
        loss = learner(tensors)
    accelerator.backward(loss * 0)
    del loss
    training, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    learner.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            learner.logits(tensors).float()
    finally:
        learner.train()
    return training + torch.cuda.max_memory_allocated(device) - held
