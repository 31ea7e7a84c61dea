"""From files to a training and an evaluation set: tokenised rows, a label map, and a report of what is in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import Fault
from app.train import sample, tokenizers
from app.train.config import TrainConfig
from app.train.readers import Counts, Source, form, read
from app.train.show import Progress
from app.train.store import Store, cache_folder, content_hash, new_folder, nothing_usable, only_one, tokenised

COUNTED = 20_000  #: rows whose tokens are counted to see how often each occurs
HARDLY_BETTER = 0.99  #: an evaluation loss above this share of ``frequency_loss`` shows next to no use of context
BASELINES = ("chance_accuracy", "largest_class_accuracy", "frequency_loss")  #: of the report, what results stand beside


@dataclass(frozen=True)
class Split:
    """Some rows of a store. ``labels`` int64 [all rows of the store]: class ids of the model (zeros for MLM)."""

    store: Store
    rows: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class TrainingData:
    """What the loop needs of the data. ``evaluation`` is None when --eval-fraction is 0 and no --eval-file is given."""

    train: Split
    evaluation: Split | None
    label_names: list[str]
    tokenizer: tokenizers.BertTokenizer
    max_length: int
    files: dict[str, str]  # path as given -> sha256
    report: dict[str, Any]

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share with the data it goes on with."""
        return {
            "data": sorted(self.files.values()),
            "tokenizer": self.tokenizer.fingerprint,
            "max_length": self.max_length,
            "labels": self.label_names,
        }


def prepare(
    config: TrainConfig,
    model_tokenizer: str,
    vocabulary_size: int,
    positions: int,
    known_labels: list[str],
    say: Callable[[str], None],
) -> TrainingData:
    """Read, tokenise and split the data; CUDA is not touched.

    ``model_tokenizer``: where the model's own tokenizer is, "" to make one of ``vocabulary_size`` pieces. ``positions``: the longest sequence
    the model takes. ``known_labels``: the classes of a model that is trained on. Raises Fault for every fault of the files. Side effects:
    files below the cache folder. Processes of one machine may call this at once: one works, the others wait.
    """
    classify = config.task == "classify"
    max_length = config.max_length or min(128 if classify else 512, positions)
    if max_length > positions:
        raise Fault(
            f"--max-length {max_length} is above the {positions} positions of the model {config.model}; allowed is 4 to {positions}."
        )
    cache = cache_folder(Path(config.output_dir), say)
    train_files = list(config.train_file) or [_sample_file(cache, say)]
    for path in [*train_files, *config.eval_file]:
        form(path)
    files = {path: content_hash(path) for path in [*train_files, *config.eval_file]}
    source = Source(
        config.text_column,
        config.label_column if classify else "",
        config.encoding,
        config.delimiter,
        config.on_bad_row,
    )
    tokenizer = _tokenizer(config.tokenizer or model_tokenizer, vocabulary_size, train_files, files, source, cache, say)
    if tokenizer.vocabulary.size > vocabulary_size and model_tokenizer:
        raise Fault(
            f"the tokenizer has {tokenizer.vocabulary.size} pieces, the model {config.model} {vocabulary_size}; give the one that belongs to the model."
        )

    def load(paths: list[str]) -> Store:
        with Progress(f"tokenising {', '.join(Path(p).name for p in paths)}", "rows") as bar:
            return tokenised(
                paths, [files[p] for p in paths], source, tokenizer, max_length, not classify, cache, bar.advance
            )

    store = load(train_files)
    rows = np.arange(len(store))
    evaluation = None
    names = _label_names(store, known_labels, say) if classify else []
    if config.eval_file:
        held = load(list(config.eval_file))
        evaluation = Split(held, np.arange(len(held)), _class_ids(held, names, classify))
    elif config.eval_fraction:
        count = round(len(rows) * config.eval_fraction)
        if not 0 < count < len(rows):
            raise Fault(
                f"{len(rows)} rows leave nothing to {'evaluate on' if not count else 'train on'} with --eval-fraction {config.eval_fraction}; "
                "give --eval-file, more rows, or --eval-fraction 0."
            )
        mixed = np.random.Generator(np.random.PCG64([config.seed, 0x5917])).permutation(len(rows))
        evaluation = Split(store, np.sort(mixed[:count]), _class_ids(store, names, classify))
        rows = np.sort(mixed[count:])
    train = Split(store, rows, _class_ids(store, names, classify))
    report = _report(train, evaluation, names)
    if evaluation and not classify:
        report["frequency_loss"] = frequency_loss(train, evaluation, tokenizer.vocabulary.special)
    return TrainingData(train, evaluation, names, tokenizer, max_length, files, report)


