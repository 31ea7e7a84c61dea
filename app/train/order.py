"""Which micro-batches there are, for every update of a run: its layout, the shape of packed rows, collators, timetable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from app.errors import Fault
from app.train import fit, packed_attention, startup
from app.train.batches import Layout, PackedShape, packed_shape
from app.train.collate import Collator, MicroBatches, timetable
from app.train.config import TrainConfig
from app.train.data import TrainingData
from app.train.launch import Launch
from app.train.masking import Masking
from app.train.model import Learner


class Order:
    """``layout``, ``shape`` (None unless packed), ``batches`` of this process, ``table`` of the run, ``held_out`` to evaluate on."""

    def __init__(
        self,
        config: TrainConfig,
        launch: Launch,
        prepared: TrainingData,
        learner: Learner,
        accelerator: Any,
        padding: str,
        dtype: torch.dtype,
        say: Callable[[str], None],
    ) -> None:
        """Arrange them as --batch-size says, or as --global-batch-size and memory do. Raises Fault where that cannot be shared."""
        self.config, self.launch, self.prepared = config, launch, prepared
        self.learner, self.accelerator, self.say = learner, accelerator, say
        self.padding, self.dtype = padding, dtype
        self.fraction = config.mask_fraction if config.task == "mlm" else 0.0
        if config.global_batch_size:
            self._divide()
        else:
            self._arrange(config.batch_size, launch.accumulation)
        self.table = timetable(self.batches, config.epochs, config.max_steps)

    def evaluation_batch(self) -> int:
        """Small micro-batches are doubled, as no gradients are kept; large ones would only take memory."""
        return self.layout.batch_size * (2 if self.layout.batch_size <= 64 else 1)

    def _arrange(self, batch_size: int, accumulation: int) -> None:
        """Micro-batches of ``batch_size`` sequences, or packed rows that hold so many on average."""
        config, prepared, split = self.config, self.prepared, self.prepared.train
        self.layout = Layout(batch_size, accumulation, self.accelerator.num_processes)
        self.shape: PackedShape | None = None
        if self.padding == "packed":
            self.shape = packed_shape(split.store.lengths[split.rows], batch_size, prepared.max_length, self.fraction)
        masking = (
            Masking(prepared.tokenizer.vocabulary, config.mask_fraction, config.whole_words, config.seed)
            if config.task == "mlm"
            else None
        )
        host_lengths = not packed_attention.has_flash(self.accelerator.device, self.dtype)
        pad_to = prepared.max_length if self.padding == "fixed" else 0
        collators = [
            Collator(part, prepared.tokenizer, masking, self.shape, pad_to, host_lengths) if part else None
            for part in (split, prepared.evaluation)
        ]
        assert collators[0] is not None
        self.held_out = collators[1]
        self.batches = MicroBatches(collators[0], config.seed, self.layout, self.accelerator.process_index)

    def _divide(self) -> None:
        """Arrange --global-batch-size: as an earlier run of this folder did, else by what fits in memory."""
        wanted, world = self.config.global_batch_size, self.accelerator.num_processes
        if self.launch.accumulation > 1:
            raise Fault(
                f"--global-batch-size finds the accumulation, and {self.launch.config} has gradient_accumulation_steps: {self.launch.accumulation}; "
                "give one of the two"
            )
        if wanted % world:
            raise Fault(f"--global-batch-size is {wanted}, allowed is a multiple of the number of processes, {world}")
        before = startup.earlier_layout(self.config)
        rows = before.get("accumulation", 0) * before.get("processes", 0)
        if rows and rows * before["batch_size"] == wanted and rows % world == 0:
            batch_size, accumulation = before["batch_size"], rows // world
        else:
            tried: dict[int, bool] = {}
            batch_size, accumulation = fit.divide(
                wanted // world, lambda size: tried.setdefault(size, self._fits(size))
            )
            self.say(
                f"--global-batch-size {wanted}: micro-batches of {batch_size} are the largest even division that fits here"
            )
            too_large = min((size for size, fits in tried.items() if not fits), default=0)
            if 4 * batch_size <= too_large:
                self.say(
                    f"warning: {wanted // world} sequences a process divide badly: {batch_size} fit and {too_large} do not, with no "
                    "division between; a multiple of 64 as --global-batch-size divides better and trains faster"
                )
        self._arrange(batch_size, accumulation)
        self._note_full_rows(wanted)
        self.accelerator.wait_for_everyone()  # all have read what an earlier run left before the first one writes

    def _note_full_rows(self, wanted: int) -> None:
        """A packed row is at least as long as the longest text may be, and then holds more than its share of an update."""
        if self.shape is None or self.shape.tokens > self.shape.longest:
            return
        split = self.prepared.train
        held = self.shape.tokens / float(split.store.lengths[split.rows].mean())
        if held > 1.1 * self.layout.batch_size:
            update = held * self.layout.micro_batches
            self.say(
                f"warning: a packed row has --max-length tokens at least, here {self.shape.tokens}, and holds {held:.0f} sequences on average, not "
                f"{self.layout.batch_size}, and an update {update:.0f}, not {wanted}; lower --max-length, or use --padding dynamic"
            )

    def _fits(self, batch_size: int) -> bool:
        self._arrange(batch_size, 1)
        split = self.prepared.train
        rows = fit.longest(split.store.lengths, split.rows, self.shape, batch_size, self.fraction)
        worst = self.batches.collator.collate(rows, 0)
        device = self.accelerator.device
        if device.type == "cpu":
            return worst.tokens <= fit.CPU_TOKENS or batch_size == 1
        return fit.passes(self.learner, self.accelerator, worst.to(device))
