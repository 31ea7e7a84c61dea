"""Tokenised rows on disk, memory-mapped: made once for the same content and options, whatever the number of processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import WRONG_MACHINE, Fault
from app.train.readers import Counts, Row, Source, read
from app.train.tokenizers import BertTokenizer

FORMAT = 1  #: raise it when the meaning of a stored column changes
BATCH_CHARACTERS = 1 << 20
LONGEST_TEXT = 1 << 17  #: characters tokenised at once; a longer MLM text is cut before it is tokenised


def cache_folder(output_dir: Path, say: Callable[[str], None]) -> Path:
    """The first of $KIT_CACHE, the user's cache folder and ``output_dir``/cache that can be written; says so if it is not the first.

    Raises Fault if none can be written. Side effect: the folder is made.
    """
    named = os.environ.get("KIT_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/")) / ".cache") / "bert-kit"
    wanted = [Path(named)] if named else [home]
    problems = []
    for folder in [*wanted, output_dir / "cache"]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as e:
            problems.append(f"{folder}: {e.strerror}")
            continue
        if problems:
            say(f"cache: {problems[0]}, so {folder} is used; set KIT_CACHE to a folder that can be written")
        return folder
    raise Fault(
        f"no folder for the tokenised data can be written ({'; '.join(problems)}); set KIT_CACHE to one that can.",
        WRONG_MACHINE,
    )


def content_hash(path: str) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    except FileNotFoundError:
        raise Fault(f"{path}: no such file (looked from {Path.cwd()}). Check --train-file and --eval-file.") from None
    except IsADirectoryError:
        raise Fault(f"{path} is a folder; name the files in it, for example {path}/*.csv") from None
    except OSError as e:
        raise Fault(f"{path} cannot be read: {e.strerror}.") from None
    return digest.hexdigest()


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Let one process at a time through; the others of this machine wait."""
    with open(lock, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder under a temporary name beside ``target`` that becomes ``target`` only when the block ends well."""
    making = Path(tempfile.mkdtemp(prefix=target.name + ".making-", dir=target.parent))
    try:
        yield making
        os.replace(making, target)
    except OSError as e:
        raise Fault(
            f"{target.parent} could not be written: {e.strerror} ({shutil.disk_usage(target.parent).free >> 20} MiB free). "
            "Make room, or set KIT_CACHE to another disk.",
            WRONG_MACHINE,
        ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


@dataclass
class Facts:
    """What was seen while tokenising, for the data report. ``labels`` maps a label to [rows, where it first stood]."""

    rows: int
    tokens: int
    truncated: int
    unknown: int
    replacement_characters: int
    blank: int
    bad: int
    bad_examples: list[str]
    labels: dict[str, list[Any]]


class Store:
    """Tokenised rows, memory-mapped. ``lengths`` int64 [rows] with [CLS] and [SEP]; ``labels`` int32 [rows], indices into ``label_names``."""

    def __init__(self, folder: Path) -> None:
        from datasets import Dataset

        self.folder = folder
        self.facts = Facts(**json.loads((folder / "facts.json").read_text()))
        self.label_names = list(self.facts.labels)
        table = Dataset.from_file(str(folder / "rows.arrow")).data
        self._values, self._offsets, starts = [], [], [0]
        lengths, labels, hashes = [], [], []
        for batch in table.to_batches():
            column = batch.column("input_ids")
            offsets = column.offsets.to_numpy()
            self._values.append(column.values.to_numpy())
            self._offsets.append(offsets)
            starts.append(starts[-1] + len(batch))
            lengths.append(np.diff(offsets))
            labels.append(batch.column("label").to_numpy())
            hashes.append(batch.column("text_hash").to_numpy())
        self._starts = np.array(starts)
        self.lengths = np.concatenate(lengths).astype(np.int64) if lengths else np.zeros(0, np.int64)
        self.labels = np.concatenate(labels) if labels else np.zeros(0, np.int32)
        self.text_hashes = np.concatenate(hashes) if hashes else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of ``rows`` end to end, int64 [tokens], and the bounds of the sequences, int64 [len(rows) + 1]."""
        bounds = np.concatenate([[0], np.cumsum(self.lengths[rows])])
        out = np.empty(int(bounds[-1]), np.int64)
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        for i, (row, chunk) in enumerate(zip(rows.tolist(), chunks.tolist(), strict=True)):
            offsets = self._offsets[chunk]
            at = row - int(self._starts[chunk])
            out[bounds[i] : bounds[i + 1]] = self._values[chunk][offsets[at] : offsets[at + 1]]
        return out, bounds


def tokenised(
    files: list[str],
    hashes: list[str],
    source: Source,
    tokenizer: BertTokenizer,
    max_length: int,
    split_long: bool,
    cache: Path,
    progress: Callable[[int], None],
) -> Store:
    """The rows of ``files`` as token ids, from the cache if the same bytes were tokenised before with the same options.

    ``split_long``: a text longer than ``max_length`` becomes several sequences (MLM), else it is cut and counted (classification).
    ``progress`` is called with the number of rows done. Memory does not grow with the files. Side effect: a folder below ``cache``.
    """
    asked = [FORMAT, hashes, asdict(source), tokenizer.fingerprint, max_length, split_long]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]
    folder = cache / "rows" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with only_one(folder.with_suffix(".lock")):
        if not folder.is_dir():
            with new_folder(folder) as making:
                _write(making, files, source, tokenizer, max_length, split_long, progress)
    return Store(folder)


