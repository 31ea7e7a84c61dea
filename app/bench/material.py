"""What all contenders are measured on: sequences of natural lengths with random tokens, and a model of the same shape.

Lengths are lognormal (median 110, sigma 0.75, 8 to 512 tokens), as sentences and paragraphs have them. Tokens are random:
speed does not depend on what they say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from app.train.batches import target_counts
from app.train.data import Split, TrainingData
from app.train.masking import Vocabulary
from app.train.tokenizers import BertTokenizer

VOCABULARY = 30592  #: BERT's 30,522 pieces, rounded up to a multiple of 128 for every contender
LONGEST = 512
MASK_FRACTION = 0.15
PAD, UNKNOWN, CLS, SEP, MASK = 0, 100, 101, 102, 103
FIRST_WORD = 999


@dataclass(frozen=True)
class Rows:
    """The part of ``app.train.store.Store`` that training reads, in memory."""

    lengths: np.ndarray
    labels: np.ndarray
    label_names: list[str] = field(default_factory=lambda: ["a", "b"])

    def __len__(self) -> int:
        return len(self.lengths)

    def one(self, row: int) -> np.ndarray:
        """The ids of one sequence, int64: the same whenever it is asked for."""
        ids = np.random.Generator(np.random.PCG64(row)).integers(FIRST_WORD, VOCABULARY, int(self.lengths[row]))
        ids[0], ids[-1] = CLS, SEP
        return ids

    def ids(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As ``Store.ids``: the sequences end to end, and their bounds."""
        bounds = np.concatenate([[0], np.cumsum(self.lengths[rows])])
        parts = [self.one(row) for row in rows.tolist()]
        return (np.concatenate(parts) if parts else np.zeros(0, np.int64)), bounds


@dataclass(frozen=True)
class Chains(Rows):
    """Rows that can be learnt: three times in four a token decides the next, by a fixed permutation of 400 tokens."""

    kinds: int = 400

    def one(self, row: int) -> np.ndarray:
        draw = np.random.Generator(np.random.PCG64([row, 2]))
        follows = np.random.Generator(np.random.PCG64(0)).permutation(self.kinds)
        count = int(self.lengths[row])
        ids, free = draw.integers(0, self.kinds, count), draw.random(count) < 0.25
        for place in range(1, count):
            if not free[place]:
                ids[place] = follows[ids[place - 1]]
        ids += FIRST_WORD
        ids[0], ids[-1] = CLS, SEP
        return ids


def rows(count: int, seed: int = 0) -> Rows:
    """``count`` sequences."""
    draw = np.random.Generator(np.random.PCG64(seed))
    lengths = np.clip(draw.lognormal(math.log(110), 0.75, count).astype(np.int64), 8, LONGEST)
    return Rows(lengths, draw.integers(0, 2, count).astype(np.int32))


def training_data(store: Rows, folder: Path, task: str, held_out: int = 0) -> TrainingData:
    """The rows as the trainer takes them for ``task``, the last ``held_out`` for evaluation.

    ``folder`` is an empty one that stands for the tokenizer's files.
    """
    special = np.zeros(VOCABULARY, bool)
    special[:FIRST_WORD] = True
    vocabulary = Vocabulary(VOCABULARY, MASK, special, np.zeros(VOCABULARY, bool))
    tokenizer = BertTokenizer(
        folder=folder, backend=None, pad=PAD, unk=UNKNOWN, cls=CLS, sep=SEP, mask=MASK,
        vocabulary=vocabulary, fingerprint="random tokens", model_max_length=LONGEST,
    )  # fmt: skip
    labels, edge = store.labels.astype(np.int64), len(store) - held_out
    train, other = (
        Split(store, part, labels)  # type: ignore[arg-type]
        for part in (np.arange(edge), np.arange(edge, len(store)))
    )
    names = store.label_names if task == "classify" else []
    return TrainingData(train, other if held_out else None, names, tokenizer, LONGEST, {}, {})


def masked(store: Rows, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids with BERT's masks and labels (-100 elsewhere) of one row, for trainers that mask in their collator."""
    ids = store.one(row)
    draw = np.random.Generator(np.random.PCG64([row, 1]))
    count = int(target_counts(np.array([len(ids)]), MASK_FRACTION)[0])
    chosen = draw.permutation(np.arange(1, len(ids) - 1))[:count]
    labels = np.full(len(ids), -100)
    labels[chosen] = ids[chosen]
    fate = draw.random(count)
    ids[chosen[fate < 0.8]] = MASK
    ids[chosen[fate > 0.9]] = draw.integers(FIRST_WORD, VOCABULARY, int((fate > 0.9).sum()))
    return ids, labels
