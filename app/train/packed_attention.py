"""Attention inside each sequence of a packed row, by what the machine has.

``flash``: torch's own variable-length FlashAttention, on GPUs from compute capability 8.0 in half precision.
``dense``: everywhere else. Sequences of like length are gathered into padded blocks, padding masked out. On the CPU
only sequences of the same length share a block, so there is no padding at all.
Both are differentiable, keep no state and give what attention over each sequence alone gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: qkv [T, 3, heads, width] and the dropout of the attention weights, to [T, heads x width]
Attention = Callable[[Tensor, float], Tensor]
HALF = (torch.float16, torch.bfloat16)
STEP = 64  #: on a GPU a block's width is a multiple of this many tokens: few blocks, little padding


def plan(cu_seqlens: Tensor, max_seqlen: int, lengths: tuple[int, ...] | None, qkv: Tensor) -> Attention:
    """Chooses how to attend for these sequences and a projection like ``qkv``; made once a row, used by every layer.

    The dense kind must know the lengths on the host: without ``lengths`` it waits for the device once.
    """
    if has_flash(qkv.device, qkv.dtype) and qkv.shape[-1] % 8 == 0 and qkv.shape[-1] <= 256:
        return lambda qkv, dropout: _flash(qkv, cu_seqlens, max_seqlen, dropout)
    if lengths is None:
        lengths = tuple(cu_seqlens.diff().tolist())
    blocks = _Blocks(lengths, qkv.device, STEP if qkv.is_cuda else 1)
    return blocks.attend


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length FlashAttention runs here (torch 2.4 or later, compute capability 8.0, half)."""
    if device.type != "cuda" or dtype not in HALF or not hasattr(torch.ops.aten, "_flash_attention_forward"):
        return False
    arguments = [a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    return (
        arguments[:5] == ["query", "key", "value", "cum_seq_q", "cum_seq_k"]
        and "scale" in arguments
        and (torch.cuda.get_device_capability(device) >= (8, 0))
    )


def _flash(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout: float) -> Tensor:
    query, key, value = qkv.unbind(1)
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout, False, False, scale=None
    )[0]
    return out.flatten(1)


class _Blocks:
    """Sequences gathered into blocks of one width each."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device, step: int) -> None:
        members: dict[int, list[tuple[int, int]]] = {}
        start = 0
        for length in lengths:
            if length:
                members.setdefault(-(-length // step) * step, []).append((start, length))
            start += length
        self.shapes: list[tuple[int, int]] = []
        self.masks: list[Tensor | None] = []
        slots = []
        for width, sequences in members.items():
            starts, sizes = torch.tensor(sequences).unbind(1)
            offset = torch.arange(width)
            inside = offset < sizes[:, None]
            slots.append(torch.where(inside, starts[:, None] + offset, -1).flatten())
            self.shapes.append((len(sequences), width))
            self.masks.append(None if bool(inside.all()) else inside[:, None, None].to(device, non_blocking=True))
        slot_token = torch.cat(slots)
        filled = (slot_token >= 0).nonzero().flatten()
        token_slot = torch.empty(start, dtype=torch.long)
        token_slot[slot_token[filled]] = filled
        in_order = len(filled) == len(slot_token) and bool((token_slot == torch.arange(start)).all())
        #: token of each slot, slot of each token, slots that hold none; None where the row already is in block order
        self.order = (
            None
            if in_order
            else tuple(
                index.to(device, non_blocking=True) for index in (slot_token.clamp(min=0), token_slot, slot_token < 0)
            )
        )
        self.padded = len(filled) < len(slot_token)

    def attend(self, qkv: Tensor, dropout: float) -> Tensor:
        row = qkv.flatten(1)
        if self.order is not None:
            row = _Gather.apply(row, self.order)
        parts = row.split([count * width for count, width in self.shapes])
        outs = []
        for part, (count, width), mask in zip(parts, self.shapes, self.masks, strict=True):
            query, key, value = part.view(count, width, *qkv.shape[1:]).permute(2, 0, 3, 1, 4).unbind(0)
            outs.append(_dense(query, key, value, mask, dropout).transpose(1, 2).reshape(count * width, -1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self.order is None else _Scatter.apply(out, self.order, self.padded)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Attention of [count, heads, width, head width] tensors; ``mask`` is true where a key may be seen."""
    if hasattr(F, "scaled_dot_product_attention") and (query.is_cuda or not dropout):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
    return weights.to(value.dtype) @ value


class _Gather(torch.autograd.Function):
    """Tokens to slots. Both directions are plain gathers: faster and repeatable, unlike a summing scatter."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, order: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        slot_token, token_slot, _ = order
        ctx.save_for_backward(token_slot)
        return row.index_select(0, slot_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        return grad.index_select(0, ctx.saved_tensors[0]), None


class _Scatter(torch.autograd.Function):
    """Slots back to tokens; the empty slots get no gradient."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, order: tuple[Tensor, Tensor, Tensor], padded: bool) -> Tensor:
        slot_token, token_slot, empty = order
        ctx.save_for_backward(slot_token, empty)
        ctx.padded = padded
        return slots.index_select(0, token_slot)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        slot_token, empty = ctx.saved_tensors
        slots = grad.index_select(0, slot_token)
        return (slots.masked_fill(empty[:, None], 0) if ctx.padded else slots), None, None
