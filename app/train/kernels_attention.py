# ruff: noqa: PLR0917 (a kernel takes its tensors in order)
# mypy: disable-error-code="no-untyped-def" (Triton gives kernel parameters their types)
"""Triton attention for packed rows of short sequences, forward and backward.

Library attention kernels are made for long sequences; at a mean of 150 tokens they mostly start and stop. Here one
program owns a tile of one head of one sequence (forward) or a whole head of one sequence (backward), reads queries,
keys and values where the fused projection left them, and writes gradients to the same layout. The backward pass
works out its row sums itself and needs no atomic additions, so results repeat bit for bit.

Mathematics: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.train.kernels_rows import dropped, keeps, keeps_across

LOG2E = 1.4426950408889634


class Config(NamedTuple):
    """Tile shapes of one kernel: query rows, key columns, warps, pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


FORWARD = Config(64, 64, 4, 2)
BACKWARD = Config(64, 64, 4, 2)


class Tiles(NamedTuple):
    """Which sequence each program works on, longest first so that the last to start are the short ones."""

    forward: Tensor  #: [programs a head, 3] int32: first token, length, first query row
    backward: Tensor  #: [sequences, 2] int32: first token, length


def tiles(cu_seqlens: Tensor, tokens: int, rows: int = FORWARD.rows) -> Tiles:
    """Plans the programs of a row on its device, without waiting for it; empty sequences come last and do nothing."""
    lengths = cu_seqlens.diff()
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = cu_seqlens[:-1][order]
    counts = (lengths + rows - 1) // rows
    ends = counts.cumsum(0)
    tile = torch.arange(tokens // rows + len(lengths), device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=len(lengths) - 1)
    first = (tile - (ends - counts)[sequence]) * rows
    forward = torch.stack((starts[sequence], lengths[sequence], first), 1)
    return Tiles(forward.int(), torch.stack((starts, lengths), 1).int())


@triton.jit(do_not_specialize=["seed"])
def _forward(
    qkv, out, lse, plan, seed, tokens, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROPPED: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(plan + tile * 3)
    length = tl.load(plan + tile * 3 + 1)
    first = tl.load(plan + tile * 3 + 2)
    if first >= length:
        return
    width = tl.arange(0, WIDTH)
    row = first + tl.arange(0, ROWS)
    base = qkv + start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    query = tl.load(base + row[:, None] * (3 * HEADS * WIDTH) + width[None, :], mask=row[:, None] < length, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(0, length, COLUMNS):
        column = step + tl.arange(0, COLUMNS)
        inside = column < length
        place = base + column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
        key = tl.load(place + HEADS * WIDTH, mask=inside[:, None], other=0.0)
        value = tl.load(place + 2 * HEADS * WIDTH, mask=inside[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        if DROPPED > 0:
            kept = keeps(seed, (start + row) * HEADS + head, column, DROPPED)
            weight = tl.where(kept, weight, 0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        top = higher
    mixed = mixed / (total * (1.0 - DROPPED / 4294967296))[:, None]
    spot = out + (start + row).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + width[None, :]
    tl.store(spot, mixed.to(out.dtype.element_ty), mask=row[:, None] < length)
    if SAVE:
        tl.store(lse + head.to(tl.int64) * tokens + start + row, top + tl.log2(total), mask=row < length)


@triton.jit(do_not_specialize=["seed"])
def _backward(
    qkv, out, lse, grad, dqkv, partial, plan, seed, tokens, scale, slope,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(plan + sequence * 2)
    length = tl.load(plan + sequence * 2 + 1)
    if length == 0:
        return
    width = tl.arange(0, WIDTH)
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    dqkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    out += start.to(tl.int64) * (HEADS * WIDTH) + head * WIDTH
    grad += start.to(tl.int64) * (HEADS * WIDTH) + head * WIDTH
    partial += start.to(tl.int64) * (HEADS * WIDTH) + head * WIDTH
    lse += head.to(tl.int64) * tokens + start
    for left in range(0, length, COLUMNS):
        column = left + tl.arange(0, COLUMNS)
        there = column < length
        place = column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
        key = tl.load(qkv + place + HEADS * WIDTH, mask=there[:, None], other=0.0)
        value = tl.load(qkv + place + 2 * HEADS * WIDTH, mask=there[:, None], other=0.0)
        dkey = tl.zeros([COLUMNS, WIDTH], tl.float32)
        dvalue = tl.zeros([COLUMNS, WIDTH], tl.float32)
        for up in range(0, length, ROWS):
            row = up + tl.arange(0, ROWS)
            inside = row < length
            spot = row[:, None] * (3 * HEADS * WIDTH) + width[None, :]
            flat = row[:, None] * (HEADS * WIDTH) + width[None, :]
            query = tl.load(qkv + spot, mask=inside[:, None], other=0.0)
            dout = tl.load(grad + flat, mask=inside[:, None], other=0.0)
            mixed = tl.load(out + flat, mask=inside[:, None], other=0.0)
            level = tl.load(lse + row, mask=inside, other=0.0)
            delta = tl.sum(dout.to(tl.float32) * mixed.to(tl.float32), 1)
            # transposed, keys down and queries across, so that weights feed the next product from registers
            weight = tl.exp2(tl.dot(key, tl.trans(query)) * scale - level[None, :])
            weight = tl.where(there[:, None], weight, 0.0)
            dweight = tl.dot(value, tl.trans(dout))
            if DROPPED > 0:
                kept = keeps_across(seed, (start + row) * HEADS + head, column, DROPPED)
                dvalue += tl.dot(tl.where(kept, weight * (1.0 / (1.0 - DROPPED / 4294967296)), 0.0).to(dout.dtype), dout)
                dweight = tl.where(kept, dweight * (1.0 / (1.0 - DROPPED / 4294967296)), 0.0)
            else:
                dvalue += tl.dot(weight.to(dout.dtype), dout)
            dscore = (weight * (dweight - delta[None, :])).to(query.dtype)
            dkey += tl.dot(dscore, query)
            dquery = tl.dot(tl.trans(dscore), key)
            # the same program adds up a query's gradient over the key tiles; the last tile writes it out
            if left > 0:
                dquery += tl.load(partial + flat, mask=inside[:, None], other=0.0)
            if left + COLUMNS < length:
                tl.store(partial + flat, dquery, mask=inside[:, None])
            else:
                tl.store(dqkv + spot, (dquery * slope).to(dqkv.dtype.element_ty), mask=inside[:, None])
        tl.store(dqkv + place + HEADS * WIDTH, (dkey * slope).to(dqkv.dtype.element_ty), mask=there[:, None])
        tl.store(dqkv + place + 2 * HEADS * WIDTH, dvalue.to(dqkv.dtype.element_ty), mask=there[:, None])
        tl.debug_barrier()  # partial sums written by one thread may be read by another in the next turn


@triton.jit(do_not_specialize=["seed"])
def _backward_queries(
    qkv, out, lse, grad, dqkv, delta, plan, seed, tokens, scale, slope,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(plan + tile * 3)
    length = tl.load(plan + tile * 3 + 1)
    first = tl.load(plan + tile * 3 + 2)
    if first >= length:
        return
    width = tl.arange(0, WIDTH)
    row = first + tl.arange(0, ROWS)
    inside = row < length
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    spot = row[:, None] * (3 * HEADS * WIDTH) + width[None, :]
    flat = (start + row).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + width[None, :]
    query = tl.load(qkv + spot, mask=inside[:, None], other=0.0)
    dout = tl.load(grad + flat, mask=inside[:, None], other=0.0)
    mixed = tl.load(out + flat, mask=inside[:, None], other=0.0)
    level = tl.load(lse + head.to(tl.int64) * tokens + start + row, mask=inside, other=0.0)
    sums = tl.sum(dout.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * tokens + start + row, sums, mask=inside)
    dquery = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(0, length, COLUMNS):
        column = step + tl.arange(0, COLUMNS)
        there = column < length
        place = column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
        key = tl.load(qkv + place + HEADS * WIDTH, mask=there[:, None], other=0.0)
        value = tl.load(qkv + place + 2 * HEADS * WIDTH, mask=there[:, None], other=0.0)
        weight = tl.exp2(tl.dot(query, tl.trans(key)) * scale - level[:, None])
        weight = tl.where(there[None, :], weight, 0.0)
        dweight = tl.dot(dout, tl.trans(value))
        if DROPPED > 0:
            kept = keeps(seed, (start + row) * HEADS + head, column, DROPPED)
            dweight = tl.where(kept, dweight * (1.0 / (1.0 - DROPPED / 4294967296)), 0.0)
        dquery += tl.dot((weight * (dweight - sums[:, None])).to(key.dtype), key)
    dqkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    tl.store(dqkv + spot, (dquery * slope).to(dqkv.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["seed"])
def _backward_keys(
    qkv, lse, grad, dqkv, delta, plan, seed, tokens, scale, slope,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(plan + tile * 3)
    length = tl.load(plan + tile * 3 + 1)
    first = tl.load(plan + tile * 3 + 2)
    if first >= length:
        return
    width = tl.arange(0, WIDTH)
    column = first + tl.arange(0, COLUMNS)
    there = column < length
    qkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    grad += start.to(tl.int64) * (HEADS * WIDTH) + head * WIDTH
    lse += head.to(tl.int64) * tokens + start
    delta += head.to(tl.int64) * tokens + start
    place = column[:, None] * (3 * HEADS * WIDTH) + width[None, :]
    key = tl.load(qkv + place + HEADS * WIDTH, mask=there[:, None], other=0.0)
    value = tl.load(qkv + place + 2 * HEADS * WIDTH, mask=there[:, None], other=0.0)
    dkey = tl.zeros([COLUMNS, WIDTH], tl.float32)
    dvalue = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for up in range(0, length, ROWS):
        row = up + tl.arange(0, ROWS)
        inside = row < length
        query = tl.load(
            qkv + row[:, None] * (3 * HEADS * WIDTH) + width[None, :], mask=inside[:, None], other=0.0
        )
        dout = tl.load(grad + row[:, None] * (HEADS * WIDTH) + width[None, :], mask=inside[:, None], other=0.0)
        level = tl.load(lse + row, mask=inside, other=0.0)
        sums = tl.load(delta + row, mask=inside, other=0.0)
        # transposed, keys down and queries across, so that weights feed the next product from registers
        weight = tl.exp2(tl.dot(key, tl.trans(query)) * scale - level[None, :])
        weight = tl.where(there[:, None], weight, 0.0)
        dweight = tl.dot(value, tl.trans(dout))
        if DROPPED > 0:
            kept = keeps_across(seed, (start + row) * HEADS + head, column, DROPPED)
            dvalue += tl.dot(tl.where(kept, weight * (1.0 / (1.0 - DROPPED / 4294967296)), 0.0).to(dout.dtype), dout)
            dweight = tl.where(kept, dweight * (1.0 / (1.0 - DROPPED / 4294967296)), 0.0)
        else:
            dvalue += tl.dot(weight.to(dout.dtype), dout)
        dkey += tl.dot((weight * (dweight - sums[None, :])).to(query.dtype), query)
    dqkv += start.to(tl.int64) * (3 * HEADS * WIDTH) + head * WIDTH
    tl.store(dqkv + place + HEADS * WIDTH, (dkey * slope).to(dqkv.dtype.element_ty), mask=there[:, None])
    tl.store(dqkv + place + 2 * HEADS * WIDTH, dvalue.to(dqkv.dtype.element_ty), mask=there[:, None])


def attend(
    qkv: Tensor, plan: Tiles, dropout: float, seed: int, save: bool, config: Config = FORWARD
) -> tuple[Tensor, Tensor]:
    """Attention of qkv [T, 3, heads, width] in half precision: [T, heads x width] and, if ``save``, [heads, T] lse.

    ``plan`` must come from ``tiles`` with the same ``config.rows``. ``dropout`` falls on the attention weights; the
    same ``seed`` drops the same ones.
    """
    tokens, _, heads, width = qkv.shape
    out = qkv.new_empty(tokens, heads * width)
    lse = torch.empty((heads, tokens) if save else (0,), dtype=torch.float32, device=qkv.device)
    _forward[(len(plan.forward) * heads,)](
        qkv, out, lse, plan.forward, seed, tokens, LOG2E * width**-0.5,
        HEADS=heads, WIDTH=width, ROWS=config.rows, COLUMNS=config.columns, DROPPED=dropped(dropout), SAVE=save,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, plan: Tiles, dropout: float, seed: int,
    config: Config = BACKWARD,
) -> Tensor:  # fmt: skip
    """The gradient of qkv, shaped like it, from that of ``attend``'s result and what ``attend`` returned."""
    tokens, _, heads, width = qkv.shape
    dqkv = torch.empty_like(qkv)
    partial = torch.empty_like(out, dtype=torch.float32)
    _backward[(len(plan.backward) * heads,)](
        qkv, out, lse, grad, dqkv, partial, plan.backward, seed, tokens, LOG2E * width**-0.5, width**-0.5,
        HEADS=heads, WIDTH=width, ROWS=config.rows, COLUMNS=config.columns, DROPPED=dropped(dropout),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return dqkv


def attend_backward2(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, plan_q, plan_k, dropout: float, seed: int,
    config_q: Config, config_k: Config,
) -> Tensor:  # fmt: skip
    tokens, _, heads, width = qkv.shape
    dqkv = torch.empty_like(qkv)
    delta = torch.empty_like(lse)
    shared = (seed, tokens, LOG2E * width**-0.5, width**-0.5)
    _backward_queries[(len(plan_q) * heads,)](
        qkv, out, lse, grad, dqkv, delta, plan_q, *shared,
        HEADS=heads, WIDTH=width, ROWS=config_q.rows, COLUMNS=config_q.columns, DROPPED=dropped(dropout),
        num_warps=config_q.warps, num_stages=config_q.stages,
    )  # fmt: skip
    _backward_keys[(len(plan_k) * heads,)](
        qkv, lse, grad, dqkv, delta, plan_k, *shared,
        HEADS=heads, WIDTH=width, ROWS=config_k.rows, COLUMNS=config_k.columns, DROPPED=dropped(dropout),
        num_warps=config_k.warps, num_stages=config_k.stages,
    )  # fmt: skip
    return dqkv
