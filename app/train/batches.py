"""Which sequences each update sees, and in which micro-batch: a pure function of lengths, seed, epoch and layout.

Nothing here is drawn while training. The same seed gives the same updates for any number of processes and data-loader workers, and a
resumed run continues the list where it stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """How an update is divided. An update has ``processes * accumulation`` micro-batches, one for each process and round."""

    batch_size: int
    accumulation: int
    processes: int

    @property
    def micro_batches(self) -> int:
        return self.accumulation * self.processes

    @property
    def sequences(self) -> int:
        """Sequences an update; when packed, on average."""
        return self.batch_size * self.micro_batches


@dataclass(frozen=True)
class PackedShape:
    """The fixed shape of packed rows, so that kernels are compiled once.

    ``tokens`` a row, at most ``sequences`` sequences (empty ones fill up) and ``targets`` tokens to predict (0 for classification).
    """

    tokens: int
    sequences: int
    targets: int
    longest: int

    @property
    def entries(self) -> int:
        """Length of ``cu_seqlens`` less one: the sequences, and pieces of at most ``longest`` tokens of padding."""
        return self.sequences + math.ceil(self.tokens / self.longest)


def packed_shape(lengths: np.ndarray, batch_size: int, longest: int, mask_fraction: float) -> PackedShape:
    """A row that holds ``batch_size`` sequences on average. ``lengths`` are those of the training rows; ``mask_fraction`` 0: no targets."""
    mean = float(lengths.mean())
    tokens = max(longest, math.ceil(batch_size * mean / 128) * 128)
    # Half as many sequences again as the mean, so that a run of short ones seldom closes a row early.
    sequences = min(math.ceil(tokens / int(lengths.min())), math.ceil(1.5 * tokens / mean) + 8)
    expected = (
        float(target_counts(lengths, mask_fraction).sum()) * tokens / float(lengths.sum()) if mask_fraction else 0.0
    )
    targets = (
        math.ceil(max(1.04 * expected + 8, target_counts(np.array([longest]), mask_fraction)[0]) / 64) * 64
        if mask_fraction
        else 0
    )
    return PackedShape(tokens, sequences, targets, longest)


def target_counts(lengths: np.ndarray, mask_fraction: float) -> np.ndarray:
    """Tokens to predict in sequences of these lengths: the rounded share of what lies between [CLS] and [SEP], at least one.

    A fixed count for a length, as in BERT's own data preparation, and not a draw for each token: so every process knows the number of
    targets of an update without asking the others.
    """
    return np.maximum(1, np.rint((lengths - 2) * mask_fraction)).astype(np.int64)


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The rows of an epoch in the order in which they are seen."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


@dataclass(frozen=True)
class EpochPlan:
    """The updates of one epoch. ``units`` is a list of row groups: single micro-batch contents for packed rows, else one update each."""

    rows: np.ndarray
    bounds: np.ndarray
    layout: Layout
    packed: bool
    lengths: np.ndarray

    @property
    def updates(self) -> int:
        pieces = len(self.bounds) - 1
        return math.ceil(pieces / self.layout.micro_batches) if self.packed else pieces

    def sequences(self, update: int) -> int:
        """Sequences in one update, over all processes."""
        if not self.packed:
            return int(self.bounds[update + 1] - self.bounds[update])
        first = update * self.layout.micro_batches
        last = min(first + self.layout.micro_batches, len(self.bounds) - 1)
        return int(self.bounds[last] - self.bounds[first])

    def micro_batch(self, update: int, accumulated: int, process: int) -> np.ndarray:
        """Row numbers of one micro-batch; empty in the last update of an epoch where there is nothing left for this process.

        The sequences of an update are sorted by length before they are divided: the gradient of the update is the same sum in another
        order, with less padding. Neighbours in length go to different processes in the same round, so none waits for another.
        """
        place = accumulated * self.layout.processes + process
        if self.packed:
            piece = update * self.layout.micro_batches + place
            return (
                self.rows[self.bounds[piece] : self.bounds[piece + 1]]
                if piece < len(self.bounds) - 1
                else self.rows[:0]
            )
        chosen = self.rows[self.bounds[update] : self.bounds[update + 1]]
        chosen = chosen[np.argsort(-self.lengths[chosen], kind="stable")]
        edges = np.linspace(0, len(chosen), self.layout.micro_batches + 1).round().astype(int)
        return chosen[edges[place] : edges[place + 1]]


def plan_epoch(
    rows: np.ndarray,
    lengths: np.ndarray,
    seed: int,
    epoch: int,
    layout: Layout,
    shape: PackedShape | None,
    mask_fraction: float = 0.0,
) -> EpochPlan:
    """The updates of epoch ``epoch`` over ``rows`` (row numbers), ``lengths`` being those of all rows of the data set.

    With ``shape`` consecutive sequences are laid into rows until the next would not fit. A packed row is the unit that processes share: for
    a given shape, processes x accumulation decides the update, whichever of the two it is.
    """
    ordered = rows[order(len(rows), seed, epoch)]
    if shape is None:
        bounds = np.append(np.arange(0, len(ordered), layout.sequences), len(ordered))
        return EpochPlan(ordered, bounds, layout, False, lengths)
    tokens = np.concatenate([[0], np.cumsum(lengths[ordered])])
    targets = (
        np.concatenate([[0], np.cumsum(target_counts(lengths[ordered], mask_fraction))]) if shape.targets else None
    )
    bounds_list = [0]
    while bounds_list[-1] < len(ordered):
        at = bounds_list[-1]
        end = min(int(np.searchsorted(tokens, tokens[at] + shape.tokens, side="right")) - 1, at + shape.sequences)
        if targets is not None:
            end = min(end, int(np.searchsorted(targets, targets[at] + shape.targets, side="right")) - 1)
        bounds_list.append(end)
    return EpochPlan(ordered, np.array(bounds_list), layout, True, lengths)
