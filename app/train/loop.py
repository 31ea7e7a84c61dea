"""Training itself, in running order: devices, model, order of the data, updates, evaluation, checkpoints.

The loss of an update is the mean over its targets, counted over all processes and micro-batches, so the same global batch gives the same
update in any layout. Gradients cross the wire with the last micro-batch only; clipping sees them unscaled and summed, once an update.
Everything random follows from (seed, step, process), so a run that goes on from a checkpoint is the run that never stopped.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from app.errors import STOPPED, Fault
from app.measure.clock import Later, StepClock
from app.measure.flops import of_bert
from app.train import checkpoints, data, graphs, machine, model, packed, record, startup
from app.train.collate import MicroBatch, loader
from app.train.config import TrainConfig
from app.train.evaluate import evaluate
from app.train.graphs import Graphs
from app.train.launch import Launch
from app.train.order import Order
from app.train.show import Progress
from app.train.tally import Tally
from app.train.telemetry import Telemetry

MOST_SKIPPED = 50  #: fp16 updates skipped in a row before the run is given up: the scale has then fallen by 2^50


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
        # from_pretrained gives a model that is set to evaluate, without dropout
        self.learner = model.Learner(self.bert, config.task).to(self.device).train()
        pretrained, width = bool(choice.source), self.bert.config.hidden_size
        self.peak = model.peak_rate(config, pretrained, width)
        optimizer = model.optimizer_for(self.learner, config, self.peak, self.device)
        self.optimizer = accelerator.prepare(optimizer)
        self.trained: Any = None  # the learner in DDP and autocast; not made where passes are recorded
        self.scaler = accelerator.scaler

        precision = accelerator.mixed_precision
        self.padding = "packed" if config.padding == "auto" else config.padding
        self._check_padding()
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
        order = self.order = Order(config, launch, prepared, self.learner, accelerator, self.padding, dtype, self.say)
        self.layout, self.batches, self.table, self.held_out = order.layout, order.batches, order.table, order.held_out
        self.identity = {
            **config.decides_weights(), **prepared.fingerprint(), "padding": self.padding, "precision": precision,
            "sequences_an_update": f"{self.layout.micro_batches} rows of {order.shape.tokens} tokens" if order.shape else self.layout.sequences,
        }  # fmt: skip
        epoch, total = self.batches.plan(0).updates, self.table.total
        self.warm = model.warm_up(config, pretrained, width, total)
        mean = float(prepared.train.store.lengths[prepared.train.rows].mean())
        self.say(startup.summary(self.device, precision, self.layout, self.padding, order.shape, mean, epoch, total))

        if order.shape:
            self.say(f"packed rows run through {packed.path(self.bert, dtype)}")

        self.tally, self.clock = Tally(), StepClock(self.device)
        self.telemetry = Telemetry(self.device)
        self.totals = torch.zeros(2, device=self.device)  # targets of an update, processes that received a signal
        self.work = of_bert(self.bert.config, config.task)
        self.step, self.evaluation_due = 0, False
        self.best: dict[str, Any] = {}  # the evaluation with the lowest loss, and its step
        self.scores: dict[str, float] = {}  # the latest evaluation
        self._go_on()
        self.scale = self.scaler.get_scale() if self.scaler else 1.0
        self.unsettled: tuple[torch.Tensor, float, Later | None] | None = None  # of the last update: norm, rate, scale
        self.graphs: Graphs | Literal[False] | None = None  # False: they cannot be used here
        self.described = record.environment() if self.main else {}
        self.metrics = record.Metrics(self.output, self.step) if self.main else None
        if self.metrics:
            self._describe("running", None)
            if not self.step:
                self.metrics.histogram("data/length", prepared.train.store.lengths[prepared.train.rows])

    def _check_padding(self) -> None:
        """Raises Fault where this model, precision or GPU cannot train with --padding and --fp8 as they are."""
        if self.config.fp8 and (self.padding != "packed" or self.accelerator.mixed_precision != "fp16"):
            raise Fault(
                f"--fp8 goes with --padding packed and fp16; these are {self.padding} and {self.accelerator.mixed_precision}. Leave it out."
            )
        if self.padding == "packed":
            packed.check_model(self.bert)
            packed.use_fp8(self.bert, self.config.fp8)

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
        self.workers = startup.workers(config, self.launch, self.device)
        startup.pin_to_numa_node(self.launch, self.device)
        stream = iter(loader(self.batches, self.table, self.step, self.workers, self.device.type == "cuda"))
        self.telemetry.start()
        with Progress("training", "updates", self.table.total, self.step, self.main) as bar:
            if self.evaluation_due and not self._evaluate():
                return self._stopped()
            while self.step < self.table.total:
                leave = self._update(stream)
                bar.advance(1, self.tally.note)
                done = self.step == self.table.total
                if self.step % config.log_every == 0 or done:
                    self._settle()
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
        """One update of the weights; True when a process has received a signal, the same in every process.

        Whether it overflowed is asked for when the next update needs to know (``_settle``): the GPU does not wait for the host.
        """
        clock, accelerator = self.clock, self.accelerator
        with clock.part("data"):
            window = [next(stream) for _ in range(self.layout.accumulation)]
        if self.graphs is None:
            self.graphs = self._record(window[0])
            if not self.graphs:
                self._wrap()
        torch.manual_seed(_seed_of(self.config.seed, self.step, accelerator.process_index))
        # All micro-batches are at hand, so the loss can be divided by the targets of the whole update.
        targets, leave = sum(micro.targets for micro in window), self.stop.seen()
        share: Any = 1 / max(1, targets)
        heard = None
        if self.world > 1:
            self.totals[0], self.totals[1] = targets, leave
            with clock.part("counting"):
                torch.distributed.all_reduce(self.totals)
            heard = Later(self.totals)
            # DDP divides by the number of processes, recorded passes do not
            share = (1 if self.graphs else self.world) / self.totals[0]
        for place, micro in enumerate(window):
            first, last = place == 0, place == len(window) - 1
            if self.graphs:
                loss = self.graphs.step(micro, share, first, last, clock)
            else:
                loss = self._pass(micro, share, last)
            self.tally.count(micro, loss)
        self._settle()
        rate = model.rate(self.tally.applied, self.table.total, self.peak, self.warm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with clock.part("optimizer"):
            norm = accelerator.clip_grad_norm_(self.learner.parameters(), self.config.clip or math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.step += 1
        self.unsettled = (norm, rate, Later(self.scaler._get_scale_async()) if self.scaler else None)
        return bool(heard.read()[1]) if heard else leave

    def _wrap(self) -> None:
        """Put the learner into DDP and autocast. Only here: DDP ties gradients to a stream that cannot be recorded."""
        self.trained = self.accelerator.prepare_model(self.learner)
        if self.world > 1:
            self.clock.end_backward_at(self.bert.base_model.embeddings.parameters())  # type: ignore[operator,union-attr]

    def _pass(self, micro: MicroBatch, share: Any, last: bool) -> torch.Tensor:
        """Forward and backward of one micro-batch; gradients cross the wire with the ``last`` one."""
        with self.clock.part("copy"):
            tensors = micro.to(self.device)
        with nullcontext() if last else self.accelerator.no_sync(self.trained):
            with self.clock.part("forward"):
                loss = self.trained(tensors)
            with self.clock.part("backward", communicates=last and self.world > 1):
                self.accelerator.backward(loss * share)
        return loss

    def _record(self, example: MicroBatch) -> Graphs | Literal[False]:
        """CUDA graphs of the passes where they can be made in every process, else False. Both ways give the same training."""
        if self.config.cuda_graphs == "no" or self.device.type != "cuda":
            return False
        made: Graphs | Literal[False] = False
        with self.clock.paused():
            try:
                if graphs.usable(self.bert.base_model, example):
                    accumulation, compress = self.layout.accumulation, self.config.compress_gradients
                    made = Graphs(self.learner, self.accelerator, example, accumulation, compress)
            except RuntimeError as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                print(
                    f"process {self.accelerator.process_index}: CUDA graphs cannot be recorded here ({error}); "
                    "going on without them, as with --cuda-graphs no",
                    file=sys.stderr,
                )
            if self.world > 1:  # whatever each of them can: what follows must be the same in all
                all_made = torch.tensor(int(bool(made)), device=self.device)
                torch.distributed.all_reduce(all_made, torch.distributed.ReduceOp.MIN)
                made = made if all_made.item() else False
            if made:
                made.share_weights()
        return made

    def _settle(self) -> None:
        """Note what came of the last update: a skipped one (fp16 overflow) does not move the learning rate."""
        if self.unsettled is None:
            return
        norm, rate, scale = self.unsettled
        self.unsettled = None
        before, self.scale = self.scale, scale.read()[0] if scale else 1.0
        self.tally.end_update(self.scale < before, norm, self.scaler is not None, rate, self.scale)
        if self.tally.skipped_in_a_row >= MOST_SKIPPED:
            self._give_up(f"{MOST_SKIPPED} updates in a row overflowed in fp16")

    def _log(self) -> None:
        with self.clock.part("logging"):
            values = self.tally.window(self.accelerator, self.clock, self.work) | self.telemetry.window(
                self.accelerator
            )
        if not math.isfinite(values["loss"]):
            self._give_up(f"the loss is {values['loss']}")
        self._write(values)

    def _evaluate(self) -> bool:
        """Evaluate; False when a signal cut it short, and the evaluation is still due."""
        assert self.held_out is not None
        with self.clock.paused():
            classes = len(self.prepared.label_names) if self.config.task == "classify" else 0
            found = evaluate(
                self.learner, self.held_out, self.order.evaluation_batch(), self.accelerator, classes, self.stop.seen
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
        self._settle()
        with self.clock.paused():
            self.tally.gather(self.accelerator, window_only=True)
            startup.on_main(self.accelerator, self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        if self.tally.bad():
            raise startup.diverged("the loss or a gradient is not a number", self.step, self.output)
        state = {
            "step": self.step, "identity": self.identity, "tally": self.tally.state(), "best": self.best, "scores": self.scores,
            "layout": dataclasses.asdict(self.layout), "evaluation_due": self.evaluation_due, "scaler": self.scaler.state_dict() if self.scaler else None,
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
        self.telemetry.stop()
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
        result |= {k: v for k, v in self.prepared.report.items() if k in data.BASELINES}
        self.telemetry.stop()
        for line in [*self.tally.advice(self.workers), *self.telemetry.advice()]:
            self.say(line)
        startup.on_main(self.accelerator, lambda: model.publish(self.bert, self.prepared, self.output / "model"))
        if self.metrics:
            self.metrics.close()
            self._describe("done", result)
        return result

    def _describe(self, status: str, result: dict[str, Any] | None) -> None:
        record.write_json(self.output / "run.json", {
            "status": status, "arguments": self.config.as_dict(), "launch": self.launch.as_dict(), "identity": self.identity,
            "layout": dataclasses.asdict(self.layout), "data_files": self.prepared.files,
            "data_report": self.prepared.report, "environment": self.described, "result": result,
        })  # fmt: skip


def _seed_of(seed: int, step: int, process: int) -> int:
    """A seed for torch's generators: the same for the same place in a run, whatever happened before."""
    return (seed * 1_000_003 + step * 8191 + process) % (2**63 - 1)
