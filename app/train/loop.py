"""Training itself, in running order: devices, model, data order, updates, evaluation, checkpoints.

The loss of an update is the mean over its targets, counted over all processes and micro-batches, so the same global batch gives the same
update in any layout. Gradients cross the wire with the last micro-batch only; clipping sees them unscaled and summed, once an update.
Everything random follows from (seed, step, process), so a run that goes on from a checkpoint is the run that never stopped.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from app.errors import DIVERGED, STOPPED, Fault
from app.measure.clock import StepClock
from app.measure.flops import of_bert
from app.train import checkpoints, data, model, packed, packed_attention, record
from app.train.batches import Layout, packed_shape
from app.train.collate import Collator, MicroBatches, loader, timetable
from app.train.config import TrainConfig
from app.train.evaluate import evaluate
from app.train.launch import Launch
from app.train.masking import Masking
from app.train.show import Progress
from app.train.tally import Tally

MOST_SKIPPED = 50  #: fp16 updates skipped in a row before the run is given up: the scale has then fallen by 2^50


def train(config: TrainConfig, launch: Launch, choice: model.Choice, prepared: data.TrainingData, say: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Train and return (exit code, result). Every process of a launch calls it; side effects are in ``config.output_dir``."""
    stop = _Signals()
    accelerator = _accelerator(config, launch)
    main, world, device = accelerator.is_main_process, accelerator.num_processes, accelerator.device
    if not main:
        say = _silent
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.float32}[accelerator.mixed_precision]

    # The model, and what it is trained on
    bert = model.build(choice, config, prepared, say)
    learner = model.Learner(bert, config.task)
    layout = Layout(config.batch_size, launch.accumulation, world)
    padding = "packed" if config.padding == "auto" else config.padding
    masking = Masking(prepared.tokenizer.vocabulary, config.mask_fraction, config.whole_words, config.seed) if config.task == "mlm" else None
    split = prepared.train
    shape = packed_shape(split.store.lengths[split.rows], config.batch_size, prepared.max_length, config.mask_fraction if masking else 0.0) \
        if padding == "packed" else None
    if shape:
        packed.check_model(bert)
    flash = packed_attention.has_flash(device, dtype)

    def collator(of: data.Split) -> Collator:
        return Collator(of, prepared.tokenizer, masking, shape, prepared.max_length if padding == "fixed" else 0, not flash)

    batches = MicroBatches(collator(split), config.seed, layout, accelerator.process_index)
    table = timetable(batches, config.epochs, config.max_steps)
    optimizer = model.optimizer_for(learner, config, bool(choice.source), device)
    trained, optimizer = accelerator.prepare(learner, optimizer)
    say(_summary(launch, device, accelerator.mixed_precision, layout, padding, shape, table, batches))

    # Where this run stands
    output = Path(config.output_dir)
    identity = {**config.decides_weights(), **prepared.fingerprint(), "padding": padding, "precision": accelerator.mixed_precision,
                "sequences_an_update": layout.sequences if shape is None else f"{layout.micro_batches} rows of {shape.tokens} tokens"}
    tally = Tally()
    step, best, pending = _resume(config, output, identity, learner, optimizer.optimizer, accelerator, tally, launch, say)
    metrics = record.Metrics(output, step) if main else None
    described = record.environment() if main else {}
    if metrics:
        _describe(output, config, launch, identity, prepared, described, "running")
        if not step:
            metrics.histogram("data/length", split.store.lengths[split.rows])

    work = of_bert(bert.config, config.task)
    clock = StepClock(device)
    peak = model.peak_rate(config, bool(choice.source))
    scaler = accelerator.scaler
    scale = scaler.get_scale() if scaler else 1.0
    totals = torch.zeros(2, device=device)
    classes = len(prepared.label_names)
    scores: dict[str, float] = dict(best.get("last", {}))
    evaluated = collator(prepared.evaluation) if prepared.evaluation else None
    workers = _workers(config, launch, device)
    stream = iter(loader(batches, table, step, workers, device.type == "cuda"))

    def write_checkpoint(pending_evaluation: bool) -> None:
        if tally.bad(device):
            raise _diverged("the loss or a gradient is not a number", step, output)
        state = {"step": step, "identity": identity, "tally": tally.state(), "best": {**best, "last": scores}, "pending_evaluation": pending_evaluation,
                 "scaler": scaler.state_dict() if scaler else None, "launch": launch.as_dict(), "environment": described}
        checkpoints.save(output, step, learner, optimizer.optimizer, state, lambda folder: model.save_beside(bert, prepared, folder))
        checkpoints.rotate(output, config.keep, {best["step"]} if "step" in best else set())

    def save(pending_evaluation: bool) -> None:
        with clock.paused():
            tally.gather(accelerator, window_only=True)
            _on_main(accelerator, lambda: write_checkpoint(pending_evaluation))

    def evaluation_round() -> bool:
        """False when a signal cut it short."""
        nonlocal scores
        with clock.paused():
            found = evaluate(learner, evaluated, 2 * config.batch_size, accelerator, classes, stop.seen) if evaluated else {}
        if found is None:
            return False
        scores = found
        if found and main and metrics:
            metrics.write({"step": step, "epoch": round(_epochs(table, batches, step), 4), **found})
            say(f"update {step}: " + ", ".join(f"{k} {v:.4f}" for k, v in found.items()))
        if found and found["eval_loss"] < best.get("eval_loss", math.inf):
            best.update(found, step=step)
        return True

    with Progress("training", "updates", table.total, step, main) as bar:
        if pending and not evaluation_round():
            return STOPPED, {}
        while step < table.total:
            # One update: all its micro-batches first, because the loss is divided by their targets together.
            with clock.part("data"):
                window = [next(stream) for _ in range(layout.accumulation)]
            torch.manual_seed(_mix(config.seed, step, accelerator.process_index))
            for group in optimizer.param_groups:
                group["lr"] = model.rate(tally.applied, table.total, peak, config.warmup_ratio)
            totals[0], totals[1] = sum(b.targets for b in window), float(stop.seen())
            if world > 1:
                with clock.part("counting"):
                    torch.distributed.all_reduce(totals)
            share = world / totals[0]  # DDP divides by the number of processes
            for place, micro in enumerate(window):
                last = place == len(window) - 1
                with clock.part("copy"):
                    tensors = micro.to(device)
                with nullcontext() if last else accelerator.no_sync(trained):
                    with clock.part("forward"):
                        loss = trained(tensors)
                    with clock.part("backward_last" if last else "backward"):
                        accelerator.backward(loss * share)
                tally.count(micro, loss)
            with clock.part("optimizer"):
                norm = accelerator.clip_grad_norm_(trained.parameters(), config.clip or math.inf)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            rate, scale_before = optimizer.param_groups[0]["lr"], scale
            if scaler:
                scale = scaler.get_scale()
            tally.applied_or_skipped(scale < scale_before, norm, scaler is not None)
            if tally.skipped_in_a_row >= MOST_SKIPPED:
                _on_main(accelerator, lambda: _give_up(f"{MOST_SKIPPED} updates in a row overflowed in fp16", step, output))
            bar.advance(1, tally.note)

            leave = bool(totals[1].item()) if world > 1 else stop.seen()
            if step % config.log_every == 0 or step == table.total:
                with clock.part("logging"):
                    values = tally.window(accelerator, clock, work, device, rate, scale)
                if not math.isfinite(values["loss"]):
                    _on_main(accelerator, lambda: _give_up(f"the loss is {values['loss']}", step, output))
                if metrics:
                    metrics.write({"step": step, "epoch": round(_epochs(table, batches, step), 4), **values})
            due = evaluated is not None and (table.ends_epoch(step) if not config.eval_every else step % config.eval_every == 0 or step == table.total)
            whole = not due or leave or evaluation_round()
            if leave or not whole:
                save(pending_evaluation=due and (leave or not whole))
                say(f"stopped by {stop.name} after update {step} of {table.total}; the checkpoint is saved, the same command goes on from there")
                if metrics:
                    metrics.close()
                return STOPPED, {"status": "stopped", "updates": step, "output_dir": config.output_dir}
            if step == table.total or (config.save_every and step % config.save_every == 0):
                save(pending_evaluation=False)

    result = {"status": "done", "output_dir": config.output_dir, "updates": step, "skipped": tally.skipped, **tally.summary(), **scores}
    result.update({k: prepared.report[k] for k in ("chance_accuracy", "largest_class_accuracy") if k in prepared.report})
    if metrics:
        model.publish(bert, prepared, output / "model")
        metrics.close()
        _describe(output, config, launch, identity, prepared, described, "done", result)
    accelerator.wait_for_everyone()
    return 0, result


