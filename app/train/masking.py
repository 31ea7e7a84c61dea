"""Which tokens of a sequence are masked: a function of seed, epoch, row and position, whatever batch the sequence is in.

BERT's recipe (Devlin et al. 2019, section 3.1): of the chosen tokens 80 % become [MASK], 10 % a random token, 10 % stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.train.batches import target_counts

_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): 64 well-mixed bits from a counter."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Vocabulary:
    """What masking must know of the tokenizer. ``continues[id]``: the piece goes on with the word before it (##...)."""

    size: int
    mask: int
    special: np.ndarray  # bool [size]
    continues: np.ndarray  # bool [size]


@dataclass(frozen=True)
class Masking:
    """Settings of a run. ``whole_words``: all pieces of a word are chosen together."""

    vocabulary: Vocabulary
    fraction: float
    whole_words: bool
    seed: int

    def apply(self, ids: np.ndarray, starts: np.ndarray, rows: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Mask sequences that lie end to end.

        ``ids`` int64 [tokens]; ``starts`` int64 [sequences + 1], the bounds of the sequences; ``rows`` int64 [sequences], their row numbers in
        the data set. Returns the masked ids and the chosen positions in rising order. Of n tokens between [CLS] and [SEP],
        ``target_counts`` are chosen; with whole words as many whole words as fit into that number, and at least one.
        """
        lengths = np.diff(starts)
        with np.errstate(over="ignore"):
            base = _mix(rows.astype(np.uint64) * _STEP + np.uint64(self.seed) + (np.uint64(epoch + 1) << np.uint64(32)))
            within = (np.arange(len(ids)) - np.repeat(starts[:-1], lengths)).astype(np.uint64)
            draw = _mix(np.repeat(base, lengths) + within * _STEP)
        sequence = np.repeat(np.arange(len(rows)), lengths)
        free = ~self.vocabulary.special[ids]
        counts = target_counts(lengths, self.fraction)
        chosen = (
            self._words(ids, sequence, free, draw, counts)
            if self.whole_words
            else self._tokens(sequence, free, draw, counts)
        )
        masked = ids.copy()
        # A second draw for each token, independent of the one that chose it.
        second = _mix(draw + _STEP)
        kind = (second[chosen] >> np.uint64(40)).astype(np.float64) / 2**24
        masked[chosen[kind < 0.8]] = self.vocabulary.mask
        swapped = chosen[(kind >= 0.8) & (kind < 0.9)]
        ordinary = np.flatnonzero(~self.vocabulary.special)
        masked[swapped] = ordinary[_mix(second[swapped]) % np.uint64(len(ordinary))]
        return masked, chosen

    def _tokens(self, sequence: np.ndarray, free: np.ndarray, draw: np.ndarray, counts: np.ndarray) -> np.ndarray:
        candidates = np.flatnonzero(free)
        ranked = candidates[np.lexsort((draw[candidates], sequence[candidates]))]
        return np.sort(ranked[_rank(sequence[ranked]) < counts[sequence[ranked]]])

    def _words(
        self, ids: np.ndarray, sequence: np.ndarray, free: np.ndarray, draw: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        candidates = np.flatnonzero(free)
        if not len(candidates):
            return candidates
        follows = np.zeros(len(candidates), bool)
        follows[1:] = (np.diff(candidates) == 1) & self.vocabulary.continues[ids[candidates[1:]]]
        word = np.cumsum(~follows) - 1
        firsts = candidates[~follows]
        sizes = np.bincount(word)
        ranked = np.lexsort((draw[firsts], sequence[firsts]))
        owner = sequence[firsts[ranked]]
        before = np.cumsum(sizes[ranked]) - sizes[ranked]
        begins = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
        spans = np.diff(np.append(begins, len(owner)))
        reached = before - np.repeat(before[begins], spans) + sizes[ranked]
        taken = np.zeros(len(firsts), bool)
        taken[ranked[reached <= counts[owner]]] = True
        # A first word longer than the share allows would leave a sequence without any target; its first piece is taken then.
        lonely = np.ones(len(counts), bool)
        lonely[sequence[firsts[taken]]] = False
        starved = firsts[ranked[begins]][lonely[owner[begins]]]
        return np.sort(np.concatenate([candidates[taken[word]], starved]))


def _rank(groups: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each run of equal values."""
    if not len(groups):
        return groups
    begins = np.concatenate([[0], np.flatnonzero(np.diff(groups)) + 1])
    return np.arange(len(groups)) - np.repeat(begins, np.diff(np.append(begins, len(groups))))
