# mypy: disable-error-code="no-untyped-def"
"""Triton attention for packed rows of short sequences, forward and backward.

Library attention kernels are made for long sequences; at a mean of 150 tokens they mostly start and stop. Here a
program owns 64 rows of one head of one sequence, small enough that several run beside each other on a multiprocessor
and hide each other's waiting. They read queries, keys and values where the fused projection left them, write gradients
to the same layout and add up the projection's bias gradient on the way. The backward pass is two kernels, one over
query rows and one over key rows: a fifth more arithmetic than one, but no atomic additions, so results repeat bit for
bit, and half the registers.

Mathematics: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.train.kernels_dropout import dropped, factor_of, keep_scale, keeps, keeps_across, numbers
from app.train.kernels_eight import as_stored

LOG2E = 1.4426950408889634
TILE = 64  #: rows of a program
FORWARD_STEP = 64  #: rows of each turn of the forward loop
BACKWARD_STEP = 32  #: rows of each turn of the backward loops: fewer registers, so more programs side by side
CONTEXT_SCALE = tl.constexpr(8.0)  #: of 8-bit results: means of values are small, up to 56 fits


class Plan(NamedTuple):
    """What all layers' attention over a packed row needs."""

    tiles: Tensor  #: [programs a head, 3] int32: first token, length, first row in the sequence
    numbers: Tensor  #: [T, filled up to TILE] int32 of columns, for dropout


