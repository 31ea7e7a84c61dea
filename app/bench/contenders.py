"""The contenders: this project's trainer and predictor, and Hugging Face's Trainer as people run it, on the same rows.

Each measures windows of some updates after its warm-up and counts the tokens it really consumed that are not padding.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from app.bench import material
from app.predict import run
from app.predict.config import PredictConfig
from app.train import launch, loop, model, packed
from app.train.config import TrainConfig


@dataclass
class Result:
    """Useful tokens a second in each measured window, and what went with them."""

    name: str
    windows: list[float] = field(default_factory=list)
    peak_bytes: int = 0  #: of device memory; 0 on the CPU
    tokens_an_update: float = 0.0  #: useful ones, in one micro-batch
    operations_a_token: float = 0.0  #: useful floating-point operations, for the share of the matrix rate

    @property
    def rate(self) -> float:
        """The median window."""
        return median(self.windows)

    def as_dict(self) -> dict[str, Any]:
        per = self.peak_bytes / self.tokens_an_update if self.tokens_an_update else 0.0
        return {
            "name": self.name, "useful_tokens_per_s": round(self.rate), "lowest": round(min(self.windows)),
            "highest": round(max(self.windows)), "windows": len(self.windows),
            "peak_memory_gib": round(self.peak_bytes / 2**30, 2), "memory_bytes_a_useful_token": round(per),
            "useful_tflops": round(self.rate * self.operations_a_token / 1e12, 2),
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How long to measure: ``windows`` of ``updates`` each after ``warmup`` updates."""

    windows: int
    updates: int
    warmup: int

    @property
    def steps(self) -> int:
        return self.warmup + self.windows * self.updates


@contextlib.contextmanager
def _device_memory() -> Iterator[Callable[[], int]]:
    """Starts from an empty device and gives the peak since."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield lambda: torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes away again, in memory where the machine has such a place."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def _build(task: str, size: str, data: Any) -> Any:
    config = TrainConfig(task=task, model=size)
    return model.build(model.choose(config), config, data, lambda line: None)


def _run(config: TrainConfig, data: Any, fp8: bool) -> dict[str, Any]:
    """One run of the trainer, without its progress bars; its result."""
    how = launch.resolve("gpu-fp16" if torch.cuda.is_available() else "cpu", launch.visible_gpus(), os.environ)
    Path(config.output_dir, "checkpoints").mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):
        ready = loop.Run(config, how, model.choose(config), data, lambda line: None)
        packed.use_fp8(ready.bert, fp8)
        code, result = ready.train()
        if code:  # the trainer has caught the signal that was meant for the bench
            raise SystemExit(code)
        return result


def ours(
    name: str, task: str, size: str, store: material.Rows, batch_size: int, plan: Plan, fp8: bool = False
) -> Result:
    """``python -m app.train`` with its own loader, loop, logging and final checkpoint; the windows are its logged lines."""
    with _scratch() as folder, _device_memory() as peak:
        (Path(folder) / "tokenizer").mkdir()
        data = material.training_data(store, Path(folder) / "tokenizer", task)
        config = TrainConfig(
            task=task, model=size, padding="packed", batch_size=batch_size, max_steps=plan.steps, eval_fraction=0.0,
            max_length=material.LONGEST, save_every=0, log_every=plan.updates, resume="never", output_dir=folder + "/out",
        )  # fmt: skip
        _run(config, data, fp8)
        lines = [json.loads(line) for line in Path(config.output_dir, "metrics.jsonl").read_text().splitlines()]
        logged = [line for line in lines if line["step"] > plan.warmup]
        result = Result(name, [line["useful_tokens_per_s"] for line in logged], peak())
        useful = [line["useful_tokens_per_s"] * line["update_ms"] / 1e3 for line in logged]
        result.tokens_an_update = float(np.mean(useful))
        return result


def learnt(size: str, sequences: int, padding: str, seed: int, fp8: bool = False) -> float:
    """The evaluation loss of MLM after two passes over ``sequences`` learnable rows of at most 128 tokens."""
    drawn = material.rows(sequences + 1000)
    store = material.Chains(np.minimum(drawn.lengths, 128), drawn.labels)
    with _scratch() as folder:
        (Path(folder) / "tokenizer").mkdir()
        data = material.training_data(store, Path(folder) / "tokenizer", "mlm", 1000)
        data = replace(data, max_length=128)
        config = TrainConfig(
            task="mlm", model=size, padding=padding, batch_size=32, epochs=2.0, max_length=128, seed=seed,
            save_every=0, log_every=100, resume="never", output_dir=folder + "/out",
        )  # fmt: skip
        return float(_run(config, data, fp8)["eval_loss"])


class _Sequences(torch.utils.data.Dataset[Any]):
    """The rows as Hugging Face's Trainer takes them."""

    column_names = ("input_ids", "labels")

    def __init__(self, store: material.Rows, task: str) -> None:
        self.store, self.task = store, task

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self.task == "mlm":
            ids, labels = material.masked(self.store, row)
            return {"input_ids": ids, "labels": labels}
        return {"input_ids": self.store.one(row), "labels": int(self.store.labels[row])}


