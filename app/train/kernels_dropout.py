# mypy: disable-error-code="no-untyped-def"
"""Dropout masks for Triton kernels: never stored, the same again whenever they are asked for.

Element (row, column) is kept where number * factor + summand, of 32 bits, is large enough: multiply-shift hashing
(Dietzfelbinger 1996), with a well mixed number for each column and factor for each row, which the seed goes into. Unlike
there the summand is not drawn, it is the factor with its halves swapped. That is one multiplication and addition an
element; kernels that meet a row or column often load what it was mixed to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  #: numbers of a program


@triton.jit
def _hash(bits):
    """32 well mixed bits of 32; constants: Chris Wellons' lowbias32 (nullprogram.com/blog/2018/07/31)."""
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def factor_of(seed, row):
    """A random odd factor for each row."""
    return _hash(_hash(row.to(tl.uint32)) ^ seed.to(tl.uint32)) | 1


@triton.jit
def number_of(column):
    """A random number for each column."""
    return _hash(column.to(tl.uint32) + 0x7F4A7C15)


@triton.jit
def keeps(factor, number, DROPPED: tl.constexpr):
    """[rows, columns] true where dropout keeps an element, with probability 1 - DROPPED / 2^32."""
    summand = (factor << 16) | (factor >> 16)
    return number[None, :] * factor[:, None] + summand[:, None] >= DROPPED


@triton.jit
def keeps_across(factor, number, DROPPED: tl.constexpr):
    """``keeps`` transposed: [columns, rows]."""
    summand = (factor << 16) | (factor >> 16)
    return number[:, None] * factor[None, :] + summand[None, :] >= DROPPED


@triton.jit
def keep_scale(DROPPED: tl.constexpr):
    """What kept elements are multiplied by."""
    return 1.0 / (1.0 - DROPPED / 4294967296)


@triton.jit
def _numbers(out, count, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + column, number_of(column).to(tl.int32, bitcast=True), mask=column < count)


def numbers(count: int, device: torch.device) -> Tensor:
    """The numbers of the first ``count`` columns, as int32."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    _numbers[(triton.cdiv(count, BLOCK),)](out, count, BLOCK=BLOCK)
    return out


def dropped(dropout: float) -> int:
    """The probability as a whole number of 2^32nds, which is what the kernels compare hashes with."""
    return round(dropout * 2**32)
