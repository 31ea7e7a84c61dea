"""The packed forward and backward of BERT's encoder and vocabulary head, written out over Triton kernels and cuBLAS.

A layer is one autograd function: its backward pass is written by hand, so that residual gradients are summed inside
matrix products (with fp8 inside the kernels of the norms), bias gradients inside the kernels that have the numbers at
hand, and nothing is kept in float32.
Weights are cast to half precision once a forward pass, queries, keys and values in one matrix. Gradients reach the
model's own float32 parameters through autograd, so DDP, accumulation, clipping and loss scaling see nothing new.

With ``use_fp8`` eleven of a layer's twelve products run in 8 bits (``packed_products``), all but the weight gradient of
attention's output, which is too small to gain. The vocabulary head, norms and attention stay in fp16.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.errors import WRONG_MACHINE, Fault
from app.train.packed_attention import HALF
from app.train.packed_products import E4M3, E5M2, Weights, copies, input_gradient, linear, weight_gradient

VOCABULARY_STEP = 64  #: the head's half-precision copy is padded to a multiple of this many rows: aligned loads


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device, for a log line; None if they can. Compiles one to find out."""
    if device.type != "cuda":
        return f"they need a GPU, this is {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"they need compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    try:
        from app.train import kernels_rows

        with torch.cuda.device(device):
            kernels_rows.gelu(torch.zeros(16, device=device, dtype=torch.float16))
    except Exception as error:  # Triton missing, no C compiler, a driver too old for its machine code: reported
        return f"Triton cannot build them here ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    return None


def half_type(parameter: Tensor) -> torch.dtype | None:
    """The half precision that a matrix product of this parameter would run in now, None where it would not."""
    if parameter.dtype in HALF:
        return parameter.dtype
    if torch.is_autocast_enabled() and parameter.is_cuda and parameter.dtype == torch.float32:
        if hasattr(torch, "get_autocast_dtype"):
            return torch.get_autocast_dtype("cuda")
        return torch.get_autocast_gpu_dtype()
    return None


def unfit(bert: Any) -> str | None:
    """Why ``encode`` here cannot run this ``BertModel`` on its device in half precision; None if it can."""
    config = bert.config
    width = config.hidden_size // config.num_attention_heads
    if config.hidden_act != "gelu":
        return f"hidden_act is {config.hidden_act}, the kernels have gelu"
    if width not in (16, 32, 64, 128):
        return f"heads are {width} wide, the kernels have 16, 32, 64 and 128"
    if config.hidden_size % 16 or config.intermediate_size % 16 or config.hidden_size > 4096:
        return "hidden sizes are not multiples of 16, or over 4096"
    return why_not(bert.embeddings.word_embeddings.weight.device)


def usable(bert: Any) -> bool:
    """Whether ``encode`` here can run this model now: it fits, and it is in half precision or under autocast."""
    return half_type(bert.embeddings.word_embeddings.weight) is not None and unfit(bert) is None


class _Run(NamedTuple):
    """What all layers of a forward pass share."""

    plan: Any
    heads: int
    eps: float
    dropout: float
    attention_dropout: float
    seeds: Tensor  #: [3] int32: of attention and of the two norms
    save: bool
    fp8: bool


def draw_seeds(bert: Any) -> Tensor:
    """[layers + 1, 3] int32 seeds of a forward pass's dropout masks, on the host; the last line is the embeddings'.

    From torch's CPU generator: no wait for the device, and the same generator state draws the same seeds.
    """
    count = len(bert.encoder.layer) + 1
    return (torch.randint(2**31 - 8, (count, 1)) + torch.arange(3)).int()