class _Signals:
    """SIGTERM and SIGINT noted, to be acted on between updates; a second one ends at once."""

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if self.received and os.environ.get("KIT_LAUNCHED") is None:
            raise KeyboardInterrupt
        self.received.append(number)

    def seen(self) -> bool:
        return bool(self.received)

    @property
    def name(self) -> str:
        return signal.Signals(self.received[0]).name if self.received else "a signal to another process"


def _silent(line: str) -> None:
    """Only the main process speaks."""


def _mix(seed: int, step: int, process: int) -> int:
    """A seed for torch's generators: the same for the same place in a run, whatever happened before."""
    return (seed * 1_000_003 + step * 8191 + process) % (2**63 - 1)


def _accelerator(config: TrainConfig, launch: Launch) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    hook = {"no": DDPCommunicationHookType.NO, "fp16": DDPCommunicationHookType.FP16, "bf16": DDPCommunicationHookType.BF16}[config.compress_gradients]
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=launch.accumulation == 1, comm_hook=hook)
    return Accelerator(mixed_precision=launch.precision, cpu=launch.cpu, kwargs_handlers=[ddp], step_scheduler_with_optimizer=False)


def _workers(config: TrainConfig, launch: Launch, device: torch.device) -> int:
    if config.num_workers >= 0:
        return config.num_workers
    return max(1, min(4, len(os.sched_getaffinity(0)) // launch.local - 1)) if device.type == "cuda" else 0


def _summary(launch: Launch, device: torch.device, precision: str, layout: Layout, padding: str, shape: Any, table: Any, batches: MicroBatches) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    packed = f", rows of {shape.tokens} tokens" if shape else ""
    return (f"{layout.processes} x {name}, {'fp32' if precision == 'no' else precision}, {padding}{packed}: batch {layout.batch_size} x accumulation "
            f"{layout.accumulation} x {layout.processes} process{'es' if layout.processes > 1 else ''} = {layout.sequences} sequences an update"
            f"{' on average' if shape else ''}, {batches.plan(0).updates} updates an epoch, {table.total} in all")


def _resume(config: TrainConfig, output: Path, identity: dict[str, Any], learner: Any, optimizer: torch.optim.Optimizer, accelerator: Any, tally: Tally,
            launch: Launch, say: Callable[[str], None]) -> tuple[int, dict[str, Any], bool]:
    """(updates done, best so far, whether an evaluation is due), with weights, moments, scaler and counts put in place."""
    found: Path | None
    if config.resume not in ("auto", "never"):
        found = Path(config.resume)
        if wrong := checkpoints.damage(found):
            raise Fault(f"--resume {found}: {wrong}. Give a folder such as {output}/checkpoints/step-00000500, or --resume auto.")
    else:
        found = checkpoints.newest_whole(output, say)
    if found is None:
        return 0, {}, False
    state = checkpoints.read_state(found)
    if differing := record.differences(state["identity"], identity):
        raise Fault(f"{found} is of another run: {'; '.join(differing)}. Give the same options and data, or another --output-dir.")
    if state["launch"]["processes"] != launch.processes:
        say(f"{state['launch']['processes']} processes before, {launch.processes} now: the same sequences an update; dropout differs, all else is the same")
    checkpoints.load(found, learner, optimizer)
    if accelerator.scaler and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    tally.restore(state["tally"], accelerator.is_main_process)
    say(f"going on from {found} after update {state['step']}")
    return int(state["step"]), dict(state["best"]), bool(state["pending_evaluation"])


def _epochs(table: Any, batches: MicroBatches, done: int) -> float:
    """Epochs completed after ``done`` updates."""
    epoch, update = table.place(done - 1) if done else (0, -1)
    return epoch + (update + 1) / batches.plan(epoch).updates


def _describe(output: Path, config: TrainConfig, launch: Launch, identity: dict[str, Any], prepared: data.TrainingData, described: dict[str, Any],
              status: str, result: dict[str, Any] | None = None) -> None:
    record.write_json(output / "run.json", {"status": status, "arguments": config.as_dict(), "launch": launch.as_dict(), "identity": identity,
                                            "data_files": prepared.files, "data_report": prepared.report, "environment": described,
                                            "result": result})


def _on_main(accelerator: Any, work: Callable[[], None]) -> None:
    """Do ``work`` in the main process while the others wait; a Fault ends all of them, and is told once."""
    fault = None
    if accelerator.is_main_process:
        try:
            work()
        except Fault as e:
            fault = e
    code = torch.tensor([fault.code if fault else 0], device=accelerator.device)
    if accelerator.num_processes > 1:
        torch.distributed.broadcast(code, 0)
    if fault:
        raise fault
    if accelerator.num_processes > 1 and code.item():
        raise SystemExit(int(code.item()))


def _give_up(what: str, step: int, output: Path) -> None:
    raise _diverged(what, step, output)


def _diverged(what: str, step: int, output: Path) -> Fault:
    whole = [s for s in checkpoints.steps(output) if not checkpoints.damage(checkpoints.folder_of(output, s))]
    last = f"the last good checkpoint is {checkpoints.folder_of(output, whole[-1])}" if whole else "there is no checkpoint yet"
    return Fault(f"training diverged at update {step}: {what}; {last}. Try a lower --lr, a longer --warmup-ratio, or bf16 (--accelerate ddp-bf16).", DIVERGED)
