# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for all that is not a matrix product: embedding, normalisation, dropout, residual, GELU.

Each reads its inputs once and writes its results once, in the precision of its tensors, and computes in float32.
Seeds of dropout masks are int32 numbers on the device, so that a captured CUDA graph draws another mask each time it
is replayed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.train.kernels_dropout import dropped, factor_of, keep_scale, keeps, number_of
from app.train.kernels_eight import as_stored

NORM_PROGRAMS = 8  #: backward programs of a norm, per multiprocessor
GELU_ROWS = 256  #: rows whose bias gradient one program adds up
BLOCK = 2048  #: elements of an elementwise program


@triton.jit
def _normal(x):
    """The normal distribution's integral up to x and exp(-x^2 / 2).

    Abramowitz and Stegun, formula 7.1.26 (error under 1e-7 here): half the instructions of the library's erf.
    """
    bell = tl.exp2(x * x * -0.7213475204444817)
    t = 1.0 + 0.23164188960075766 * tl.abs(x)
    t = tl.rsqrt(t * t)  # one instruction; 1 / t becomes ten in Triton
    tail = ((((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796) * t * bell
    return tl.where(x < 0.0, tail, 1.0 - tail), bell


@triton.jit(do_not_specialize=["seed"])
def _norm_forward(
    x, residual, weight, bias, z, y, y8, mean, rstd, rows, seed, eps,
    SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, DROPPED: tl.constexpr, SAVE: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)
    inside = (row[:, None] < rows) & (column[None, :] < SIZE)
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    total = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if DROPPED > 0:
        total = tl.where(
            keeps(factor_of(tl.load(seed), row), number_of(column), DROPPED), total * keep_scale(DROPPED), 0.0
        )
    total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if SAVE:
        tl.store(z + place, total.to(z.dtype.element_ty), mask=inside)
    _normalise(
        total, weight, bias, y, y8, mean, rstd, eps, row, rows, column, inside, place, seed, 0, SIZE, SAVE, EIGHT
    )


@triton.jit
def _normalise(
    total, weight, bias, y, y8, mean, rstd, eps, row, rows, column, inside, place, seed, DROPPED: tl.constexpr,
    SIZE: tl.constexpr, SAVE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    centre = tl.sum(total, 1) / SIZE
    apart = tl.where(inside, total - centre[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(apart * apart, 1) / SIZE + eps)
    if SAVE:
        tl.store(mean + row, centre, mask=row < rows)
        tl.store(rstd + row, inverse, mask=row < rows)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < SIZE, other=0.0).to(tl.float32)
    result = apart * inverse[:, None] * scale[None, :] + shift[None, :]
    if DROPPED > 0:
        result = tl.where(
            keeps(factor_of(tl.load(seed), row), number_of(column), DROPPED), result * keep_scale(DROPPED), 0.0
        )
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)
    if EIGHT:
        tl.store(tl.max_contiguous(y8 + place, (1, 8)), as_stored(result, y8), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _embed_forward(
    ids, positions, types, words, places, kinds, weight, bias, z, y, y8, mean, rstd, rows, seed, eps,
    SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, DROPPED: tl.constexpr, SAVE: tl.constexpr,
    TYPED: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)
    inside = (row[:, None] < rows) & (column[None, :] < SIZE)
    word = tl.load(ids + row, mask=row < rows, other=0)
    position = tl.load(positions + row, mask=row < rows, other=0)
    total = tl.load(words + word[:, None] * SIZE + column[None, :], mask=inside, other=0.0).to(tl.float32)
    total += tl.load(places + position[:, None] * SIZE + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if TYPED:
        kind = tl.load(types + row, mask=row < rows, other=0)
        total += tl.load(kinds + kind[:, None] * SIZE + column[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        total += tl.load(kinds + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    if SAVE:
        tl.store(z + place, total.to(z.dtype.element_ty), mask=inside)
    _normalise(
        total, weight, bias, y, y8, mean, rstd, eps, row, rows, column, inside, place, seed, DROPPED, SIZE, SAVE, EIGHT
    )


@triton.jit(do_not_specialize=["seed"])
def _norm_backward(
    dy, more, z, mean, rstd, weight, dz, dx, dx8, sums, rows, seed,
    SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    MORE: tl.constexpr, HALF: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """BEFORE and AFTER are the dropout on the norm's input (its branch) and on the norm's result."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDE)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    dscale = tl.zeros([ROWS, WIDE], tl.float32)
    dshift = tl.zeros([ROWS, WIDE], tl.float32)
    dbranch = tl.zeros([ROWS, WIDE], tl.float32)
    drawn, number = tl.load(seed), number_of(column)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < SIZE)
        place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
        grad = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        if MORE:
            grad += tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
        if AFTER > 0:
            grad = tl.where(keeps(factor_of(drawn, row), number, AFTER), grad * keep_scale(AFTER), 0.0)
        centre = tl.load(mean + row, mask=row < rows, other=0.0)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
        unit = (tl.load(z + place, mask=inside, other=0.0).to(tl.float32) - centre[:, None]) * inverse[:, None]
        unit = tl.where(inside, unit, 0.0)
        dscale += grad * unit
        dshift += grad
        grad = grad * scale[None, :]
        along = tl.sum(grad * unit, 1) / SIZE
        level = tl.sum(grad, 1) / SIZE
        down = (grad - level[:, None] - unit * along[:, None]) * inverse[:, None]
        tl.store(dz + place, down.to(dz.dtype.element_ty), mask=inside)
        if BEFORE > 0:
            down = tl.where(keeps(factor_of(drawn, row), number, BEFORE), down * keep_scale(BEFORE), 0.0)
        if HALF:
            tl.store(dx + place, down.to(dx.dtype.element_ty), mask=inside)
        if EIGHT:
            tl.store(tl.max_contiguous(dx8 + place, (1, 8)), as_stored(down, dx8), mask=inside)
        dbranch += tl.where(inside, down, 0.0)
    sums += program * (3 * SIZE) + column
    tl.store(sums, tl.sum(dscale, 0), mask=column < SIZE)
    tl.store(sums + SIZE, tl.sum(dshift, 0), mask=column < SIZE)
    tl.store(sums + 2 * SIZE, tl.sum(dbranch, 0), mask=column < SIZE)


@triton.jit
def _gelu_forward(u, a, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(u + place, mask=place < count, other=0.0).to(tl.float32)
    below, _ = _normal(x)
    tl.store(tl.max_contiguous(a + place, (1, 8)), as_stored(x * below, a), mask=place < count)


@triton.jit
def _gelu_backward(
    da, u, du, sums, rows, SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(0, GROUP, ROWS):
        row = tl.program_id(0) * GROUP + step + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < SIZE)
        place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
        x = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(da + place, mask=inside, other=0.0).to(tl.float32)
        below, bell = _normal(x)
        grad = grad * (below + x * 0.3989422804014327 * bell)
        tl.store(tl.max_contiguous(du + place, (1, 8)), as_stored(grad, du), mask=inside)
        total += grad
    tl.store(sums + tl.program_id(0) * SIZE + column, tl.sum(total, 0), mask=column < SIZE)


def _wide(size: int) -> int:
    return triton.next_power_of_2(size)


def _warps(size: int) -> int:
    """Warps of a program over a row, 1,024 elements each: measured."""
    return max(1, min(8, _wide(size) // 1024))


def norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: float, seed: Tensor, save: bool,
    eight: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Layer norm of dropout(x) + residual, both [rows, size].

    Returns the result, the same in e4m3 if ``eight``, and, if ``save``, the sum, mean and 1/std.
    """
    rows, size = x.shape
    y = torch.empty_like(x)
    y8 = torch.empty_like(x, dtype=torch.float8_e4m3fn) if eight else y
    z = torch.empty_like(x) if save else x
    mean, rstd = x.new_empty((2, rows if save else 0), dtype=torch.float32).unbind(0)
    _norm_forward[(rows,)](
        x, residual, weight, bias, z, y, y8, mean, rstd, rows, seed, eps,
        SIZE=size, WIDE=_wide(size), ROWS=1, DROPPED=dropped(dropout), SAVE=save, EIGHT=eight,
        num_warps=_warps(size),
    )  # fmt: skip
    return y, y8, z, mean, rstd


def embed(
    ids: Tensor, positions: Tensor, types: Tensor | None, tables: tuple[Tensor, Tensor, Tensor],
    weight: Tensor, bias: Tensor, eps: float, dropout: float, seed: Tensor, save: bool, dtype: torch.dtype,
    eight: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dropout(layer norm(word + position + type)) in ``dtype``, [rows, size], and the rest as ``norm``."""
    rows, size = len(ids), tables[0].shape[1]
    y = torch.empty((rows, size), dtype=dtype, device=ids.device)
    y8 = torch.empty_like(y, dtype=torch.float8_e4m3fn) if eight else y
    z = torch.empty_like(y) if save else y
    mean, rstd = y.new_empty((2, rows if save else 0), dtype=torch.float32).unbind(0)
    _embed_forward[(rows,)](
        ids, positions, ids if types is None else types, *tables, weight, bias, z, y, y8, mean, rstd, rows, seed, eps,
        SIZE=size, WIDE=_wide(size), ROWS=1, DROPPED=dropped(dropout), SAVE=save, TYPED=types is not None, EIGHT=eight,
        num_warps=_warps(size),
    )  # fmt: skip
    return y, y8, z, mean, rstd


def norm_backward(
    dy: Tensor, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, before: float, after: float, seed: Tensor,
    dtype: torch.dtype | None = None, more: Tensor | None = None, half: bool = True, eight: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """From the gradient ``dy`` (+ ``more``) of the result, that of the sum, and that of the branch under dropout.

    The branch's comes as the others if ``half`` (without dropout the very tensor), and in e5m2 if ``eight``. Then
    [3, size] float32 sums: the gradients of the norm's weight, its bias, and of a bias added to the branch.
    ``before`` and ``after`` are the dropout before the sum and after the norm; at most one is not 0.
    """
    rows, size = dy.shape
    half = half and before > 0
    dz = torch.empty_like(dy, dtype=dtype or dy.dtype)
    dx = torch.empty_like(dy) if half else dz
    dx8 = torch.empty_like(dy, dtype=torch.float8_e5m2) if eight else dx
    cores = torch.cuda.get_device_properties(dy.device).multi_processor_count if dy.is_cuda else 2
    sums = dy.new_empty((min(rows, cores * NORM_PROGRAMS), 3, size), dtype=torch.float32)
    _norm_backward[(len(sums),)](
        dy, dy if more is None else more, z, mean, rstd, weight, dz, dx, dx8, sums, rows, seed,
        SIZE=size, WIDE=_wide(size), ROWS=1, BEFORE=dropped(before), AFTER=dropped(after), MORE=more is not None,
        HALF=half, EIGHT=eight, num_warps=_warps(size),
    )  # fmt: skip
    return dz, dx, dx8, sums.sum(0)


def gelu(u: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The exact GELU in the type of ``u``, or in e4m3 if that is ``dtype``."""
    a = torch.empty_like(u, dtype=dtype or u.dtype)
    _gelu_forward[(triton.cdiv(u.numel(), BLOCK),)](u, a, u.numel(), BLOCK=BLOCK, num_warps=4)
    return a


def gelu_backward(da: Tensor, u: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """From the gradient of ``gelu(u)``, [rows, size], that of u, and its float32 sum over rows.

    It is written over ``da``, or, if ``dtype`` is e5m2, into a new tensor of that type.
    """
    rows, size = u.shape
    groups = triton.cdiv(rows, GELU_ROWS)
    sums = u.new_empty((groups, size), dtype=torch.float32)
    du = torch.empty_like(u, dtype=dtype) if dtype else da
    _gelu_backward[(groups, triton.cdiv(size, 128))](
        da, u, du, sums, rows, SIZE=size, GROUP=GELU_ROWS, ROWS=16, COLUMNS=128, num_warps=4
    )
    return du, sums.sum(0)
