# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for the cross-entropy over a large vocabulary: half-precision logits are read, float32 ones never made."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _entropy_forward(logits, targets, losses, lse, stride, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    column = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(0, VOCABULARY, BLOCK):
        value = tl.load(logits + step + column, mask=step + column < VOCABULARY, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, value)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.exp(value - safe)
        top = higher
    peak = tl.max(top, 0)
    level = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    chosen = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(target >= 0, level - chosen, 0.0))
    tl.store(lse + row, level)


@triton.jit
def _entropy_backward(
    logits, targets, lse, grad, dlogits, stride, VOCABULARY: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    level = tl.load(lse + row)
    factor = tl.where(target >= 0, tl.load(grad).to(tl.float32), 0.0)
    for step in range(0, PADDED, BLOCK):
        column = step + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
        share = tl.exp(value - level) - tl.where(column == target, 1.0, 0.0)
        spot = dlogits + row * stride + column
        tl.store(spot, (share * factor).to(dlogits.dtype.element_ty), mask=column < PADDED)


def entropy(logits: Tensor, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row (0 where its target is negative) and its logsumexp, over the first columns."""
    rows = len(logits)
    losses, lse = logits.new_empty((2, rows), dtype=torch.float32).unbind(0)
    _entropy_forward[(rows,)](
        logits, targets, losses, lse, logits.stride(0), VOCABULARY=vocabulary, BLOCK=2048, num_warps=8
    )
    return losses, lse


def entropy_backward(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, vocabulary: int) -> Tensor:
    """The gradient of the logits when every row's loss has the gradient ``grad`` (0-dim); 0 in padding columns."""
    dlogits = torch.empty_like(logits)
    _entropy_backward[(len(logits),)](
        logits, targets, lse, grad, dlogits, logits.stride(0),
        VOCABULARY=vocabulary, PADDED=logits.shape[1], BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return dlogits