def _sample_file(cache: Path, say: Callable[[str], None]) -> str:
    path = cache / "sample" / "english-chinese.jsonl"
    with_text = "".join(sample.lines())
    cache.mkdir(parents=True, exist_ok=True)
    with only_one(cache / "sample.lock"):
        if not path.is_file() or path.read_text(encoding="utf-8") != with_text:
            import shutil

            shutil.rmtree(path.parent, ignore_errors=True)
            with new_folder(path.parent) as making:
                (making / path.name).write_text(with_text, encoding="utf-8")
    say(f"no --train-file: training on the generated sample {path} ({sample.ROWS} English and Chinese texts)")
    return str(path)


def _tokenizer(
    named: str,
    size: int,
    train_files: list[str],
    files: dict[str, str],
    source: Source,
    cache: Path,
    say: Callable[[str], None],
) -> tokenizers.BertTokenizer:
    if named:
        return tokenizers.load(named, cache)
    asked = [
        [files[p] for p in train_files],
        source.text_column,
        source.encoding,
        source.delimiter,
        source.on_bad_row,
        size,
        tokenizers.VERSION,
    ]
    folder = cache / "vocabularies" / hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with only_one(folder.with_suffix(".lock")):
        if not folder.is_dir():
            say(f"making a vocabulary of at most {size} pieces from the training text")
            unlabelled = Source(source.text_column, "", source.encoding, source.delimiter, source.on_bad_row)
            with new_folder(folder) as making:
                tokenizers.make(lambda: _texts(train_files, unlabelled), size, making)
    return tokenizers.wrap(folder)


def _texts(files: list[str], source: Source) -> Iterator[str]:
    counts, any_row = Counts(), False
    for path in files:
        for row in read(path, source, counts):
            any_row = True
            yield row.text
    if not any_row:
        raise nothing_usable(files, counts)


def _label_names(store: Store, known: list[str], say: Callable[[str], None]) -> list[str]:
    """The classes in a stable order: numbers by value, else by text. The order of a model that has just these classes is kept."""
    names = store.label_names
    if len(names) < 2:
        raise Fault(
            f"all {len(store)} rows have the one class {names[0]!r}; classification needs at least two. Check --label-column, or pass --task mlm."
        )
    if known and set(names) <= set(known):
        say(f"labels: the map of the model is kept ({len(known)} classes)")
        return known
    if len(names) > 1000 and len(names) > len(store) / 4:
        raise Fault(
            f"--label-column has {len(names)} different values in {len(store)} rows, the first {names[0]!r}; that is no class. Check --label-column."
        )
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)


def _class_ids(store: Store, names: list[str], classify: bool) -> np.ndarray:
    if not classify:
        return np.zeros(len(store), np.int64)
    unseen = [n for n in store.label_names if n not in names]
    if unseen:
        count, where = store.facts.labels[unseen[0]]
        raise Fault(
            f"{where}: the class {unseen[0]!r} ({count} rows) is not among the {len(names)} of the training files ({', '.join(map(repr, names[:8]))}...); "
            "correct the label, or add training rows of that class."
        )
    places = {name: i for i, name in enumerate(names)}
    return np.array([places[n] for n in store.label_names], np.int64)[store.labels]


