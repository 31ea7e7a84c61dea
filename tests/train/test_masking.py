"""Masks depend on seed, epoch, row and position alone, and follow BERT's 80/10/10."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.train.batches import target_counts
from app.train.masking import Masking, Vocabulary

SIZE = 500
VOCABULARY = Vocabulary(SIZE, 4, np.isin(np.arange(SIZE), [0, 2, 3, 4]), np.arange(SIZE) >= 350)


def sequences(lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    parts = [np.concatenate([[2], draw.integers(5, SIZE, n - 2), [3]]) for n in lengths]
    return np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(3, 60), min_size=1, max_size=20), st.booleans(), st.integers(0, 2**31 - 1))
def test_the_batch_does_not_matter(lengths: list[int], whole_words: bool, seed: int) -> None:
    masking = Masking(VOCABULARY, 0.15, whole_words, seed)
    ids, starts = sequences(lengths)
    rows = np.arange(len(lengths)) * 7 + 3
    together, chosen = masking.apply(ids, starts, rows, 5)
    for i in range(len(lengths)):
        part = slice(starts[i], starts[i + 1])
        alone, positions = masking.apply(ids[part], np.array([0, lengths[i]]), rows[i : i + 1], 5)
        assert alone.tolist() == together[part].tolist()
        assert (positions + starts[i]).tolist() == chosen[(chosen >= starts[i]) & (chosen < starts[i + 1])].tolist()
    per_sequence = np.histogram(chosen, starts)[0]
    assert (per_sequence >= 1).all() and (per_sequence <= target_counts(np.array(lengths), 0.15)).all()
    assert not VOCABULARY.special[ids[chosen]].any()
    untouched = np.setdiff1d(np.arange(len(ids)), chosen)
    assert (together[untouched] == ids[untouched]).all()


def test_eighty_ten_ten() -> None:
    ids, starts = sequences([512] * 400)
    masked, chosen = Masking(VOCABULARY, 0.15, False, 0).apply(ids, starts, np.arange(400), 0)
    assert len(chosen) == 400 * 76
    masks, kept = (masked[chosen] == 4).mean(), (masked[chosen] == ids[chosen]).mean()
    assert masks == pytest.approx(0.8, abs=0.01) and kept == pytest.approx(0.1, abs=0.01)
    assert not VOCABULARY.special[masked[chosen][masked[chosen] != 4]].any()


def test_whole_words_are_masked_whole() -> None:
    ids, starts = sequences([200] * 20)
    _, chosen = Masking(VOCABULARY, 0.15, True, 0).apply(ids, starts, np.arange(20), 0)
    picked = np.zeros(len(ids), bool)
    picked[chosen] = True
    continues = VOCABULARY.continues[ids]
    joined = np.flatnonzero(continues[1:] & ~np.isin(ids[:-1], [2])) + 1
    assert len(joined) > 100
    assert (picked[joined] == picked[joined - 1]).all()


def test_epochs_and_seeds_differ() -> None:
    ids, starts = sequences([300])
    first = Masking(VOCABULARY, 0.15, False, 0).apply(ids, starts, np.array([0]), 0)[1].tolist()
    assert first != Masking(VOCABULARY, 0.15, False, 0).apply(ids, starts, np.array([0]), 1)[1].tolist()
    assert first != Masking(VOCABULARY, 0.15, False, 1).apply(ids, starts, np.array([0]), 0)[1].tolist()