@dataclass
class _Pad:
    """Pads a batch to ``width``, or to a multiple of 8 that holds its longest sequence."""

    width: int

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)
        width = self.width or -(-longest // 8) * 8
        ids, seen = np.zeros((len(batch), width), np.int64), np.zeros((len(batch), width), np.int64)
        labels = np.full((len(batch), width), -100)
        for place, row in enumerate(batch):
            count = len(row["input_ids"])
            ids[place, :count], seen[place, :count] = row["input_ids"], 1
            if not isinstance(row["labels"], int):
                labels[place, :count] = row["labels"]
        classes = isinstance(batch[0]["labels"], int)
        targets = np.array([row["labels"] for row in batch]) if classes else labels
        made = {"input_ids": ids, "attention_mask": seen, "labels": targets}
        return {key: torch.from_numpy(value) for key, value in made.items()}


def hugging_face(
    name: str,
    task: str,
    size: str,
    store: material.Rows,
    batch_size: int,
    plan: Plan,
    width: int = 0,
    grouped: bool = False,
) -> Result:
    """Hugging Face's Trainer: padded to ``width`` (0: to the longest of a batch), in random order or grouped by length.

    Grouped, its sampler sorts up to 50 batches at a time, longest first (get_length_grouped_indices in transformers'
    trainer_pt_utils.py): only a window of as many updates sees all lengths, so that is what is measured then.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    counted: list[torch.Tensor] = []
    marks: list[float] = []
    totals: list[float] = []

    class Counting(Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            counted.append(inputs["attention_mask"].sum())
            return super().training_step(model, inputs, *rest, **named)

    class Windows(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step >= plan.warmup and (state.global_step - plan.warmup) % plan.updates == 0:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())
                totals.append(float(sum(int(count) for count in counted)))
                counted.clear()

    options: dict[str, Any] = {}
    if grouped:  # renamed in transformers 5
        together = max(1, min(len(store) // (4 * batch_size), 50))
        plan = Plan(plan.windows, together, together)
        known = TrainingArguments.__dataclass_fields__
        options = (
            {"group_by_length": True} if "group_by_length" in known else {"train_sampling_strategy": "group_by_length"}
        )
    with _scratch() as folder, _device_memory() as peak:
        data = material.training_data(store, Path(folder), task)
        gpu = torch.cuda.is_available()
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch_size, max_steps=plan.steps, fp16=gpu,
            logging_steps=plan.steps + 1, report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
            dataloader_num_workers=min(8, len(os.sched_getaffinity(0))) if gpu else 0, **options,
        )  # fmt: skip
        trainer = Counting(
            model=_build(task, size, data), args=arguments, train_dataset=_Sequences(store, task),
            data_collator=_Pad(width), callbacks=[Windows()],
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        result = Result(name, [], peak())
        spans = zip(marks, marks[1:], totals[1:], strict=False)
        result.windows = [tokens / (end - begin) for begin, end, tokens in spans]
        result.tokens_an_update = sum(totals[1:]) / (plan.windows * plan.updates)
        return result


def _timed(work: Callable[[], list[int]], tokens: int, times: int) -> tuple[list[float], list[int]]:
    rates, answers = [], []
    for _ in range(times + 1):
        begin = time.perf_counter()
        answers = work()
        rates.append(tokens / (time.perf_counter() - begin))
    return rates[1:], answers


@torch.inference_mode()
def prediction(size: str, store: material.Rows, batch_size: int, times: int) -> list[Result]:
    """Classes of all rows, on the host in input order: padded in arrival order and sorted by length, and by our predictor.

    All start from token ids. Ours is what ``python -m app.predict`` does with a part of a file once it is tokenised.
    Raises RuntimeError if its answers are not the padded ones (99.5 % of the classes, as half precision rounds).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _scratch() as folder:
        data = material.training_data(store, Path(folder), "classify")
        net = _build("classify", size, data).to(device).eval()
        net = net.half() if device.type == "cuda" else net
        tokens, pad = int(store.lengths.sum()), _Pad(0)
        everything = [{"input_ids": store.one(row), "labels": 0} for row in range(len(store))]

        def padded(order: np.ndarray) -> list[int]:
            answers = torch.empty(len(store), dtype=torch.long)
            for at in range(0, len(order), batch_size):
                chosen = order[at : at + batch_size]
                batch = pad([everything[row] for row in chosen])
                ids, seen = batch["input_ids"].to(device), batch["attention_mask"].to(device)
                answers[torch.from_numpy(chosen)] = net(input_ids=ids, attention_mask=seen).logits.argmax(-1).cpu()
            return answers.tolist()

        config = PredictConfig(file=("rows.txt",))
        loaded = run.Loaded(net, data.tokenizer, "classes", material.LONGEST, store.label_names)
        row_tokens = config.tokens or (65536 if device.type == "cuda" else 4096)
        parts: list[run.Part] = []
        for first in range(0, len(store), config.rows_a_part):
            ids, bounds = store.ids(np.arange(first, min(first + config.rows_a_part, len(store))))
            parts.append(run.Part(len(parts), first, ids, bounds))

        def packed_rows() -> list[int]:
            found = [run._run_part(part, config, loaded, device, row_tokens) for part in parts]
            return [store.label_names.index(answer["label"]) for answers in found for answer in answers]

        arrival, by_length = np.arange(len(store)), np.argsort(-store.lengths, kind="stable")
        results, answers = [], []
        for name, work in (
            ("HF prediction, arrival order", lambda: padded(arrival)),
            ("HF prediction, sorted by length", lambda: padded(by_length)),
            ("prediction, packed", packed_rows),
        ):
            rates, found = _timed(work, tokens, times)
            results.append(Result(name, rates))
            answers.append(np.array(found))
        if (same := float((answers[0] == answers[2]).mean())) < 0.995:
            raise RuntimeError(f"packed prediction agrees with padded prediction on {same:.2%} of the rows only")
        return results