def _write(
    folder: Path,
    files: list[str],
    source: Source,
    tokenizer: BertTokenizer,
    max_length: int,
    split_long: bool,
    progress: Callable[[int], None],
) -> None:
    import pyarrow as pa
    from datasets import Features, Sequence, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features({"input_ids": Sequence(Value("int32")), "label": Value("int32"), "text_hash": Value("int64")})
    counts, facts = Counts(), Facts(0, 0, 0, 0, 0, 0, 0, [], {})
    names: dict[str, int] = {}
    room = max_length - 2
    with ArrowWriter(path=str(folder / "rows.arrow"), features=features) as writer:
        for rows in _batches(files, source, counts):
            texts = [r.text if split_long else r.text[: 1000 * max_length] for r in rows]
            pieces = [_pieces(t) if split_long else [t] for t in texts]
            encoded = iter(tokenizer.backend.encode_batch([p for ps in pieces for p in ps], add_special_tokens=False))
            ids, labels, hashes = [], [], []
            for row, parts in zip(rows, pieces, strict=True):
                whole: list[int] = []
                for _ in parts:
                    whole += next(encoded).ids
                facts.replacement_characters += row.text.count("\ufffd")
                facts.unknown += whole.count(tokenizer.unk)
                if len(whole) > room:
                    facts.truncated += 1
                label = names.setdefault(row.label, len(names))
                seen = facts.labels.setdefault(row.label, [0, f"{row.file}, line {row.line}"])
                seen[0] += 1
                mark = int.from_bytes(
                    hashlib.blake2b(row.text.encode("utf-8", "surrogatepass"), digest_size=8).digest(),
                    "big",
                    signed=True,
                )
                for at in range(0, max(1, len(whole)), room) if split_long else (0,):
                    ids.append([tokenizer.cls, *whole[at : at + room], tokenizer.sep])
                    labels.append(label)
                    hashes.append(mark)
            facts.rows += len(ids)
            facts.tokens += sum(map(len, ids))
            writer.write_table(
                pa.table(
                    {
                        "input_ids": pa.array(ids, pa.list_(pa.int32())),
                        "label": pa.array(labels, pa.int32()),
                        "text_hash": pa.array(hashes, pa.int64()),
                    }
                )
            )
            progress(len(rows))
        if not facts.rows:
            raise nothing_usable(files, counts)
        writer.finalize()
    facts.blank, facts.bad, facts.bad_examples = counts.blank, counts.bad, counts.examples
    (folder / "facts.json").write_text(json.dumps(asdict(facts), ensure_ascii=False))


def nothing_usable(files: list[str], counts: Counts) -> Fault:
    """The fault of files in which no row is left."""
    first = f", the first: {counts.examples[0]}" if counts.examples else ""
    has = "has" if len(files) == 1 else "have"
    return Fault(f"{', '.join(files)} {has} no usable rows ({counts.blank} blank, {counts.bad} bad{first}).")


def _pieces(text: str) -> list[str]:
    """A very long text cut at white space, so that a corpus in one line does not need its own size in memory many times over."""
    parts = []
    while len(text) > LONGEST_TEXT:
        cut = max(text.rfind(" ", 0, LONGEST_TEXT), text.rfind("\n", 0, LONGEST_TEXT))
        cut = cut if cut > LONGEST_TEXT // 2 else LONGEST_TEXT
        parts.append(text[:cut])
        text = text[cut:]
    return [*parts, text]


def _batches(files: list[str], source: Source, counts: Counts) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for path in files:
        for row in read(path, source, counts):
            batch.append(row)
            characters += len(row.text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
