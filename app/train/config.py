"""The trainer's options: one frozen dataclass, from which the command line, run.json and the checks are made."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app import options
from app.options import Check, option

DESCRIPTION = "Train BERT. Devices, precision and accumulation come from the Accelerate config."

SAVING_ONLY = {
    "output_dir",
    "resume",
    "num_workers",
    "save_every",
    "keep",
    "eval_every",
    "log_every",
    "cuda_graphs",
    "accelerate",
}
"""Options that may change between a run and its resumption, because no weight depends on them.

``accelerate`` is among them: what it decides (precision, sequences an update) is compared by itself.
"""

BATCHES = {"batch_size", "global_batch_size"}
"""Options behind the number of sequences an update, which is compared by itself."""


@dataclass(frozen=True)
class TrainConfig:
    """Every option of ``python -m app.train``. Lengths are in tokens, batches in sequences, cadences in updates."""

    task: str = option(
        "classify", "what to learn: classify a text, or mlm (masked language modelling)", choices=["classify", "mlm"]
    )
    train_file: tuple[str, ...] = option(
        (), "CSV, TSV, JSONL, Parquet or text files, also .gz; none: a generated sample", nargs="+", metavar="F"
    )
    eval_file: tuple[str, ...] = option(
        (), "files to evaluate on; none: a part of the training rows is held out", nargs="+", metavar="F"
    )
    eval_fraction: float = option(0.1, "share of the rows held out when there is no --eval-file; 0: no evaluation")
    text_column: str = option("text", "column that holds the text")
    label_column: str = option("label", "column that holds the class")
    encoding: str = option("utf-8", "encoding of CSV, JSONL and text files; a byte-order mark is removed")
    delimiter: str = option("", "column separator of CSV files; default: tab for .tsv, comma otherwise")
    on_bad_row: str = option(
        "stop", "a row that cannot be used: stop at it, or skip and count it", choices=["stop", "skip"]
    )
    model: str = option("", "folder, hub name, or bert-tiny|mini|small|base|large (from scratch); default: bert-tiny")
    tokenizer: str = option("", "folder or hub name; default: the model's, or one made from the training text")
    max_length: int = option(
        0,
        "longest sequence in tokens, [CLS] and [SEP] included; 0: 128 for classify and 512 for mlm, or what the model allows",
    )
    padding: str = option(
        "auto",
        "packed: sequences end to end in rows without padding; dynamic: to the longest of a batch; "
        "fixed: to --max-length",
        choices=["auto", "packed", "dynamic", "fixed"],
    )
    mask_fraction: float = option(0.15, "mlm: share of the tokens of a sequence to predict")
    whole_words: bool = option(False, "mlm: mask all pieces of a word together")
    batch_size: int = option(
        0, "sequences a device and micro-batch; packed: on average; 0: 32, or as --global-batch-size says"
    )
    global_batch_size: int = option(
        0,
        "sequences an update over all devices: its largest even division that fits in memory is found, and accumulation "
        "makes up the rest; 0: --batch-size x accumulation x processes",
    )
    epochs: float = option(3.0, "passes over the training rows")
    max_steps: int = option(0, "stop after this many updates; 0: as --epochs says")
    lr: float = option(
        0.0, "peak learning rate; 0: 5e-5 for a pretrained model; from scratch 5e-4, and 1e-4 for bert-base and larger"
    )
    warmup_ratio: float = option(
        -1.0,
        "share of the updates over which the learning rate rises; -1: 0.06, and from scratch, for bert-base and larger, BERT's 10,000 updates, "
        "but at most 0.3 of the run",
    )
    weight_decay: float = option(0.01, "AdamW weight decay, not on biases and layer norms")
    clip: float = option(1.0, "largest gradient norm; 0: no clipping")
    dropout: float = option(-1.0, "dropout of hidden layers and attention; -1: as the model says")
    seed: int = option(0, "one number for the split, the order, the masks, dropout and new weights")
    fp8: bool = option(
        False,
        "fp16 on a GPU from Ada or Hopper on: the layers' matrix products in 8 bits; on an H200 a third faster with bert-base, in a sixth less memory",
    )
    deterministic: bool = option(
        False,
        "same bytes of weights on the same machine and layout; 8 % slower on an H200 (BERT-base, rows of 21,248 tokens)",
    )
    num_workers: int = option(
        -1, "processes that prepare batches, for each training process; -1: by the CPU cores there are"
    )
    cuda_graphs: str = option(
        "auto",
        "auto: record the passes over packed rows on a GPU once and replay them, which spares the host; no: do not",
        choices=["auto", "no"],
    )
    compress_gradients: str = option(
        "no", "several processes: send gradients as fp16 or bf16", choices=["no", "fp16", "bf16"]
    )
    output_dir: str = option("out", "folder for checkpoints, metrics and the model")
    resume: str = option(
        "auto",
        "auto: go on from the newest whole checkpoint; never: refuse a used folder; or a checkpoint's folder",
        metavar="auto|never|DIR",
    )
    save_every: int = option(500, "updates between checkpoints; 0: only when stopped and at the end")
    keep: int = option(2, "newest checkpoints to keep; the best one is kept besides")
    eval_every: int = option(0, "updates between evaluations; 0: after every epoch")
    log_every: int = option(10, "updates between lines of metrics.jsonl")
    accelerate: str = option(
        "auto", "Accelerate config: auto, a name in app/accelerate, or a file", metavar="NAME|FILE"
    )

    def __post_init__(self) -> None:
        """Fill in what is decided by other options; raise one Fault that lists every option that is out of range."""
        check = Check(self)
        need = check.need
        need(0 <= self.eval_fraction < 1, "eval_fraction", "0 up to, but not including, 1")
        need(len(self.delimiter) <= 1 or self.delimiter == "\\t", "delimiter", "one character")
        need(self.max_length == 0 or self.max_length >= 4, "max_length", "0 or at least 4")
        need(0 < self.mask_fraction < 1, "mask_fraction", "between 0 and 1")
        need(self.batch_size >= 0, "batch_size", "at least 1, or 0")
        need(self.global_batch_size >= 0, "global_batch_size", "at least 1, or 0")
        need(
            not (self.global_batch_size and self.batch_size),
            "batch_size",
            "0 beside --global-batch-size, which finds it",
        )
        need(self.epochs > 0, "epochs", "more than 0")
        need(self.lr >= 0, "lr", "0 (the default rate) or more")
        need(
            self.warmup_ratio == -1 or 0 <= self.warmup_ratio < 1,
            "warmup_ratio",
            "-1, or 0 up to, but not including, 1",
        )
        need(self.weight_decay >= 0, "weight_decay", "0 or more")
        need(self.clip >= 0, "clip", "0 (off) or more")
        need(self.dropout == -1 or 0 <= self.dropout < 1, "dropout", "-1, or 0 up to, but not including, 1")
        need(self.num_workers >= -1, "num_workers", "-1 or more")
        need(0 <= self.seed < 2**31, "seed", "0 to 2147483647")
        for name in ("max_steps", "save_every", "eval_every"):
            need(getattr(self, name) >= 0, name, "0 or more")
        for name in ("keep", "log_every"):
            need(getattr(self, name) >= 1, name, "at least 1")
        need(bool(self.train_file) or not self.eval_file, "eval_file", "empty when there is no --train-file")
        check.done()
        if self.delimiter == "\\t":
            object.__setattr__(self, "delimiter", "\t")
        object.__setattr__(self, "model", self.model or "bert-tiny")
        if not self.global_batch_size:
            object.__setattr__(self, "batch_size", self.batch_size or 32)

    def decides_weights(self) -> dict[str, Any]:
        """The options that the trained weights depend on, as plain JSON values."""
        return {k: v for k, v in self.as_dict().items() if k not in SAVING_ONLY | BATCHES}

    @staticmethod
    def of_then(then: dict[str, Any]) -> dict[str, Any]:
        """What an earlier run recorded of its options, with the defaults of those that did not exist yet."""
        return {**TrainConfig().decides_weights(), **then}

    def as_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def parser() -> argparse.ArgumentParser:
    """The trainer's command line."""
    return options.parser(TrainConfig, "train", DESCRIPTION)


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Arguments to a checked TrainConfig; raises Fault, or SystemExit(0) after --help."""
    return options.parse(TrainConfig, "train", DESCRIPTION, arguments)
