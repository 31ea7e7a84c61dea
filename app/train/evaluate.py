"""Evaluation over exactly the rows there are: the same batches, and so the same numbers, for any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from app.train.batches import Layout, plan_epoch
from app.train.collate import Collator
from app.train.model import Learner

MASK_EPOCH = 2**20  #: evaluation masks are drawn as those of an epoch that training never reaches: always the same


def groups(collator: Collator, batch_size: int) -> list[np.ndarray]:
    """The rows of each evaluation batch: packed rows, or sequences of like length."""
    split = collator.split
    lengths = split.store.lengths
    if collator.shape is None:
        ordered = split.rows[np.argsort(-lengths[split.rows], kind="stable")]
        return [ordered[at : at + batch_size] for at in range(0, len(ordered), batch_size)]
    plan = plan_epoch(
        split.rows,
        lengths,
        0,
        0,
        Layout(batch_size, 1, 1),
        collator.shape,
        collator.masking.fraction if collator.masking else 0.0,
    )
    return [plan.micro_batch(u, 0, 0) for u in range(plan.updates)]


@torch.no_grad()
def evaluate(
    learner: Learner, collator: Collator, batch_size: int, accelerator: Any, classes: int, stop: Callable[[], bool]
) -> dict[str, float] | None:
    """``eval_loss`` with ``accuracy`` and ``f1`` (mean over the classes, classification) or ``perplexity`` (MLM).

    Every process calls it and gets the same; a batch is computed by one process and the sums are added in the order of the batches. None when
    ``stop()`` became true in any process.
    """
    every = groups(collator, batch_size)
    sums = torch.zeros(len(every), 2, dtype=torch.float64)
    table = torch.zeros(classes, classes, dtype=torch.int64)
    was_training = learner.training
    learner.eval()
    stopped = False
    for index in range(accelerator.process_index, len(every), accelerator.num_processes):
        if stopped := stop():
            break
        batch = collator.collate(every[index], MASK_EPOCH)
        tensors = batch.to(accelerator.device)
        with accelerator.autocast():
            logits = learner.logits(tensors)
        loss = F.cross_entropy(logits.float(), tensors["targets"], ignore_index=-100, reduction="sum")
        sums[index, 0], sums[index, 1] = loss.item(), batch.targets
        if classes:
            there = tensors["targets"] >= 0
            pairs = tensors["targets"][there] * classes + logits.argmax(-1)[there]
            table += torch.bincount(pairs, minlength=classes * classes).cpu().view(classes, classes)
    learner.train(was_training)
    together = torch.cat(
        [sums.flatten(), table.flatten().double(), torch.tensor([float(stopped)], dtype=torch.float64)]
    )
    if accelerator.num_processes > 1:
        together = accelerator.reduce(together.to(accelerator.device), reduction="sum").cpu()
    if together[-1]:
        return None
    sums = together[: sums.numel()].view(-1, 2)
    loss = math.fsum(sums[:, 0].tolist()) / math.fsum(sums[:, 1].tolist())
    if not classes:
        return {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    return {"eval_loss": loss, **scores(together[sums.numel() : -1].view(classes, classes).numpy())}


def scores(table: np.ndarray) -> dict[str, float]:
    """Accuracy and macro F1 from counts [true class, predicted class]; F1 is the mean over classes that occur or are predicted."""
    right, true, predicted = np.diag(table), table.sum(1), table.sum(0)
    there = true + predicted > 0
    return {
        "accuracy": float(right.sum() / table.sum()),
        "f1": float(np.mean(2 * right[there] / (true + predicted)[there])),
    }
