"""Packed rows give what Hugging Face's own model gives on each sequence alone: logits, losses and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from app.errors import Fault
from app.train import packed, packed_attention

LIMIT = 24  # longest sequence in these tests


def small(task: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0, sizes: tuple[int, int] = (32, 64)):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=sizes[0],
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=sizes[1],
        max_position_embeddings=LIMIT,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    model = (BertForMaskedLM if task == "mlm" else BertForSequenceClassification)(config).to(dtype)
    for name, parameter in model.named_parameters():  # biases and norms away from 0 and 1, or mistakes there hide
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.3)
    return model.train()


def pack(task: str, lengths: list[int], total: int, seed: int = 0, types: bool = True) -> packed.PackedBatch:
    """A row of random sequences; the tokens left over are padding, in sequences of at most LIMIT tokens."""
    draw = torch.Generator().manual_seed(seed)
    used = sum(lengths)
    rest = total - used
    padding = [LIMIT] * (rest // LIMIT) + ([rest % LIMIT] if rest % LIMIT else [])
    ids = torch.randint(5, 50, (total,), generator=draw)
    ids[used:] = 0
    starts = torch.tensor([0, *lengths, *padding]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in (*lengths, *padding)])
    token_types = torch.randint(0, 2, (total,), generator=draw)
    if task == "mlm":
        chosen = torch.randperm(used, generator=draw)[: max(1, used // 4)]
        targets = torch.randint(5, 50, (len(chosen),), generator=draw)
    else:
        chosen = starts[: len(lengths)]
        targets = torch.randint(0, 3, (len(chosen),), generator=draw)
    spare = 3
    return packed.PackedBatch(
        input_ids=ids,
        position_ids=positions,
        token_type_ids=token_types if types else None,
        cu_seqlens=torch.cat((starts, starts.new_full((spare,), total))).int(),
        max_seqlen=LIMIT,
        target_positions=torch.cat((chosen, chosen.new_zeros(spare))),
        targets=torch.cat((targets, targets.new_full((spare,), -100))),
    )


def one_by_one(model, batch: packed.PackedBatch, lengths: list[int], task: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits at the targets and the summed loss from Hugging Face's forward on every sequence alone."""
    rows, start = [], 0
    for n in lengths:
        part = slice(start, start + n)
        types = None if batch.token_type_ids is None else batch.token_type_ids[None, part]
        rows.append(model(input_ids=batch.input_ids[None, part], token_type_ids=types).logits[0])
        start += n
    real = batch.targets != -100
    logits = torch.cat(rows)[batch.target_positions[real]] if task == "mlm" else torch.stack(rows)
    return logits, torch.nn.functional.cross_entropy(logits, batch.targets[real], reduction="sum")


def gradients(model, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("task", ["mlm", "classify"])
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, LIMIT), min_size=1, max_size=7), rest=st.integers(0, 40), types=st.booleans())
def test_equals_one_by_one(task: str, lengths: list[int], rest: int, types: bool) -> None:
    model = small(task)
    batch = pack(task, lengths, sum(lengths) + rest, types=types)
    logits_of = packed.mlm_logits if task == "mlm" else packed.classification_logits
    logits = logits_of(model, batch)
    expected, expected_loss = one_by_one(model, batch, lengths, task)
    real = batch.targets != -100
    assert real.sum() > 0
    torch.testing.assert_close(logits[real], expected)
    torch.testing.assert_close(packed.loss_sum(logits, batch.targets), expected_loss)
    got, want = gradients(model, packed.loss(model, batch)), gradients(model, expected_loss)
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("step", [1, 4, 64])
def test_block_widths_change_nothing(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The padded blocks that GPUs use (masks, empty slots) against one block a sequence."""
    lengths = [5, 24, 1, 9, 9, 17]
    model, batch = small("mlm"), pack("mlm", lengths, 80)
    _, expected_loss = one_by_one(model, batch, lengths, "mlm")
    want = gradients(model, expected_loss)
    made = packed_attention._Blocks
    monkeypatch.setattr(packed_attention, "_Blocks", lambda lengths, device, _: made(lengths, device, step))
    got = gradients(model, packed.loss(model, batch))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dropout", [0.0, 1e-12])
def test_dense_attention_sees_what_the_mask_shows(dropout: float) -> None:
    """Torch's attention, and the written-out one (dropout on a CPU, torch 1.13; next to no dropout drops nothing)."""
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 2, 4, 8, 16, dtype=torch.float64).unbind(0)
    lengths = [8, 3]
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None])[:, None, None]
    got = packed_attention._dense(query, key, value, mask, dropout)
    for place, n in enumerate(lengths):
        weights = (query[place] @ key[place, :, :n].transpose(1, 2) / 4).softmax(-1)
        torch.testing.assert_close(got[place], weights @ value[place, :, :n])


