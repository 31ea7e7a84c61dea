"""BERT over packed rows: sequences laid end to end in one row of tokens, none of which sees another sequence.

The functions here read the parameters of a plain Hugging Face BERT and give the same numbers as running it on each
sequence alone, without a padding token inside. The model itself is not changed, so it is saved and loaded as ever.

What a trainer must do:
    * fill a ``PackedBatch`` a row; its shapes are the same for every row of a run;
    * call ``loss`` (or a pair of the functions beneath it) inside ``torch.autocast`` and divide the sum by the number
      of targets of the whole update, all devices and micro-batches together;
    * with DDP, call it from the ``forward`` of the wrapped module, so that DDP sees the step begin.
    * for fp8, call ``use_fp8(model)`` once, after the model is on its GPU; it takes effect under fp16 autocast.
Several backward passes an update, loss scaling and DDP's hooks work as with any module: all gradients arrive through
autograd. Dropout draws from torch's generators only, so a restored generator state repeats it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.errors import WRONG_INPUT, Fault
from app.train import packed_attention, packed_fused
from app.train.packed_fused import use_fp8

__all__ = [
    "PackedBatch",
    "check_model",
    "classification_logits",
    "encode",
    "loss",
    "loss_sum",
    "mlm_logits",
    "path",
    "use_fp8",
]

IGNORED = -100  #: target of a padding position


@dataclass
class PackedBatch:
    """The tensors of one row of T tokens, all on one device."""

    input_ids: Tensor  #: [T] int64, 0 in the padding at the end
    position_ids: Tensor  #: [T] int64, from 0 again in each sequence
    token_type_ids: Tensor | None  #: [T] int64, or None where all are 0
    cu_seqlens: Tensor  #: [S+1] int32 starts of the sequences, then T until full; padding tokens are sequences too
    max_seqlen: int  #: no sequence is longer; the same for a whole run
    target_positions: Tensor  #: [M] int64; MLM: tokens to predict, 0 where unused; classification: first tokens
    targets: Tensor  #: [M] int64 token or class ids, -100 where unused
    lengths: tuple[int, ...] | None = None  #: the sequences' lengths on the host; spares the dense path a sync
    #: Layers before which the backward pass is cut: filled with what comes from below, and the same as it goes on above.
    cuts: dict[int, tuple[Tensor, Tensor] | None] | None = None
    seeds: Tensor | None = None  #: [layers + 1, 3] int32 of dropout masks; None: drawn when needed

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on another device. Copies to a GPU go through pinned memory and overlap with computing."""
        gpu = torch.device(device).type == "cuda"
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                if gpu and not value.is_cuda and not value.is_pinned():
                    value = value.pin_memory()
                moved[field.name] = value.to(device, non_blocking=True)
        return replace(self, **moved)


def check_model(model: Any) -> None:
    """Raises Fault where the model is not a BERT that packed rows can run (relative positions, a decoder)."""
    config = model.config
    kind = getattr(config, "position_embedding_type", "absolute")
    wrong = []
    if getattr(config, "model_type", None) != "bert":
        wrong.append(f"model_type is {getattr(config, 'model_type', None)!r}, allowed is 'bert'")
    if kind not in (None, "absolute"):
        wrong.append(f"position_embedding_type is {kind!r}, allowed is 'absolute'")
    if getattr(config, "is_decoder", False):
        wrong.append("is_decoder is true, allowed is false")
    if wrong:
        raise Fault(f"--padding packed cannot run this model: {'; '.join(wrong)}; use --padding dynamic", WRONG_INPUT)


def path(model: Any, dtype: torch.dtype) -> str:
    """How packed rows of this model run in ``dtype`` on its device, for a log line; says why where it is not the fastest."""
    device = next(model.parameters()).device
    if dtype not in packed_attention.HALF:
        return f"{str(dtype).removeprefix('torch.')}: Hugging Face's layers, dense attention"
    reason = packed_fused.unfit(getattr(model, "bert", model))
    if reason is None:
        return "hand-written kernels"
    kind = "FlashAttention" if packed_attention.has_flash(device, dtype) else "dense attention"
    return f"Hugging Face's layers, {kind} (no hand-written kernels: {reason})"


def encode(bert: Any, batch: PackedBatch) -> Tensor:
    """The last hidden states, [T, hidden], of a ``BertModel`` over the row."""
    if packed_fused.usable(bert):
        return packed_fused.encode(bert, batch)
    types = batch.token_type_ids if batch.token_type_ids is not None else torch.zeros_like(batch.input_ids)
    hidden = bert.embeddings(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], token_type_ids=types[None]
    )[0]
    plan = None
    for layer in bert.encoder.layer:
        own = layer.attention.self
        weight = torch.cat((own.query.weight, own.key.weight, own.value.weight))
        bias = torch.cat((own.query.bias, own.key.bias, own.value.bias))
        qkv = F.linear(hidden, weight, bias).unflatten(1, (3, own.num_attention_heads, own.attention_head_size))
        if plan is None:
            plan = packed_attention.plan(batch.cu_seqlens, batch.max_seqlen, batch.lengths, qkv)
        context = plan(qkv, own.dropout.p if own.training else 0.0)
        attended = layer.attention.output(context, hidden)
        hidden = layer.output(layer.intermediate(attended), attended)
    return hidden


def mlm_logits(model: Any, batch: PackedBatch) -> Tensor:
    """[M, vocabulary] logits of a ``BertForMaskedLM`` at the target positions only."""
    return model.cls(encode(model.bert, batch).index_select(0, batch.target_positions))


def classification_logits(model: Any, batch: PackedBatch) -> Tensor:
    """[M, labels] logits of a ``BertForSequenceClassification``, from the pooled first token of each sequence."""
    first = encode(model.bert, batch).index_select(0, batch.target_positions)
    return model.classifier(model.dropout(model.bert.pooler(first[:, None])))


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum (0-dim, float32 or wider) of the cross-entropy over the targets that are not -100."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")


def loss(model: Any, batch: PackedBatch) -> Tensor:
    """The summed loss of a masked-language or classification model over the row: what a trainer differentiates."""
    if not hasattr(model, "cls"):
        return loss_sum(classification_logits(model, batch), batch.targets)
    if packed_fused.usable(model.bert):
        return packed_fused.mlm_loss(model, batch)
    return loss_sum(mlm_logits(model, batch), batch.targets)
