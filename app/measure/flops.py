"""Floating-point operations that BERT must do on real tokens: the numerator of MFU.

A product of an m x k and a k x n matrix is 2mkn operations; the backward pass costs twice the forward. The layer's products are
4H^2 + 2HI weights a token, attention is 4H operations for each pair of tokens of a sequence, the MLM head H^2 + HV weights a predicted token.
As in the appendix of PaLM (Chowdhery et al. 2022), without embeddings, norms, softmax, recomputation or padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """Operations of a forward pass, by what they grow with."""

    a_token: float
    a_square: float  # for each pair of tokens in a sequence
    a_target: float
    a_sequence: float

    def training(self, tokens: int, squares: int, targets: int, sequences: int) -> float:
        """Operations to train on so many real tokens, sum of squared lengths, predicted tokens and sequences."""
        return 3 * (
            self.a_token * tokens + self.a_square * squares + self.a_target * targets + self.a_sequence * sequences
        )

    def inference(self, tokens: int, squares: int, targets: int, sequences: int) -> float:
        return self.training(tokens, squares, targets, sequences) / 3


def of_bert(config: Any, task: str) -> Work:
    """The work of a Hugging Face BertConfig for ``task`` classify or mlm."""
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    a_token = 2.0 * layers * (4 * hidden**2 + 2 * hidden * inner)
    a_square = 4.0 * layers * hidden
    if task == "mlm":
        return Work(a_token, a_square, 2.0 * (hidden**2 + hidden * config.vocab_size), 0.0)
    return Work(a_token, a_square, 0.0, 2.0 * (hidden**2 + hidden * config.num_labels))