def test_no_token_sees_another_sequence() -> None:
    lengths = [6, 11, 3]
    model, batch = small("mlm"), pack("mlm", lengths, 24)
    with torch.no_grad():
        before = packed.encode(model.bert, batch)
        batch.input_ids[6:17] = torch.randint(5, 50, (11,))
        after = packed.encode(model.bert, batch)
    changed = (before != after).any(1)
    assert changed[6:17].all()
    assert not changed[:6].any()
    assert not changed[17:].any()


def test_padding_changes_nothing() -> None:
    lengths = [6, 11, 3]
    model = small("mlm")
    bare, padded = (pack("mlm", lengths, total) for total in (20, 90))
    padded.input_ids[:20], padded.token_type_ids[:20] = bare.input_ids, bare.token_type_ids
    padded.target_positions, padded.targets = bare.target_positions, bare.targets
    torch.testing.assert_close(packed.loss(model, bare), packed.loss(model, padded))


def test_lengths_on_the_host_change_nothing() -> None:
    model, batch = small("mlm"), pack("mlm", [6, 11, 3], 20)
    without = packed.loss(model, batch)
    batch.lengths = (6, 11, 3)
    torch.testing.assert_close(packed.loss(model, batch), without, rtol=0, atol=0)


def test_micro_batches_add_up() -> None:
    """Several backward passes give the gradient of the sum, so accumulation needs only one division an update."""
    model = small("mlm")
    batches = [pack("mlm", lengths, 40, seed) for seed, lengths in enumerate(([6, 11, 3], [24, 9]))]
    together = gradients(model, sum(packed.loss(model, b) for b in batches))
    model.zero_grad()
    for b in batches:
        packed.loss(model, b).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, together[name])


def test_dropout_is_honoured_and_repeatable() -> None:
    model, batch = small("mlm", torch.float32, dropout=0.2), pack("mlm", [6, 11, 3], 24)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(packed.loss(model, batch).item())
    assert losses[0] == losses[1] != losses[2]
    attention_only = small("mlm", torch.float32)
    for layer in attention_only.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    torch.manual_seed(1)
    first = packed.loss(attention_only, batch).item()
    assert first != packed.loss(attention_only, batch).item()
    model.eval()
    assert packed.loss(model, batch).item() == packed.loss(model, batch).item()


@pytest.mark.skipif(
    torch.__version__.startswith("1."), reason="torch 1.13: no layer norm of mixed types on the CPU, packed or not"
)
def test_bfloat16_autocast_is_close() -> None:
    model, batch = small("mlm", torch.float32), pack("mlm", [6, 11, 3, 20], 64)
    exact = packed.loss(copy.deepcopy(model).double(), batch)
    with torch.autocast("cpu", torch.bfloat16):
        value = packed.loss(model, batch)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=0.02, atol=0)
    value.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_only_unused_targets_give_zero() -> None:
    value = packed.loss_sum(torch.randn(4, 7, requires_grad=True), torch.full((4,), -100))
    value.backward()
    assert value.item() == 0.0


def test_models_it_cannot_run_are_refused() -> None:
    model = small("mlm")
    packed.check_model(model)
    model.config.is_decoder = True
    with pytest.raises(Fault, match="is_decoder is true"):
        packed.check_model(model)
    model.config.model_type = "roberta"
    with pytest.raises(Fault, match="'roberta', allowed is 'bert'"):
        packed.check_model(model)


def test_path_is_told_with_its_reason() -> None:
    model = small("mlm")
    assert packed.path(model, torch.float32) == "float32: Hugging Face's layers, dense attention"
    model.config.hidden_act = "relu"
    told = packed.path(model, torch.bfloat16)
    assert told.startswith("Hugging Face's layers, ")
    assert "hidden_act is relu" in told
