"""Which contenders meet in what, and the figures that come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

import torch

from app.bench import contenders, material
from app.bench.contenders import Plan, Result
from app.measure.flops import of_bert
from app.train import packed_fused

USUAL = "HF Trainer, padded to 512"
GROUPED = "HF Trainer, grouped by length"
DYNAMIC = "HF Trainer, dynamic padding"
ROW_TOKENS = 65536  #: of our packed rows on a GPU


@dataclass(frozen=True)
class Figure:
    """One line of the goals: a ratio or a rate, with what it must and should be. ``share``: percent of the matrix rate."""

    name: str
    value: float
    must: float
    aim: float
    share: bool = False
    smaller: bool = False

    def as_dict(self, matrix_tflops: float) -> dict[str, Any]:
        value = 100 * self.value / matrix_tflops if self.share else self.value
        reached = [value <= goal if self.smaller else value >= goal for goal in (self.must, self.aim)]
        verdict = "aim reached" if reached[1] else "must reached" if reached[0] else "below must"
        measured = round(value) if value > 1000 else round(value, 2)
        return {"name": self.name, "measured": measured, "must": self.must, "aim": self.aim, "verdict": verdict}


def matrix_rate() -> float:
    """FLOP/s of a large matrix product here: fp16 of random numbers on a GPU, fp32 on a CPU; median of 9."""
    gpu = torch.cuda.is_available()
    size = 8192 if gpu else 1024
    a, b = torch.randn(2, size, size, device="cuda" if gpu else "cpu", dtype=torch.float16 if gpu else torch.float32)
    times = []
    for _ in range(12):
        if gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        a @ b
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / median(times[3:])


def run(parts: Sequence[str], windows: int, gpu: bool, done: Callable[[Result], None]) -> None:
    """Measure the parts, handing over every result at once; on a CPU with BERT-mini, smaller batches and no large."""
    size = "bert-base" if gpu else "bert-mini"
    store = material.rows(60000 if gpu else 640)
    packed_batch = int(ROW_TOKENS / float(store.lengths.mean())) if gpu else 16
    fp8 = gpu and packed_fused.why_not_fp8(torch.device("cuda", 0)) is None
    small, large = (32, 128) if gpu else (8, 16)
    plan = Plan(windows, 10, 20) if gpu else Plan(windows, 1, 1)

    def measure(name: str, work: Callable[..., Result], task: str, size: str, *rest: Any, **named: Any) -> None:
        result = work(name, task, size, store, *rest, **named)
        result.operations_a_token = _operations(task, size, store)
        done(result)

    if "mlm" in parts:
        label = f"{size} MLM"
        measure(f"{label}, {USUAL}, batch {small}", contenders.hugging_face, "mlm", size, small, plan, width=512)
        measure(f"{label}, {DYNAMIC}, batch {large}", contenders.hugging_face, "mlm", size, large, plan)
        measure(f"{label}, {GROUPED}, batch {large}", contenders.hugging_face, "mlm", size, large, plan, grouped=True)
        measure(f"{label}, packed", contenders.ours, "mlm", size, packed_batch, plan)
        if fp8:
            measure(f"{label}, packed, fp8", contenders.ours, "mlm", size, packed_batch, plan, fp8=True)
    if "classify" in parts:
        label = f"{size} classification"
        measure(
            f"{label}, {GROUPED}, batch {large}", contenders.hugging_face, "classify", size, large, plan, grouped=True
        )
        measure(f"{label}, packed", contenders.ours, "classify", size, packed_batch, plan)
        if fp8:
            measure(f"{label}, packed, fp8", contenders.ours, "classify", size, packed_batch, plan, fp8=True)
    if "large" in parts and gpu:
        measure("bert-large MLM, packed", contenders.ours, "mlm", "bert-large", packed_batch, plan)
        if fp8:
            measure("bert-large MLM, packed, fp8", contenders.ours, "mlm", "bert-large", packed_batch, plan, fp8=True)
    if "predict" in parts:
        few = material.rows(8192 if gpu else 256, seed=1)
        for result in contenders.prediction(size, few, 128 if gpu else 32, windows):
            done(result)


def accuracy(gpu: bool, done: Callable[[dict[str, Any]], None]) -> None:
    """Hands over the evaluation losses after the same tokens, three seeds each: padded through Hugging Face's forward, and packed."""
    size, sequences = ("bert-mini", 6000) if gpu else ("bert-tiny", 4000)
    kinds = [("padded to 128", "fixed", False), ("packed", "packed", False)]
    if gpu and packed_fused.why_not_fp8(torch.device("cuda", 0)) is None:
        kinds.append(("packed, fp8", "packed", True))
    for name, padding, fp8 in kinds:
        losses = [contenders.learnt(size, sequences, padding, seed, fp8) for seed in range(3)]
        done({"name": f"{size} MLM, {name}", "eval_losses": losses, "mean": mean(losses), "deviation": stdev(losses)})


