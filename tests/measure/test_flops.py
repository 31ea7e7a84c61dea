"""The formula against figures worked out elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.measure.flops import of_bert

BASE = SimpleNamespace(num_hidden_layers=12, hidden_size=768, intermediate_size=3072, vocab_size=30522, num_labels=2)
LARGE = SimpleNamespace(num_hidden_layers=24, hidden_size=1024, intermediate_size=4096, vocab_size=30522, num_labels=2)


@pytest.mark.parametrize(
    ("config", "length", "body", "with_head"),
    [(BASE, 128, 0.524, 0.668), (BASE, 512, 0.566, 0.710), (LARGE, 128, 1.850, 2.044), (LARGE, 512, 1.963, 2.157)],
)
def test_training_gflop_a_token(config: SimpleNamespace, length: int, body: float, with_head: float) -> None:
    """Per token of sequences of ``length``, without and with the MLM head on every position."""
    work = of_bert(config, "mlm")
    assert work.training(length, length**2, 0, 1) / length / 1e9 == pytest.approx(body, abs=6e-4)
    assert work.training(length, length**2, length, 1) / length / 1e9 == pytest.approx(with_head, abs=6e-4)
    assert work.inference(length, length**2, 0, 1) * 3 == work.training(length, length**2, 0, 1)
