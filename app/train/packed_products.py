"""The matrix products of an encoder layer, in half precision or in 8 bits, by the type of what they are given.

In 8 bits activations and weights are e4m3, gradients e5m2 (Micikevicius et al. 2022, arXiv 2209.05433), with fixed
scales: what comes from a norm or GELU needs none, attention's means of values are taken eight times, weights 64 times,
and e5m2 has the range of fp16, in which the trainer's loss scale already keeps gradients. So fp8 has no state. Hopper's
faster sums of fewer bits serve where the sum is over a layer's width; over the tokens of a row they would err by 0.6 %
(65,280 tokens, H200), so weight gradients are summed in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

WEIGHT_SCALE = 64.0  #: of weights in e4m3: those of 0.02 become 1.3, the largest that fits is 7
#: None in torch 1.13, which has no 8-bit types
E4M3, E5M2 = getattr(torch, "float8_e4m3fn", None), getattr(torch, "float8_e5m2", None)


class Weights(NamedTuple):
    """A layer's matrices, in half precision or times ``WEIGHT_SCALE`` in e4m3, and their biases in half precision."""

    qkv: Tensor
    attended: Tensor
    up: Tensor
    down: Tensor
    qkv_bias: Tensor
    attended_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor


def copies(layers: Any, dtype: torch.dtype, fp8: bool) -> list[Weights]:
    """Copies of all layers' matrices and biases, each kind in one allocation: in ``dtype``, the matrices with ``fp8`` in 8 bits."""
    groups = []
    for layer in layers:
        own, out = layer.attention.self, layer.attention.output.dense
        groups += [[own.query, own.key, own.value], [out], [layer.intermediate.dense], [layer.output.dense]]
    kinds = [
        [[m.weight for m in group] for group in groups],
        [[m.bias for m in group] for group in groups],
    ]
    flat, biases = (_side_by_side(kind, dtype) for kind in kinds)
    if fp8:
        from app.train import kernels_eight

        flat = kernels_eight.eight_bits(flat, WEIGHT_SCALE)
    views = []
    for kind, held in zip(kinds, (flat, biases), strict=True):
        parts = held.split([sum(t.numel() for t in group) for group in kind])
        views.append([part.view(-1, *group[0].shape[1:]) for part, group in zip(parts, kind, strict=True)])
    return [Weights._make(views[0][k : k + 4] + views[1][k : k + 4]) for k in range(0, len(groups), 4)]


@torch.no_grad()
def _side_by_side(groups: list[list[Tensor]], dtype: torch.dtype) -> Tensor:
    tensors = [tensor for group in groups for tensor in group]
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
    places = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_([place.view(t.shape) for place, t in zip(places, tensors, strict=True)], tensors)
    return flat


@functools.cache
def _scale(device: torch.device, value: float) -> Tensor:
    """A scale as products in 8 bits take it."""
    return torch.full((), value, device=device)


def _product8(x: Tensor, y: Tensor, scale: float, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """x y^T, times ``scale``, + bias, of 8-bit matrices."""
    scales = {"scale_a": _scale(x.device, 1.0), "scale_b": _scale(x.device, scale)}
    fast = dtype != torch.float32
    return torch._scaled_mm(x, y.t(), bias=bias, out_dtype=dtype, use_fast_accum=fast, **scales)


def linear(x: Tensor, weight: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """x weight^T + bias in half precision; in 8 bits x may have a ``scale`` to undo."""
    if weight.dtype == E4M3:
        return _product8(x, weight, 1 / (WEIGHT_SCALE * scale), bias.dtype, bias)
    return torch.addmm(bias, x, weight.t())


def input_gradient(dy: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """dy weight in half precision."""
    from app.train import kernels_eight

    if weight.dtype == E4M3:
        return _product8(dy, kernels_eight.turned(weight), 1 / WEIGHT_SCALE, dtype)
    return dy @ weight


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x, in float32 as it is accumulated where torch can (2.8, on a GPU): no rounding, no cast."""
    from app.train import kernels_eight

    if dy.dtype == E5M2:
        return _product8(kernels_eight.turned(dy), kernels_eight.turned(x), 1.0, torch.float32)
    if dy.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    return dy.t() @ x