def _report(train: Split, evaluation: Split | None, names: list[str]) -> dict[str, Any]:
    """Counts and shares that a person wants to see before training; plain JSON values."""
    facts = train.store.facts
    lengths = train.store.lengths[train.rows]
    report: dict[str, Any] = {
        "train_rows": len(train.rows),
        "eval_rows": len(evaluation.rows) if evaluation else 0,
        "tokens": int(lengths.sum()),
        "length_median_p95_max": [int(np.median(lengths)), int(np.percentile(lengths, 95)), int(lengths.max())],
        "longer_than_max_length": facts.truncated,
        "unknown_token_share": facts.unknown / max(1, facts.tokens),
        "replacement_characters": facts.replacement_characters,
        "bad_rows_skipped": facts.bad,
        "bad_row_examples": facts.bad_examples,
        "duplicates_in_evaluation": 0,
    }
    if evaluation:
        seen = np.unique(train.store.text_hashes[train.rows])
        report["duplicates_in_evaluation"] = int(np.isin(evaluation.store.text_hashes[evaluation.rows], seen).sum())
    if names:
        counts = np.bincount(train.labels[train.rows], minlength=len(names))
        report["classes"] = {name: int(c) for name, c in zip(names, counts, strict=True)}
        basis = evaluation or train
        shares = np.bincount(basis.labels[basis.rows], minlength=len(names)) / len(basis.rows)
        report["chance_accuracy"] = 1 / len(names)
        report["largest_class_accuracy"] = float(shares[int(counts.argmax())])
    return report


def frequency_loss(train: Split, evaluation: Split, special: np.ndarray) -> float:
    """What the evaluation loss of a masked-language model would be that knew only how often each token occurs.

    Tokens are counted in up to ``COUNTED`` rows of each part, spread evenly; ``special`` ones never have to be found.
    One that was not seen in training counts half (Krichevsky and Trofimov 1981).
    """

    def counts(split: Split) -> np.ndarray:
        chosen = np.linspace(0, len(split.rows) - 1, min(len(split.rows), COUNTED)).astype(int)
        ids, _ = split.store.ids(split.rows[chosen])
        return np.where(special, 0, np.bincount(ids, minlength=len(special)))

    known, asked = np.where(special, 0, counts(train) + 0.5), counts(evaluation)
    there = asked > 0
    return float(-(asked[there] * np.log(known[there] / known.sum())).sum() / max(1, asked.sum()))


def report_lines(report: dict[str, Any], max_length: int) -> list[str]:
    """The report as sentences; warnings begin with ``warning:`` and say what to do."""
    median, p95, longest = report["length_median_p95_max"]
    lines = [
        f"data: {report['train_rows']} training and {report['eval_rows']} evaluation rows, {report['tokens']} tokens, "
        f"length median {median}, 95 % {p95}, longest {longest}"
    ]
    if "classes" in report:
        ranked = sorted(report["classes"].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {count}" for name, count in ranked[:8]) + (
            f" and {len(ranked) - 8} more" if len(ranked) > 8 else ""
        )
        lines.append(f"classes: {len(ranked)} ({shown})")
    if "frequency_loss" in report:
        lines.append(
            f"knowing only how often each token occurs gives an evaluation loss of {report['frequency_loss']:.4f}"
        )
    if report["longer_than_max_length"]:
        what = "cut" if "classes" in report else "split into several sequences"
        lines.append(
            f"{report['longer_than_max_length']} texts are longer than --max-length {max_length} and were {what}"
        )
    if report["unknown_token_share"] > 0.02:
        lines.append(
            f"warning: {report['unknown_token_share']:.1%} of the tokens are unknown to this vocabulary; it is made for another language or "
            "script: give another --model or --tokenizer (for Chinese one with Chinese characters)"
        )
    if report["replacement_characters"]:
        lines.append(
            f"warning: the text holds {report['replacement_characters']} replacement characters (U+FFFD): it was once decoded wrongly; "
            "go back to the original and pass --encoding"
        )
    if report["bad_rows_skipped"]:
        lines.append(
            f"warning: {report['bad_rows_skipped']} bad rows skipped, for example: "
            + "; ".join(report["bad_row_examples"][:3])
        )
    if report["duplicates_in_evaluation"]:
        lines.append(
            f"warning: {report['duplicates_in_evaluation']} of {report['eval_rows']} evaluation texts stand in the training rows too; "
            "the evaluation is that much too good"
        )
    return lines
