"""Micro-batches: the tensors of some rows, made the same wherever and whenever they are made."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from app.train.batches import EpochPlan, Layout, PackedShape, plan_epoch
from app.train.data import Split
from app.train.masking import Masking
from app.train.tokenizers import BertTokenizer

IGNORED = -100


@dataclass(frozen=True)
class MicroBatch:
    """``tensors``: what the model is called with. The counts are of this micro-batch: ``targets`` the loss is summed over, ``useful`` tokens
    that are no padding, ``tokens`` with padding, ``sequences``, and ``squares``, the sum of squared lengths (attention's work)."""

    tensors: dict[str, Any]
    targets: int
    useful: int
    tokens: int
    sequences: int
    squares: int

    def to(self, device: torch.device) -> dict[str, Any]:
        """The tensors on ``device``; from pinned memory the copy overlaps with work already there."""
        return {
            k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in self.tensors.items()
        }

    def pin_memory(self) -> MicroBatch:
        """Called by torch's DataLoader."""
        pinned = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in self.tensors.items()}
        return MicroBatch(pinned, self.targets, self.useful, self.tokens, self.sequences, self.squares)


@dataclass(frozen=True)
class Collator:
    """Rows of a split to micro-batches. ``shape`` packs; ``pad_to`` is a fixed length, or 0 for a multiple of 8 that holds the longest.

    ``masking`` is None for classification. ``host_lengths`` gives packed attention the lengths on the host, where it is not FlashAttention.
    """

    split: Split
    tokenizer: BertTokenizer
    masking: Masking | None
    shape: PackedShape | None
    pad_to: int
    host_lengths: bool

    def collate(self, rows: np.ndarray, epoch: int) -> MicroBatch:
        """The micro-batch of ``rows``; no rows give one padded sequence without targets, so that a process with nothing left still takes part."""
        ids, bounds = self.split.store.ids(rows)
        lengths = np.diff(bounds)
        if self.masking is None:
            chosen, targets = bounds[:-1], self.split.labels[rows]
        else:
            original = ids
            ids, chosen = self.masking.apply(ids, bounds, rows, epoch)
            targets = original[chosen]
        make = self._packed if self.shape else self._padded
        tensors, tokens = make(ids, bounds, lengths, chosen, targets)
        return MicroBatch(tensors, len(targets), len(ids), tokens, len(rows), int((lengths**2).sum()))

    def _packed(
        self, ids: np.ndarray, bounds: np.ndarray, lengths: np.ndarray, chosen: np.ndarray, targets: np.ndarray
    ) -> tuple[dict[str, Any], int]:
        shape = self.shape
        assert shape is not None
        size = shape.targets if self.masking else shape.sequences
        where, what = np.zeros(size, np.int64), np.full(size, IGNORED, np.int64)
        where[: len(chosen)], what[: len(targets)] = chosen, targets
        row, positions, starts = packed_row(ids, bounds, shape)
        arrays = {
            "input_ids": row,
            "position_ids": positions,
            "cu_seqlens": starts,
            "target_positions": where,
            "targets": what,
        }
        made: dict[str, Any] = {k: torch.from_numpy(v) for k, v in arrays.items()}
        made.update(token_type_ids=None, max_seqlen=shape.longest)
        if self.host_lengths:
            made["lengths"] = tuple(np.diff(starts).tolist())
        return made, shape.tokens

    def _padded(
        self, ids: np.ndarray, bounds: np.ndarray, lengths: np.ndarray, chosen: np.ndarray, targets: np.ndarray
    ) -> tuple[dict[str, Any], int]:
        count = max(1, len(lengths))
        width = self.pad_to or max(8, -(-int(lengths.max(initial=0)) // 8) * 8)
        block = np.full((count, width), self.tokenizer.pad, np.int64)
        mask = np.zeros((count, width), np.int64)
        if len(lengths):
            there = np.arange(width) < lengths[:, None]
            block[there], mask[there] = ids, 1
        else:
            mask[0, 0] = 1  # attention over nothing would be NaN
        if self.masking is None:
            return {
                k: torch.from_numpy(v)
                for k, v in {
                    "input_ids": block,
                    "attention_mask": mask,
                    "targets": targets if len(targets) else np.array([IGNORED]),
                }.items()
            }, block.size
        sequence = np.searchsorted(bounds, chosen, side="right") - 1
        where = sequence * width + chosen - bounds[sequence]
        if not len(where):
            where, targets = np.zeros(1, np.int64), np.array([IGNORED])
        return {
            k: torch.from_numpy(v)
            for k, v in {
                "input_ids": block,
                "attention_mask": mask,
                "target_positions": where,
                "targets": targets,
            }.items()
        }, block.size


def packed_row(ids: np.ndarray, bounds: np.ndarray, shape: PackedShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences end to end (``ids`` and their ``bounds``) as a row of fixed shape.

    Returns input ids int64 [tokens], positions int64 [tokens], and cu_seqlens int32 [entries + 1]. The padding at the end is sequences of its own
    of at most ``longest`` tokens, so that no kernel meets a longer one than it was told.
    """
    row = np.zeros(shape.tokens, np.int64)
    row[: len(ids)] = ids
    positions = (np.arange(shape.tokens) - len(ids)) % shape.longest
    positions[: len(ids)] = np.arange(len(ids)) - np.repeat(bounds[:-1], np.diff(bounds))
    padding = np.append(np.arange(len(ids), shape.tokens, shape.longest), shape.tokens)
    starts = np.full(shape.entries + 1, shape.tokens, np.int32)
    starts[: len(bounds) - 1 + len(padding)] = np.concatenate([bounds[:-1], padding])
    return row, positions, starts


class MicroBatches(torch.utils.data.Dataset[MicroBatch]):
    """All micro-batches of one process, by (epoch, update, accumulated). Map-style, so any number of workers gives the same."""

    def __init__(self, collator: Collator, seed: int, layout: Layout, process: int) -> None:
        self.collator, self.seed, self.layout, self.process = collator, seed, layout, process
        self.plan = lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> EpochPlan:
        fraction = self.collator.masking.fraction if self.collator.masking else 0.0
        return plan_epoch(
            self.collator.split.rows,
            self.collator.split.store.lengths,
            self.seed,
            epoch,
            self.layout,
            self.collator.shape,
            fraction,
        )

    def __getitem__(self, key: tuple[int, int, int]) -> MicroBatch:
        epoch, update, accumulated = key
        return self.collator.collate(self.plan(epoch).micro_batch(update, accumulated, self.process), epoch)


@dataclass(frozen=True)
class Timetable:
    """Which epoch and update of it each step of the run is. ``ends`` are the steps after which each epoch is over."""

    total: int
    starts: tuple[int, ...]

    def keys(self, first: int, accumulation: int) -> Iterator[tuple[int, int, int]]:
        """The micro-batches of a process from step ``first`` to the end of the run."""
        for step in range(first, self.total):
            epoch, update = self.place(step)
            for accumulated in range(accumulation):
                yield epoch, update, accumulated

    def place(self, step: int) -> tuple[int, int]:
        epoch = int(np.searchsorted(self.starts, step, side="right")) - 1
        return epoch, step - self.starts[epoch]

    def ends_epoch(self, done: int) -> bool:
        """True when ``done`` updates complete an epoch or the run."""
        return done == self.total or done in self.starts[1:]


def timetable(batches: MicroBatches, epochs: float, max_steps: int) -> Timetable:
    """As many updates as ``epochs`` (a part of an epoch rounds up) or, where given, exactly ``max_steps``."""
    starts, epoch = [0], 0
    while True:
        updates = batches.plan(epoch).updates
        if max_steps:
            if starts[-1] + updates >= max_steps:
                return Timetable(max_steps, tuple(starts))
        elif epoch + 1 >= epochs:
            part = epochs - epoch
            return Timetable(starts[-1] + max(1, int(np.ceil(updates * part - 1e-9))), tuple(starts))
        starts.append(starts[-1] + updates)
        epoch += 1


class _Keys(torch.utils.data.Sampler[Any]):
    def __init__(self, table: Timetable, first: int, accumulation: int) -> None:
        self.table, self.first, self.accumulation = table, first, accumulation

    def __iter__(self) -> Iterator[Any]:
        return self.table.keys(self.first, self.accumulation)

    def __len__(self) -> int:
        return (self.table.total - self.first) * self.accumulation


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Ctrl-C and a stopped group reach workers too. The trainer saves first and ends them then; they end by themselves if it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def loader(batches: MicroBatches, table: Timetable, first: int, workers: int, pinned: bool) -> Any:
    """A DataLoader over every micro-batch of this process from step ``first`` on; workers make them ahead of time."""
    ahead: dict[str, Any] = {"prefetch_factor": 4} if workers else {}
    return torch.utils.data.DataLoader(
        batches,
        batch_size=None,
        sampler=_Keys(table, first, batches.layout.accumulation),
        num_workers=workers,
        pin_memory=pinned,
        worker_init_fn=_leave_signals_to_the_trainer,
        **ahead,
    )
