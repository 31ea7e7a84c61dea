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

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.train.kernels_rows import dropped, keep_scale, keeps, keeps_across

LOG2E = 1.4426950408889634
TILE = 64  #: rows of a program
STEP = 32  #: rows of each turn of its loop: fewer registers than 64, so more programs side by side


def tiles(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Which rows each program works on: [programs a head, 3] int32 of first token, length, first row in the sequence.

    Worked out on the device, without waiting for it. The longest sequences come first, so that the last programs to
    start are short; empty ones come last.
    """
    lengths, order = cu_seqlens.diff().sort(descending=True, stable=True)
    counts = (lengths + TILE - 1) // TILE
    ends = counts.cumsum(0)
    tile = torch.arange(tokens // TILE + len(lengths), device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=len(lengths) - 1)
    first = (tile - (ends - counts)[sequence]) * TILE
    return torch.stack((cu_seqlens[:-1][order][sequence], lengths[sequence], first), 1).int()


@triton.jit(do_not_specialize=["seed"])
def _forward(
    qkv, out, lse, plan, seed, tokens, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, DROPPED: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    plan += tl.program_id(0) // HEADS * 3
    start, length, first = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    if first >= length:
        return
    drawn = tl.load(seed)
    width = tl.arange(0, WIDTH)
    row = first + tl.arange(0, TILE)
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    spot = row[:, None] * (3 * HEADS * WIDTH) + width[None, :]
    query = tl.load(qkv + spot, mask=row[:, None] < length, other=0.0)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, WIDTH], tl.float32)
    for step in range(0, length, STEP):
        column = step + tl.arange(0, STEP)
        there = column < length
        place = column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
        key = tl.load(qkv + place + HEADS * WIDTH, mask=there[:, None], other=0.0)
        value = tl.load(qkv + place + 2 * HEADS * WIDTH, mask=there[:, None], other=0.0)
        score = tl.where(there[None, :], tl.dot(query, tl.trans(key)), float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        if DROPPED > 0:
            weight = tl.where(keeps(drawn, (start + row) * HEADS + head, column, DROPPED), weight, 0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        top = higher
    mixed = mixed * (keep_scale(DROPPED) / total)[:, None]
    flat = (start + row).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + width[None, :]
    tl.store(out + flat, mixed.to(out.dtype.element_ty), mask=row[:, None] < length)
    if SAVE:
        tl.store(lse + head.to(tl.int64) * tokens + start + row, top + tl.log2(total), mask=row < length)


@triton.jit(do_not_specialize=["seed"])
def _backward_queries(
    qkv, out, lse, grad, dqkv, delta, sums, plan, seed, tokens, scale, slope,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    plan += tl.program_id(0) // HEADS * 3
    start, length, first = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    width = tl.arange(0, WIDTH)
    sums += tl.program_id(0) // HEADS * (3 * HEADS * WIDTH) + head * WIDTH + width
    if first >= length:
        tl.store(sums, tl.zeros([WIDTH], tl.float32))
        return
    drawn = tl.load(seed)
    row = first + tl.arange(0, TILE)
    inside = row < length
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    spot = row[:, None] * (3 * HEADS * WIDTH) + width[None, :]
    flat = (start + row).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + width[None, :]
    line = head.to(tl.int64) * tokens + start + row
    query = tl.load(qkv + spot, mask=inside[:, None], other=0.0)
    dout = tl.load(grad + flat, mask=inside[:, None], other=0.0)
    mixed = tl.load(out + flat, mask=inside[:, None], other=0.0)
    level = tl.load(lse + line, mask=inside, other=0.0)
    drift = tl.sum(dout.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(delta + line, drift, mask=inside)
    dquery = tl.zeros([TILE, WIDTH], tl.float32)
    for step in range(0, length, STEP):
        column = step + tl.arange(0, STEP)
        there = column < length
        place = column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
        key = tl.load(qkv + place + HEADS * WIDTH, mask=there[:, None], other=0.0)
        value = tl.load(qkv + place + 2 * HEADS * WIDTH, mask=there[:, None], other=0.0)
        weight = tl.exp2(tl.dot(query, tl.trans(key)) * scale - level[:, None])
        weight = tl.where(there[None, :], weight, 0.0)
        dweight = tl.dot(dout, tl.trans(value))
        if DROPPED > 0:
            kept = keeps(drawn, (start + row) * HEADS + head, column, DROPPED)
            dweight = tl.where(kept, dweight * keep_scale(DROPPED), 0.0)
        dquery += tl.dot((weight * (dweight - drift[:, None])).to(key.dtype), key)
    dquery *= slope
    dqkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    tl.store(dqkv + spot, dquery.to(dqkv.dtype.element_ty), mask=inside[:, None])
    tl.store(sums, tl.sum(dquery, 0))


@triton.jit(do_not_specialize=["seed"])
def _backward_keys(
    qkv, lse, grad, dqkv, delta, sums, plan, seed, tokens, scale, slope,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    plan += tl.program_id(0) // HEADS * 3
    start, length, first = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    width = tl.arange(0, WIDTH)
    sums += tl.program_id(0) // HEADS * (3 * HEADS * WIDTH) + head * WIDTH + width
    if first >= length:
        tl.store(sums + HEADS * WIDTH, tl.zeros([WIDTH], tl.float32))
        tl.store(sums + 2 * HEADS * WIDTH, tl.zeros([WIDTH], tl.float32))
        return
    drawn = tl.load(seed)
    column = first + tl.arange(0, TILE)
    there = column < length
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    grad += start.to(tl.int64) * (HEADS * WIDTH) + head * WIDTH
    lse += head.to(tl.int64) * tokens + start
    delta += head.to(tl.int64) * tokens + start
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
        # transposed, keys down and queries across, so that weights feed the next product from registers
        weight = tl.exp2(tl.dot(key, tl.trans(query)) * scale - level[None, :])
        weight = tl.where(there[:, None], weight, 0.0)
        dweight = tl.dot(value, tl.trans(dout))
        if DROPPED > 0:
            kept = keeps_across(drawn, (start + row) * HEADS + head, column, DROPPED)
            dvalue += tl.dot(tl.where(kept, weight, 0.0).to(dout.dtype), dout)
            dweight = tl.where(kept, dweight * keep_scale(DROPPED), 0.0)
        else:
            dvalue += tl.dot(weight.to(dout.dtype), dout)
        dkey += tl.dot((weight * (dweight - drift[None, :])).to(query.dtype), query)
    dkey *= slope
    dvalue *= keep_scale(DROPPED)
    dqkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    tl.store(dqkv + place + HEADS * WIDTH, dkey.to(dqkv.dtype.element_ty), mask=there[:, None])
    tl.store(dqkv + place + 2 * HEADS * WIDTH, dvalue.to(dqkv.dtype.element_ty), mask=there[:, None])
    tl.store(sums + HEADS * WIDTH, tl.sum(dkey, 0))
    tl.store(sums + 2 * HEADS * WIDTH, tl.sum(dvalue, 0))


def attend(qkv: Tensor, plan: Tensor, dropout: float, seed: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """Attention of qkv [T, 3, heads, width] in half precision: [T, heads x width] and, if ``save``, [heads, T] lse.

    ``dropout`` falls on the attention weights; the same ``seed`` (one int32 on the device) drops the same ones.
    """
    tokens, _, heads, width = qkv.shape
    out = qkv.new_empty(tokens, heads * width)
    lse = torch.empty((heads, tokens) if save else (0,), dtype=torch.float32, device=qkv.device)
    _forward[(len(plan) * heads,)](
        qkv, out, lse, plan, seed, tokens, LOG2E * width**-0.5,
        HEADS=heads, WIDTH=width, TILE=TILE, STEP=STEP, DROPPED=dropped(dropout), SAVE=save, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, plan: Tensor, dropout: float, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of qkv, from that of ``attend``'s result and what it returned, and its float32 sum over tokens."""
    tokens, _, heads, width = qkv.shape
    dqkv, delta = torch.empty_like(qkv), torch.empty_like(lse)
    sums = torch.empty((len(plan), 3 * heads * width), dtype=torch.float32, device=qkv.device)
    tail = (dqkv, delta, sums, plan, seed, tokens, LOG2E * width**-0.5, width**-0.5)
    sizes = {"HEADS": heads, "WIDTH": width, "TILE": TILE, "STEP": STEP, "DROPPED": dropped(dropout)}
    grid = (len(plan) * heads,)
    _backward_queries[grid](qkv, out, lse, grad, *tail, **sizes, num_warps=4, num_stages=3)
    _backward_keys[grid](qkv, lse, grad, *tail, **sizes, num_warps=4, num_stages=1, maxnreg=128)
    return dqkv, sums.sum(0)
