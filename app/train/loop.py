"""Training itself, in running order: devices, model, order of the data, updates, evaluation, checkpoints.

The loss of an update is the mean over its targets, counted over all processes and micro-batches, so the same global batch gives the same
update in any layout. Gradients cross the wire with the last micro-batch only; clipping sees them unscaled and summed, once an update.
Everything random follows from (seed, step, process), so a run that goes on from a checkpoint is the run that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from app.errors import STOPPED, Fault
from app.measure.clock import StepClock
from app.measure.flops import of_bert
from app.train import checkpoints, data, machine, model, packed, packed_attention, record, startup
from app.train.batches import Layout, packed_shape
from app.train.collate import Collator, MicroBatch, MicroBatches, loader, timetable
from app.train.config import TrainConfig
from app.train.evaluate import evaluate
from app.train.launch import Launch
from app.train.masking import Masking
from app.train.show import Progress
from app.train.tally import Tally

MOST_SKIPPED = 50  #: fp16 updates skipped in a row before the run is given up: the scale has then fallen by 2^50
MOST_WAITING = 0.1  #: share of the time spent waiting for data from which the run names it and what to do


class Run:
    """One process's part of a training run. Every process of a launch makes one and calls ``train``."""

    def __init__(
        self,
        config: TrainConfig,
        launch: Launch,
        choice: model.Choice,
        prepared: data.TrainingData,
        say: Callable[[str], None],
    ) -> None:
        """Build everything and go on where an earlier run stopped. Raises Fault where that run was another."""
        self.config, self.launch, self.prepared = config, launch, prepared
        self.output = Path(config.output_dir)
        self.stop = startup.Signals()
        self.accelerator = accelerator = startup.accelerator(config, launch)
        self.main, self.world, self.device = accelerator.is_main_process, accelerator.num_processes, accelerator.device
        self.say = say if self.main else lambda line: None
        machine.check_device(self.device)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)

        self.bert = model.build(choice, config, prepared, self.say)
        self.learner = model.Learner(self.bert, config.task)
        self.peak = model.peak_rate(config, bool(choice.source), self.bert.config.hidden_size)
        optimizer = model.optimizer_for(self.learner, config, self.peak, self.device)
        self.trained, self.optimizer = accelerator.prepare(self.learner, optimizer)
        self.scaler = accelerator.scaler

        self._order_data()
        precision = accelerator.mixed_precision
        self.identity = {
            **config.decides_weights(), **prepared.fingerprint(), "padding": self.padding, "precision": precision,
            "sequences_an_update": f"{self.layout.micro_batches} rows of {self.shape.tokens} tokens" if self.shape else self.layout.sequences,
        }  # fmt: skip
        epoch, total = self.batches.plan(0).updates, self.table.total
        self.say(startup.summary(self.device, precision, self.layout, self.padding, self.shape, epoch, total))

        if self.shape:
            self.say(f"packed rows run through {packed.path(self.bert, self.dtype)}")

        self.tally, self.clock = Tally(), StepClock(self.device)
        self.totals = torch.zeros(2, device=self.device)  # targets of an update, processes that received a signal
        self.work = of_bert(self.bert.config, config.task)
        self.step, self.evaluation_due = 0, False
        self.best: dict[str, Any] = {}  # the evaluation with the lowest loss, and its step
        self.scores: dict[str, float] = {}  # the latest evaluation
        self._go_on()
        self.scale = self.scaler.get_scale() if self.scaler else 1.0
        self.described = record.environment() if self.main else {}
        self.metrics = record.Metrics(self.output, self.step) if self.main else None
        if self.metrics:
            self._describe("running", None)
            if not self.step:
                self.metrics.histogram("data/length", prepared.train.store.lengths[prepared.train.rows])

    def _order_data(self) -> None:
        """Which micro-batches there are, for every update of the run."""
        config, prepared = self.config, self.prepared
        mlm, split = config.task == "mlm", prepared.train
        self.layout = Layout(config.batch_size, self.launch.accumulation, self.world)
        self.padding = "packed" if config.padding == "auto" else config.padding
        self.shape = None
        if config.fp8 and (self.padding != "packed" or self.accelerator.mixed_precision != "fp16"):
            raise Fault(
                f"--fp8 goes with --padding packed and fp16; these are {self.padding} and {self.accelerator.mixed_precision}. Leave it out."
            )
        if self.padding == "packed":
            packed.check_model(self.bert)
            packed.use_fp8(self.bert, config.fp8)
            fraction = config.mask_fraction if mlm else 0.0
            self.shape = packed_shape(split.store.lengths[split.rows], config.batch_size, prepared.max_length, fraction)
        masking = (
            Masking(prepared.tokenizer.vocabulary, config.mask_fraction, config.whole_words, config.seed)
            if mlm
            else None
        )
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(
            self.accelerator.mixed_precision, torch.float32
        )
        host_lengths = not packed_attention.has_flash(self.device, self.dtype)
        pad_to = prepared.max_length if self.padding == "fixed" else 0
        collators = [
            Collator(part, prepared.tokenizer, masking, self.shape, pad_to, host_lengths) if part else None
            for part in (split, prepared.evaluation)
        ]
        assert collators[0] is not None
        self.held_out = collators[1]
        self.batches = MicroBatches(collators[0], config.seed, self.layout, self.accelerator.process_index)
        self.table = timetable(self.batches, config.epochs, config.max_steps)

    def _go_on(self) -> None:
        """Weights, moments, scaler and counts of the checkpoint that this run goes on from, if there is one."""
        earlier = startup.earlier_state(self.config, self.identity, self.say)
        if earlier is None:
            return
        folder, state = earlier
        if (before := state["launch"]["processes"]) != self.world:
            self.say(
                f"{before} processes before, {self.world} now: the same sequences an update; dropout differs, all else is the same"
            )
        checkpoints.load(folder, self.learner, self.optimizer.optimizer)
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.tally.restore(state["tally"], self.main)
        self.step, self.best, self.scores = state["step"], state["best"], state["scores"]
        self.evaluation_due = state["evaluation_due"]
        self.say(f"going on from {folder} after update {self.step}")

    def train(self) -> tuple[int, dict[str, Any]]:
        """Train to the end or to a signal; returns (exit code, result)."""
        config = self.config
        count = startup.workers(config, self.launch, self.device)
        stream = iter(loader(self.batches, self.table, self.step, count, self.device.type == "cuda"))
        with Progress("training", "updates", self.table.total, self.step, self.main) as bar:
            if self.evaluation_due and not self._evaluate():
                return self._stopped()
            while self.step < self.table.total:
                leave = self._update(stream)
                bar.advance(1, self.tally.note)
                done = self.step == self.table.total
                if self.step % config.log_every == 0 or done:
                    self._log()
                self.evaluation_due = self.held_out is not None and (
                    done
                    or (self.step % config.eval_every == 0 if config.eval_every else self.table.ends_epoch(self.step))
                )
                if leave or (self.evaluation_due and not self._evaluate()):
                    self._save()
                    return self._stopped()
                if done or (config.save_every and self.step % config.save_every == 0):
                    self._save()
        return 0, self._finish()

    def _update(self, stream: Iterator[MicroBatch]) -> bool:
        """One update of the weights; True when a process has received a signal, the same in every process."""
        clock, accelerator = self.clock, self.accelerator
        with clock.part("data"):
            window = [next(stream) for _ in range(self.layout.accumulation)]
        torch.manual_seed(_seed_of(self.config.seed, self.step, accelerator.process_index))
        for group in self.optimizer.param_groups:
            group["lr"] = rate = model.rate(self.tally.applied, self.table.total, self.peak, self.config.warmup_ratio)
        # All micro-batches are at hand, so the loss can be divided by the targets of the whole update.
        targets, leave = sum(micro.targets for micro in window), self.stop.seen()
        share: Any = 1 / max(1, targets)
        if self.world > 1:
            self.totals[0], self.totals[1] = targets, leave
            with clock.part("counting"):
                torch.distributed.all_reduce(self.totals)
            share = self.world / self.totals[0]  # DDP divides by the number of processes
        for place, micro in enumerate(window):
            last = place == len(window) - 1
            with clock.part("copy"):
                tensors = micro.to(self.device)
            with nullcontext() if last else accelerator.no_sync(self.trained):
                with clock.part("forward"):
                    loss = self.trained(tensors)
                with clock.part("backward_last" if last else "backward"):
                    accelerator.backward(loss * share)
            self.tally.count(micro, loss)
        with clock.part("optimizer"):
            norm = accelerator.clip_grad_norm_(self.trained.parameters(), self.config.clip or math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.step += 1
        before, self.scale = self.scale, self.scaler.get_scale() if self.scaler else 1.0
        self.tally.end_update(self.scale < before, norm, self.scaler is not None, rate, self.scale)
        if self.tally.skipped_in_a_row >= MOST_SKIPPED:
            self._give_up(f"{MOST_SKIPPED} updates in a row overflowed in fp16")
        return bool(self.totals[1].item()) if self.world > 1 else leave

    def _log(self) -> None:
        with self.clock.part("logging"):
            values = self.tally.window(self.accelerator, self.clock, self.work)
        if not math.isfinite(values["loss"]):
            self._give_up(f"the loss is {values['loss']}")
        self._write(values)

    def _evaluate(self) -> bool:
        """Evaluate; False when a signal cut it short, and the evaluation is still due."""
        assert self.held_out is not None
        with self.clock.paused():
            classes = len(self.prepared.label_names) if self.config.task == "classify" else 0
            found = evaluate(
                self.learner, self.held_out, 2 * self.config.batch_size, self.accelerator, classes, self.stop.seen
            )
        if found is None:
            return False
        self.evaluation_due, self.scores = False, found
        self._write(found)
        self.say(f"update {self.step}: " + ", ".join(f"{k} {v:.4f}" for k, v in found.items()))
        if found["eval_loss"] < self.best.get("eval_loss", math.inf):
            self.best = {"step": self.step, **found}
        return True

    def _write(self, values: dict[str, Any]) -> None:
        if self.metrics:
            epoch, update = self.table.place(self.step - 1)
            done = epoch + (update + 1) / self.batches.plan(epoch).updates
            self.metrics.write({"step": self.step, "epoch": round(done, 4), **values})

    def _save(self) -> None:
        with self.clock.paused():
            self.tally.gather(self.accelerator, window_only=True)
            startup.on_main(self.accelerator, self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        if self.tally.bad():
            raise startup.diverged("the loss or a gradient is not a number", self.step, self.output)
        state = {
            "step": self.step, "identity": self.identity, "tally": self.tally.state(), "best": self.best, "scores": self.scores,
            "evaluation_due": self.evaluation_due, "scaler": self.scaler.state_dict() if self.scaler else None,
            "launch": self.launch.as_dict(), "environment": self.described,
        }  # fmt: skip
        optimizer = self.optimizer.optimizer
        checkpoints.save(
            self.output,
            self.step,
            self.learner,
            optimizer,
            state,
            lambda to: model.save_beside(self.bert, self.prepared, to),
        )
        checkpoints.rotate(self.output, self.config.keep, {self.best["step"]} if self.best else set())

    def _give_up(self, what: str) -> None:
        def raise_it() -> None:
            raise startup.diverged(what, self.step, self.output)

        startup.on_main(self.accelerator, raise_it)

    def _stopped(self) -> tuple[int, dict[str, Any]]:
        self.say(
            f"stopped by {self.stop.name} after update {self.step} of {self.table.total}; the checkpoint is saved, the same command goes on from there"
        )
        if self.metrics:
            self.metrics.close()
        return STOPPED, {"status": "stopped", "updates": self.step, "output_dir": self.config.output_dir}

    def _finish(self) -> dict[str, Any]:
        """Publish the model; the result that is printed last."""
        result = {
            "status": "done",
            "output_dir": self.config.output_dir,
            "updates": self.step,
            "skipped": self.tally.skipped,
        }
        result |= {**self.tally.summary(), **self.scores}
        result |= {k: v for k, v in self.prepared.report.items() if k in ("chance_accuracy", "largest_class_accuracy")}
        if self.tally.waiting() > MOST_WAITING:
            now = startup.workers(self.config, self.launch, self.device)
            self.say(
                f"data: {self.tally.waiting():.0%} of the time went into waiting for batches; use --num-workers {max(2, 2 * now)} (now {now})"
            )
        startup.on_main(self.accelerator, lambda: model.publish(self.bert, self.prepared, self.output / "model"))
        if self.metrics:
            self.metrics.close()
            self._describe("done", result)
        return result

    def _describe(self, status: str, result: dict[str, Any] | None) -> None:
        record.write_json(self.output / "run.json", {
            "status": status, "arguments": self.config.as_dict(), "launch": self.launch.as_dict(), "identity": self.identity,
            "data_files": self.prepared.files, "data_report": self.prepared.report, "environment": self.described, "result": result,
        })  # fmt: skip


def _seed_of(seed: int, step: int, process: int) -> int:
    """A seed for torch's generators: the same for the same place in a run, whatever happened before."""
    return (seed * 1_000_003 + step * 8191 + process) % (2**63 - 1)