def plan(cu_seqlens: Tensor, tokens: int) -> Plan:
    """Which rows each program works on.

    Worked out on the device, without waiting for it. The longest sequences come first, so that the last programs to
    start are short; empty ones come last.
    """
    lengths, order = cu_seqlens.diff().sort(descending=True, stable=True)
    counts = (lengths + TILE - 1) // TILE
    ends = counts.cumsum(0)
    tile = torch.arange(tokens // TILE + len(lengths), device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=len(lengths) - 1)
    first = (tile - (ends - counts)[sequence]) * TILE
    made = torch.stack((cu_seqlens[:-1][order][sequence], lengths[sequence], first), 1).int()
    return Plan(made, numbers(-(-tokens // TILE) * TILE, cu_seqlens.device))


@triton.jit
def _attend_step(
    query, keys, values, number, there, top, total, mixed, factor, scale, zero,
    DROPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One turn of the forward pass over some keys; only the last has any that are not there."""
    if MASKED:
        key = tl.load(keys, mask=there[:, None], other=0.0)
        value = tl.load(values, mask=there[:, None], other=0.0)
    else:
        key, value = tl.load(keys), tl.load(values)
    score = tl.dot(query, tl.trans(key))
    if MASKED:
        score = tl.where(there[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weight, 1)
    if DROPPED > 0:
        weight = tl.where(keeps(factor, tl.load(number).to(tl.uint32, bitcast=True), DROPPED), weight, zero)
    mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
    return higher, total, mixed


# In all three kernels ``zero`` is 0.0, and an argument: before a constant, LLVM rounds first and selects then, which takes
# three instructions more an element. Steps, stages and registers are what was fastest of some forty on an H200, with heads of 64.
@triton.jit(do_not_specialize=["seed"])
def _forward(
    qkv, out, out8, lse, tiles, number, seed, tokens, scale, zero,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, DROPPED: tl.constexpr,
    SAVE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    tiles += tl.program_id(0) // HEADS * 3
    start, length, first = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2)
    if first >= length:
        return
    width = tl.arange(0, WIDTH)
    row = first + tl.arange(0, TILE)
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    spot = row[:, None] * (3 * HEADS * WIDTH) + width[None, :]
    query = tl.load(qkv + spot, mask=row[:, None] < length, other=0.0)
    factor = factor_of(tl.load(seed), (start + row) * HEADS + head)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, WIDTH], tl.float32)
    whole = length // STEP * STEP
    for masked in tl.static_range(2):  # whole steps, then what is left
        for step in range(whole if masked else 0, length if masked else whole, STEP):
            column = step + tl.arange(0, STEP)
            keys = qkv + HEADS * WIDTH + column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
            top, total, mixed = _attend_step(
                query, keys, keys + HEADS * WIDTH, number + column, column < length, top, total, mixed, factor, scale, zero,
                DROPPED, masked,
            )  # fmt: skip
    mixed = mixed * (keep_scale(DROPPED) / total)[:, None]
    flat = (start + row).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + width[None, :]
    tl.store(out + flat, mixed.to(out.dtype.element_ty), mask=row[:, None] < length)
    if EIGHT:
        tl.store(out8 + flat, as_stored(mixed * CONTEXT_SCALE, out8), mask=row[:, None] < length)
    if SAVE:
        tl.store(lse + head.to(tl.int64) * tokens + start + row, top + tl.log2(total), mask=row < length)


@triton.jit(do_not_specialize=["seed"])
def _backward_queries(
    qkv, out, lse, grad, dqkv, delta, factors, sums, tiles, number, seed, tokens, scale, slope, zero,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    tiles += tl.program_id(0) // HEADS * 3
    start, length, first = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2)
    width = tl.arange(0, WIDTH)
    sums += tl.program_id(0) // HEADS * (3 * HEADS * WIDTH) + head * WIDTH + width
    if first >= length:
        tl.store(sums, tl.zeros([WIDTH], tl.float32))
        return
    row = first + tl.arange(0, TILE)
    inside = row < length
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    spot = row[:, None] * (3 * HEADS * WIDTH) + width[None, :]
    flat = (start + row).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + width[None, :]
    place = head.to(tl.int64) * tokens + start + row
    factor = factor_of(tl.load(seed), (start + row) * HEADS + head)
    query = tl.load(qkv + spot, mask=inside[:, None], other=0.0)
    dout = tl.load(grad + flat, mask=inside[:, None], other=0.0)
    mixed = tl.load(out + flat, mask=inside[:, None], other=0.0)
    level = tl.load(lse + place, mask=inside, other=0.0)
    drift = tl.sum(dout.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(delta + place, drift, mask=inside)
    if DROPPED > 0:
        tl.store(factors + place, factor.to(tl.int32, bitcast=True), mask=inside)
    dquery = tl.zeros([TILE, WIDTH], tl.float32)
    for step in range(0, length, STEP):
        column = step + tl.arange(0, STEP)
        there = column < length
        keys = qkv + HEADS * WIDTH + column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
        key = tl.load(keys, mask=there[:, None], other=0.0)
        value = tl.load(keys + HEADS * WIDTH, mask=there[:, None], other=0.0)
        weight = tl.exp2(tl.dot(query, tl.trans(key)) * scale - level[:, None])
        weight = tl.where(there[None, :], weight, 0.0)
        dweight = tl.dot(dout, tl.trans(value))
        if DROPPED > 0:
            drawn = tl.load(number + column).to(tl.uint32, bitcast=True)
            dweight = tl.where(keeps(factor, drawn, DROPPED), dweight, zero)
        dscore = weight * (dweight * keep_scale(DROPPED) - drift[:, None])
        dquery += tl.dot(dscore.to(key.dtype), key)
    dquery *= slope
    dqkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    tl.store(dqkv + spot, as_stored(dquery, dqkv), mask=inside[:, None])
    tl.store(sums, tl.sum(dquery, 0))


@triton.jit(do_not_specialize=["seed"])
def _backward_keys(
    qkv, lse, grad, dqkv, delta, factors, sums, tiles, number, seed, tokens, scale, slope, zero,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    tiles += tl.program_id(0) // HEADS * 3
    start, length, first = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2)
    width = tl.arange(0, WIDTH)
    sums += tl.program_id(0) // HEADS * (3 * HEADS * WIDTH) + head * WIDTH + width
    if first >= length:
        tl.store(sums + HEADS * WIDTH, tl.zeros([WIDTH], tl.float32))
        tl.store(sums + 2 * HEADS * WIDTH, tl.zeros([WIDTH], tl.float32))
        return
    column = first + tl.arange(0, TILE)
    there = column < length
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    grad += start.to(tl.int64) * (HEADS * WIDTH) + head * WIDTH
    lse += head.to(tl.int64) * tokens + start
    delta += head.to(tl.int64) * tokens + start
    factors += head.to(tl.int64) * tokens + start
    own = tl.load(number + column, mask=there, other=0).to(tl.uint32, bitcast=True)
    place = column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
    key = tl.load(qkv + place + HEADS * WIDTH, mask=there[:, None], other=0.0)
    value = tl.load(qkv + place + 2 * HEADS * WIDTH, mask=there[:, None], other=0.0)
    dkey = tl.zeros([TILE, WIDTH], tl.float32)
    dvalue = tl.zeros([TILE, WIDTH], tl.float32)
    for step in range(0, length, STEP):
        row = step + tl.arange(0, STEP)
        inside = row < length
        query = tl.load(qkv + row[:, None] * (3 * HEADS * WIDTH) + width[None, :], mask=inside[:, None], other=0.0)
        dout = tl.load(grad + row[:, None] * (HEADS * WIDTH) + width[None, :], mask=inside[:, None], other=0.0)
        level = tl.load(lse + row, mask=inside, other=0.0)
        drift = tl.load(delta + row, mask=inside, other=0.0)
        # Transposed, keys down and queries across, so that weights feed the next product from registers. Nothing is
        # masked: a query that is not there has no gradient, and a key that is not there has a row of its own.
        weight = tl.exp2(tl.dot(key, tl.trans(query)) * scale - level[None, :])
        dweight = tl.dot(value, tl.trans(dout))
        if DROPPED > 0:
            factor = tl.load(factors + row, mask=inside, other=0).to(tl.uint32, bitcast=True)
            kept = keeps_across(factor, own, DROPPED)
            dvalue += tl.dot(tl.where(kept, weight, zero).to(dout.dtype), dout)
            dweight = tl.where(kept, dweight, zero)
        else:
            dvalue += tl.dot(weight.to(dout.dtype), dout)
        dscore = weight * (dweight * keep_scale(DROPPED) - drift[None, :])
        dkey += tl.dot(dscore.to(query.dtype), query)
    dkey = tl.where(there[:, None], dkey * slope, 0.0)
    dvalue = tl.where(there[:, None], dvalue * keep_scale(DROPPED), 0.0)
    dqkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    tl.store(dqkv + place + HEADS * WIDTH, as_stored(dkey, dqkv), mask=there[:, None])
    tl.store(dqkv + place + 2 * HEADS * WIDTH, as_stored(dvalue, dqkv), mask=there[:, None])
    tl.store(sums + HEADS * WIDTH, tl.sum(dkey, 0))
    tl.store(sums + 2 * HEADS * WIDTH, tl.sum(dvalue, 0))


def attend(
    qkv: Tensor, plan: Plan, dropout: float, seed: Tensor, save: bool, eight: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of qkv [T, 3, heads, width] in half precision: [T, heads x width].

    The same comes times ``CONTEXT_SCALE`` in e4m3 if ``eight``, and, if ``save``, [heads, T] float32 logarithms of the
    weights' sums. ``dropout`` falls on the attention weights; the same ``seed`` (one int32 on the device) drops the same.
    """
    tokens, _, heads, width = qkv.shape
    out = qkv.new_empty(tokens, heads * width)
    out8 = torch.empty_like(out, dtype=torch.float8_e4m3fn) if eight else out
    lse = torch.empty((heads, tokens) if save else (0,), dtype=torch.float32, device=qkv.device)
    _forward[(len(plan.tiles) * heads,)](
        qkv, out, out8, lse, plan.tiles, plan.numbers, seed, tokens, LOG2E * width**-0.5, 0.0,
        HEADS=heads, WIDTH=width, TILE=TILE, STEP=FORWARD_STEP, DROPPED=dropped(dropout), SAVE=save, EIGHT=eight,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, out8, lse


def attend_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, plan: Plan, dropout: float, seed: Tensor,
    eight: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of qkv, from that of ``attend``'s result and what it returned, and its float32 sum over tokens.

    Of the type of ``qkv``, or e5m2 if ``eight``.
    """
    tokens, _, heads, width = qkv.shape
    dqkv = torch.empty_like(qkv, dtype=torch.float8_e5m2 if eight else qkv.dtype)
    delta = torch.empty_like(lse)
    sums = torch.empty((len(plan.tiles), 3 * heads * width), dtype=torch.float32, device=qkv.device)
    factors = torch.empty_like(lse, dtype=torch.int32)
    scale = width**-0.5
    tail = (dqkv, delta, factors, sums, plan.tiles, plan.numbers, seed, tokens, LOG2E * scale, scale, 0.0)
    sizes = {"HEADS": heads, "WIDTH": width, "TILE": TILE, "STEP": BACKWARD_STEP, "DROPPED": dropped(dropout)}
    grid = (len(plan.tiles) * heads,)
    queries, keys = _registers(qkv)
    _backward_queries[grid](qkv, out, lse, grad, *tail, **sizes, num_warps=4, num_stages=3, **queries)
    _backward_keys[grid](qkv, lse, grad, *tail, **sizes, num_warps=4, num_stages=2, **keys)
    return dqkv, sums.sum(0)


def _registers(qkv: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """The most registers a thread of the two backward kernels may have, where fewer of them pay: more programs side by side."""
    if qkv.is_cuda and qkv.shape[-1] <= 64 and torch.cuda.get_device_capability(qkv.device) == (9, 0):
        return {"maxnreg": 96}, {"maxnreg": 128}
    return {}, {}