def _layer_forward(
    h: Tensor, h8: Tensor, w: Weights, norms: tuple[Tensor, ...], run: _Run
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The layer's result, the same in 8 bits if ``run.fp8``, and what its backward pass needs."""
    from app.train import kernels_attention, kernels_rows

    def chosen(half: Tensor, eight: Tensor) -> Tensor:
        return eight if run.fp8 else half

    source = chosen(h, h8)
    qkv = linear(source, w.qkv, w.qkv_bias).view(len(h), 3, run.heads, -1)
    context, context8, lse = kernels_attention.attend(
        qkv, run.plan, run.attention_dropout, run.seeds[0], run.save, run.fp8
    )
    x = linear(chosen(context, context8), w.attended, w.attended_bias, kernels_attention.CONTEXT_SCALE.value)
    y, y8, z1, mean1, rstd1 = kernels_rows.norm(
        x, h, norms[0], norms[1], run.eps, run.dropout, run.seeds[1], run.save, run.fp8
    )
    middle = chosen(y, y8)
    u = linear(middle, w.up, w.up_bias)
    a = kernels_rows.gelu(u, E4M3 if run.fp8 else None)
    x = linear(a, w.down, w.down_bias)
    result, result8, z2, mean2, rstd2 = kernels_rows.norm(
        x, y, norms[2], norms[3], run.eps, run.dropout, run.seeds[2], run.save, run.fp8
    )
    return result, result8, (source, qkv, context, lse, z1, mean1, rstd1, middle, u, a, z2, mean2, rstd2)


class _Layer(torch.autograd.Function):
    """One encoder layer. The 16 parameters are in the order of ``_parameters``.

    A product in 8 bits cannot add to what is there. So the gradient of ``h`` has two summands, which the kernel that
    reads them adds up: ``twin`` has no values, only the gradient that is to be added to that of ``h``.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, twin: Tensor, h8: Tensor, w: Weights, run: _Run, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        norms = (*parameters[8:10], *parameters[14:16])
        result, result8, saved = _layer_forward(h, h8, w, norms, run)
        ctx.save_for_backward(*saved, norms[0], norms[2], w.qkv, w.attended, w.up, w.down)
        ctx.run = run
        ctx.types = [p.dtype for p in parameters]
        return _with_copies(ctx, result, result8, run.fp8)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from app.train import kernels_attention, kernels_rows

        dresult, dtwin, _ = gradients
        assert dresult is not None
        run, saved = ctx.run, ctx.saved_tensors
        (source, qkv, context, lse, z1, mean1, rstd1, middle, u, a, z2, mean2, rstd2) = saved[:13]
        g1, g2, wqkv, wattended, wup, wdown = saved[13:]
        fp8, half = run.fp8, dresult.dtype
        dy, dx, dx8, sums2 = kernels_rows.norm_backward(
            dresult.contiguous(),
            z2,
            mean2,
            rstd2,
            g2,
            run.dropout,
            0.0,
            run.seeds[2],
            more=dtwin,
            half=not fp8,
            eight=fp8,
        )
        dx = dx8 if fp8 else dx
        dwdown = weight_gradient(dx, a)
        du, dup = kernels_rows.gelu_backward(input_gradient(dx, wdown, half), u, E5M2 if fp8 else None)
        dwup = weight_gradient(du, middle)
        more = None
        if fp8:
            more = input_gradient(du, wup, half)
        else:  # without dropout dx is dy; it has been used
            dy.addmm_(du, wup)
        dh, dx, dx8, sums1 = kernels_rows.norm_backward(
            dy, z1, mean1, rstd1, g1, run.dropout, 0.0, run.seeds[1], more=more, eight=fp8
        )
        dwattended = weight_gradient(dx, context)
        dqkv, dbqkv = kernels_attention.attend_backward(
            input_gradient(dx8 if fp8 else dx, wattended, half),
            qkv, context, lse, run.plan, run.attention_dropout, run.seeds[0], fp8,
        )  # fmt: skip
        dqkv = dqkv.flatten(1)
        dwqkv = weight_gradient(dqkv, source)
        dtwin = None
        if fp8:
            dtwin = input_gradient(dqkv, wqkv, half)
            if not ctx.needs_input_grad[1]:
                dh += dtwin
        else:
            dh.addmm_(dqkv, wqkv)
        weights, biases = dwqkv.chunk(3), dbqkv.chunk(3)
        grads = [
            *(part for pair in zip(weights, biases, strict=True) for part in pair),
            dwattended, sums1[2], sums1[0], sums1[1],
            dwup, dup, dwdown, sums2[2], sums2[0], sums2[1],
        ]  # fmt: skip
        return dh, dtwin, None, None, None, *(g.to(t) for g, t in zip(grads, ctx.types, strict=True))


def _with_copies(ctx: Any, result: Tensor, result8: Tensor, fp8: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer or the embeddings hand on: the result, with fp8 its ``twin`` and its 8-bit copy, else two empty ones."""
    twin = result.new_empty(()).expand_as(result) if fp8 else result.new_empty(0)
    if not fp8:
        result8 = result.new_empty(0)
    ctx.mark_non_differentiable(result8)
    ctx.set_materialize_grads(False)  # nothing asks for the gradient of the 8-bit copy, and not always of the twin
    return result, twin, result8


def _parameters(layer: Any) -> list[Tensor]:
    own, out = layer.attention.self, layer.attention.output
    modules = (
        own.query, own.key, own.value, out.dense, out.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
    )  # fmt: skip
    return [p for m in modules for p in (m.weight, m.bias)]


class _Embed(torch.autograd.Function):
    """Embeddings, norm and dropout."""

    @staticmethod
    def forward(
        ctx: Any, rows: tuple[Tensor, Tensor, Tensor | None], options: tuple[float, float, Tensor, torch.dtype, int, bool],
        words: Tensor, positions: Tensor, types: Tensor, weight: Tensor, bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from app.train import kernels_rows

        eps, dropout, seed, dtype, padding, fp8 = options
        y, y8, z, mean, rstd = kernels_rows.embed(
            *rows, (words, positions, types), weight, bias, eps, dropout, seed, True, dtype, fp8
        )
        ctx.save_for_backward(z, mean, rstd, weight, *rows)
        ctx.options = (dropout, seed, padding, len(words), len(positions), len(types), words.dtype, weight.dtype)
        return _with_copies(ctx, y, y8, fp8)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from app.train import kernels_rows

        dy, dtwin, _ = gradients
        assert dy is not None
        z, mean, rstd, weight, ids, positions, types = ctx.saved_tensors
        dropout, seed, padding, words, places, kinds, dtype, norm_type = ctx.options
        dz, _, _, sums = kernels_rows.norm_backward(
            dy.contiguous(), z, mean, rstd, weight, 0.0, dropout, seed, torch.float32, more=dtwin
        )
        table = torch.ops.aten.embedding_dense_backward
        dwords = table(dz, ids, words, padding, False).to(dtype)
        dplaces = table(dz, positions, places, -1, False)
        if types is None:
            dtypes = F.pad(dplaces.sum(0)[None], (0, 0, 0, kinds - 1))
        else:
            dtypes = table(dz, types, kinds, -1, False)
        return None, None, dwords, dplaces.to(dtype), dtypes.to(dtype), sums[0].to(norm_type), sums[1].to(norm_type)


def encode(bert: Any, batch: Any) -> Tensor:
    """As ``packed.encode``, in half precision; only where ``usable``."""
    from app.train import kernels_attention, kernels_rows

    config, table = bert.config, bert.embeddings
    words = table.word_embeddings.weight
    dtype = half_type(words)
    assert dtype is not None
    save = torch.is_grad_enabled()
    dropout, attention = (config.hidden_dropout_prob, config.attention_probs_dropout_prob) if bert.training else (0, 0)
    dropout, attention = float(dropout), float(attention)
    seeds = batch.seeds
    if seeds is None:
        drops = dropout or attention
        seeds = draw_seeds(bert) if drops else torch.zeros(len(bert.encoder.layer) + 1, 3, dtype=torch.int32)
        seeds = seeds.to(words.device, non_blocking=True)
    rows = (batch.input_ids, batch.position_ids, batch.token_type_ids)
    tables = (words, table.position_embeddings.weight, table.token_type_embeddings.weight)
    norm = (table.LayerNorm.weight, table.LayerNorm.bias)
    padding = -1 if table.word_embeddings.padding_idx is None else table.word_embeddings.padding_idx
    fp8 = dtype == torch.float16 and getattr(bert, "_packed_fp8", False)
    if save:
        options = (config.layer_norm_eps, dropout, seeds[-1, 0], dtype, padding, fp8)
        hidden, twin, hidden8 = _Embed.apply(rows, options, *tables, *norm)
    else:
        hidden, hidden8, *_ = kernels_rows.embed(
            *rows, tables, *norm, config.layer_norm_eps, dropout, seeds[-1, 0], False, dtype, fp8
        )
    plan = kernels_attention.plan(batch.cu_seqlens, len(batch.input_ids))
    weights = copies(bert.encoder.layer, dtype, fp8)
    for place, (layer, own_weights, own_seeds) in enumerate(zip(bert.encoder.layer, weights, seeds, strict=False)):
        if batch.cuts is not None and place in batch.cuts:
            below, hidden, twin = hidden, hidden.detach().requires_grad_(), twin.detach()
            batch.cuts[place] = below, hidden
        run = _Run(plan, config.num_attention_heads, config.layer_norm_eps, dropout, attention, own_seeds, save, fp8)
        parameters = _parameters(layer)
        if save:
            hidden, twin, hidden8 = _Layer.apply(hidden, twin, hidden8, own_weights, run, *parameters)
        else:
            norms = (*parameters[8:10], *parameters[14:16])
            hidden, hidden8, _ = _layer_forward(hidden, hidden8, own_weights, norms, run)
    return hidden


def why_not_fp8(device: torch.device) -> str | None:
    """Why products in 8 bits cannot run on this device; None if they can."""
    if reason := why_not(device):
        return reason
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"they need compute capability 8.9, {torch.cuda.get_device_name(device)} has less"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        return f"they need torch 2.8, this is {torch.__version__}"
    return None


def use_fp8(model: Any, on: bool = True) -> None:
    """Lets the layers of a BERT with a head run their products in 8 bits under fp16 autocast and a loss scale.

    Set on the module in memory, never saved. Raises Fault where torch or the GPU has no such products.
    """
    if on and (reason := why_not_fp8(model.bert.embeddings.word_embeddings.weight.device)):
        raise Fault(f"products in 8 bits cannot run here: {reason}; train in fp16 or bf16", WRONG_MACHINE)
    model.bert._packed_fp8 = on


class _Head(torch.autograd.Function):
    """Decoder and summed cross-entropy; the float32 logits and their gradient never exist."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, targets: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        from app.train import kernels_entropy

        vocabulary = len(weight)
        padded = -(-vocabulary // VOCABULARY_STEP) * VOCABULARY_STEP
        matrix = F.pad(weight.to(h.dtype), (0, 0, 0, padded - vocabulary))
        logits = torch.addmm(F.pad(bias.to(h.dtype), (0, padded - vocabulary)), h, matrix.t())
        losses, lse = kernels_entropy.entropy(logits, targets, vocabulary)
        ctx.save_for_backward(h, targets, matrix, logits, lse)
        ctx.types = (vocabulary, weight.dtype, bias.dtype)
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from app.train import kernels_entropy

        (grad,) = gradients
        h, targets, matrix, logits, lse = ctx.saved_tensors
        vocabulary, weight_type, bias_type = ctx.types
        dlogits = kernels_entropy.entropy_backward(logits, targets, lse, grad, vocabulary)
        dweight = weight_gradient(dlogits, h)[:vocabulary].to(weight_type)
        dbias = dlogits.sum(0, dtype=torch.float32)[:vocabulary].to(bias_type)
        return dlogits @ matrix, None, dweight, dbias


def mlm_loss(model: Any, batch: Any) -> Tensor:
    """The summed masked-language loss of the row; only where ``usable``."""
    head = model.cls.predictions
    chosen = encode(model.bert, batch).index_select(0, batch.target_positions)
    dtype = chosen.dtype
    return _Head.apply(head.transform(chosen).to(dtype), batch.targets, head.decoder.weight, head.decoder.bias)
