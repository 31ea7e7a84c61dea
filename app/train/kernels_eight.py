# mypy: disable-error-code="no-untyped-def"
"""Triton kernels that make 8-bit copies of matrices, and the way every kernel stores what may be 8 bits wide.

Tensor cores multiply 8-bit matrices only where both lie along the dimension that is summed, so that a weight gradient,
which is summed over tokens, needs its two factors turned first: ``turned`` moves a matrix once, a byte an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_E5M2 = tl.constexpr(57344.0)
ALIGNED = 16  #: bytes that a row of an 8-bit factor must be a multiple of (torch._scaled_mm)
TURNED = 128  #: rows and columns that a program turns


@triton.jit
def as_stored(value, pointer):
    """float32 ``value`` in the type behind ``pointer``.

    The conversion to 8 bits replaces what is too large by the largest there is. For activations and weights (e4m3)
    that is meant; a gradient (e5m2) becomes not a number instead, so that the trainer sees the overflow and skips.
    Where 16-bit tensors are read and stored row by row beside, tell Triton of 8 neighbours only (``tl.max_contiguous``), or
    it gives each thread 16 of the 8-bit tensor, and moves all others from thread to thread first.
    """
    if pointer.dtype.element_ty == tl.float8e5:
        value = tl.where(tl.abs(value) <= LARGEST_E5M2, value, float("nan"))
    return value.to(pointer.dtype.element_ty)


@triton.jit
def _eight_bits(x, y, count, scale, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32) * scale
    tl.store(y + place, as_stored(value, y), mask=place < count)


@triton.jit
def _turn(x, y, rows, across, SIZE: tl.constexpr, TURNED: tl.constexpr):
    row = tl.program_id(0) * TURNED + tl.arange(0, TURNED)
    column = tl.program_id(1) * TURNED + tl.arange(0, TURNED)
    inside = (row[:, None] < rows) & (column[None, :] < SIZE)
    tile = tl.load(x + row.to(tl.int64)[:, None] * SIZE + column[None, :], mask=inside, other=0)
    inside = (column[:, None] < SIZE) & (row[None, :] < across)
    tl.store(y + column.to(tl.int64)[:, None] * across + row[None, :], tl.trans(tile), mask=inside)


def eight_bits(x: Tensor, scale: float) -> Tensor:
    """x times ``scale`` in e4m3; what is too large becomes the largest there is."""
    y = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    _eight_bits[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), scale, BLOCK=1024, num_warps=4)
    return y


def turned(x: Tensor) -> Tensor:
    """The transpose of an 8-bit matrix [rows, size], laid out as [size, rows], rows filled up with zeros to ``ALIGNED``."""
    rows, size = x.shape
    across = triton.cdiv(rows, ALIGNED) * ALIGNED
    y = torch.empty((size, across), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(across, TURNED), triton.cdiv(size, TURNED))
    _turn[grid](x.view(torch.uint8), y.view(torch.uint8), rows, across, SIZE=size, TURNED=TURNED, num_warps=8)
    return y