def _operations(task: str, size: str, store: material.Rows) -> float:
    """Useful operations to train on one token of these rows."""
    from transformers import BertConfig

    from app.train.model import PRESETS

    layers, hidden = PRESETS[size]
    config = BertConfig(
        vocab_size=material.VOCABULARY, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden
    )
    tokens, squares = int(store.lengths.sum()), int((store.lengths**2).sum())
    targets = int(material.target_counts(store.lengths, material.MASK_FRACTION).sum())
    return of_bert(config, task).training(tokens, squares, targets, len(store)) / tokens


def figures(results: dict[str, Result], gpu: bool) -> list[Figure]:
    """The goals that these results can speak to: on a GPU those set for one H200, on a CPU being faster than the peers."""

    def find(*words: str) -> Result | None:
        return next((r for name, r in results.items() if all(word in name for word in words)), None)

    made: list[Figure] = []

    def ratio(name: str, mine: Result | None, other: Result | None, must: float, aim: float) -> None:
        if mine and other:
            made.append(Figure(name, mine.rate / other.rate, *((must, aim) if gpu else (1.0, 1.0))))

    large, large_eight = find("bert-large MLM, packed"), find("bert-large MLM, packed, fp8")
    grouped, usual, dynamic = find("MLM", GROUPED), find("MLM", USUAL), find("MLM", DYNAMIC)
    for kind, eight in (("", ""), ("with fp8: ", ", fp8")):
        mine = next(
            (r for name, r in results.items() if name.endswith(f"MLM, packed{eight}") and "large" not in name), None
        )
        classify = next((r for name, r in results.items() if name.endswith(f"classification, packed{eight}")), None)
        ratio(f"{kind}MLM against HF Trainer at its best (grouped by length), times", mine, grouped, 4, 5)
        ratio(f"{kind}MLM against the usual recipe (padded to 512), times", mine, usual, 10, 12)
        ratio(
            f"{kind}classification against HF Trainer grouped by length, times",
            classify,
            find("classif", GROUPED),
            3,
            4,
        )
        if gpu and mine:
            name = f"{kind}MLM, useful operations, % of the measured fp16 matrix rate"
            made.append(Figure(name, _tflops(mine), 50, 60, share=True))
        if gpu and mine and dynamic:
            value = mine.peak_bytes / mine.tokens_an_update / (dynamic.peak_bytes / dynamic.tokens_an_update)
            name = f"{kind}memory a useful token against HF dynamic padding, times"
            made.append(Figure(name, value, 0.3, 0.2, smaller=True))
    predicted = find("prediction, packed")
    ratio("prediction against HF in arrival order, times", predicted, find("arrival order"), 4, 5)
    ratio("prediction against HF sorted by length, times", predicted, find("sorted by length"), 1.3, 1.6)
    for name, result in (("BERT-large", large), ("with fp8: BERT-large", large_eight)):
        if gpu and result:
            made.append(Figure(f"{name}, useful tokens/s", result.rate, 230_000, 260_000))
    return made


def _tflops(result: Result) -> float:
    return result.rate * result.operations_a_token / 1e12
