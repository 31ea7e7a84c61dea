"""Prediction itself: rows are read and tokenised ahead, packed end to end without padding, and put back into their order."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from app.errors import WRONG_INPUT, Fault
from app.predict.config import PredictConfig
from app.predict.parts import Parts
from app.train import packed, packed_attention
from app.train.batches import PackedShape
from app.train.collate import packed_row
from app.train.readers import Counts, Row, Source, read
from app.train.tokenizers import BertTokenizer


@dataclass(frozen=True)
class Part:
    """Some consecutive rows, tokenised. ``ids`` are end to end, ``bounds`` their bounds."""

    number: int
    first_row: int
    ids: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True)
class Loaded:
    """A model ready to predict. ``what`` is classes, embeddings or masks."""

    model: Any
    tokenizer: BertTokenizer
    what: str
    max_length: int
    labels: list[str]


def load(config: PredictConfig, tokenizer: BertTokenizer, device: torch.device) -> Loaded:
    """The model on ``device``, in fp16 on a GPU. Raises Fault if it is not BERT or cannot do what is asked."""
    from transformers import AutoConfig, BertForMaskedLM, BertForSequenceClassification, BertModel
    from transformers.utils import logging

    from app.train.tokenizers import unreachable

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        described = AutoConfig.from_pretrained(config.model)
        kinds = described.architectures or []
        own = (
            "classes"
            if "BertForSequenceClassification" in kinds
            else "masks"
            if "BertForMaskedLM" in kinds
            else "embeddings"
        )
        what = own if config.what == "auto" else config.what
        if what not in (own, "embeddings"):
            raise Fault(
                f"{config.model} is a {', '.join(kinds) or 'BertModel'} and gives {own}, not {what}; use --what {own} or --what embeddings."
            )
        kind = {"classes": BertForSequenceClassification, "masks": BertForMaskedLM, "embeddings": BertModel}[what]
        model = kind.from_pretrained(config.model)
    except (OSError, ValueError, KeyError) as e:
        raise Fault(unreachable("model", config.model, e)) from None
    packed.check_model(model)
    model = model.to(device).eval()
    model = model.half() if device.type == "cuda" else model.float()
    positions = described.max_position_embeddings
    trained = tokenizer.model_max_length if tokenizer.model_max_length <= positions else positions
    length = config.max_length or trained
    if length > positions:
        raise Fault(
            f"--max-length {length} is above the {positions} positions of {config.model}; allowed is 4 to {positions}."
        )
    return Loaded(
        model, tokenizer, what, length, [str(described.id2label[i]) for i in sorted(described.id2label or {})]
    )


def predict(
    config: PredictConfig,
    loaded: Loaded,
    parts: Parts,
    device: torch.device,
    process: int,
    processes: int,
    stop: Callable[[], bool],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Make this process's parts (every ``processes``-th) that are not there yet; returns counts and seconds.

    Ends early when ``stop()`` is true; what is written stays.
    """
    tokens = config.tokens or (65536 if device.type == "cuda" else 4096)
    made: queue.Queue[Any] = queue.Queue(maxsize=3)
    gone = threading.Event()
    reader = threading.Thread(
        target=_read_ahead, args=(config, loaded, parts, process, processes, made, gone), daemon=True
    )
    reader.start()
    counted = {"rows": 0, "useful_tokens": 0, "parts": 0, "made_rows": 0}
    began = time.perf_counter()
    pending: Future[None] | None = None
    with ThreadPoolExecutor(1) as writer:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, tuple):
                counted["parts"], counted["rows"] = item
                continue
            if stop():
                gone.set()
                break
            results = _run_part(item, config, loaded, device, tokens)
            if pending:
                pending.result()
            pending = writer.submit(parts.write, item.number, results)
            counted["useful_tokens"] += len(item.ids)
            counted["made_rows"] += len(item.bounds) - 1
            progress(len(item.bounds) - 1)
        if pending:
            pending.result()
    return {**counted, "seconds": time.perf_counter() - began}


def _read_ahead(
    config: PredictConfig,
    loaded: Loaded,
    parts: Parts,
    process: int,
    processes: int,
    made: queue.Queue[Any],
    gone: threading.Event,
) -> None:
    """Put tokenised Parts of this process into ``made``, then (parts, rows) in all, then None; an exception instead, if there is one."""
    try:
        source = Source(config.text_column, "", config.encoding, config.delimiter, "stop", empty_texts=True)
        rows: Iterator[Row] = chain.from_iterable(read(path, source, Counts()) for path in config.file)
        number = first = 0
        while some := list(islice(rows, config.rows_a_part)):
            if gone.is_set():
                return
            if number % processes == process and not parts.path(number).is_file():
                made.put(_tokenise(some, number, first, loaded))
            number, first = number + 1, first + len(some)
        made.put((number, first))
        made.put(None)
    except BaseException as error:
        made.put(error)


def _tokenise(rows: list[Row], number: int, first: int, loaded: Loaded) -> Part:
    tokenizer, room = loaded.tokenizer, loaded.max_length - 2
    # [MASK] in a text is a mask where masks are asked for, and text everywhere else.
    tokenizer.backend.encode_special_tokens = loaded.what != "masks"
    texts = [row.text[: 1000 * loaded.max_length] for row in rows]
    ids: list[int] = []
    bounds = [0]
    for encoding in tokenizer.backend.encode_batch(texts, add_special_tokens=False):
        ids += [tokenizer.cls, *encoding.ids[:room], tokenizer.sep]
        bounds.append(len(ids))
    return Part(number, first, np.array(ids, np.int64), np.array(bounds, np.int64))


def _run_part(
    part: Part, config: PredictConfig, loaded: Loaded, device: torch.device, tokens: int
) -> list[dict[str, Any]]:
    """The results of a part, in its order. Waits for the device once, at the end."""
    lengths = np.diff(part.bounds)
    ordered = np.argsort(-lengths, kind="stable")
    sizes = np.concatenate([[0], np.cumsum(lengths[ordered])])
    outputs, at = [], 0
    while at < len(ordered):
        end = max(at + 1, int(np.searchsorted(sizes, sizes[at] + tokens, side="right")) - 1)
        outputs.append(_run_row(part, ordered[at:end], config, loaded, device))
        at = end
    answers: list[dict[str, Any]] = [{}] * len(lengths)
    for row, answer in zip(ordered.tolist(), chain.from_iterable(finish() for finish in outputs), strict=True):
        answers[row] = {"row": part.first_row + row, **answer}
    return answers


@torch.inference_mode()
def _run_row(
    part: Part, rows: np.ndarray, config: PredictConfig, loaded: Loaded, device: torch.device
) -> Callable[[], list[dict[str, Any]]]:
    """Launch one packed row; what it returns reads the results back."""
    ids = np.concatenate([part.ids[part.bounds[r] : part.bounds[r + 1]] for r in rows.tolist()])
    bounds = np.concatenate([[0], np.cumsum(np.diff(part.bounds)[rows])])
    shape = PackedShape(math.ceil(len(ids) / 128) * 128, len(rows), 0, loaded.max_length)
    input_ids, positions, starts = packed_row(ids, bounds, shape)
    masks = np.flatnonzero(ids == loaded.tokenizer.mask) if loaded.what == "masks" else bounds[:-1]
    host_lengths = (
        tuple(np.diff(starts).tolist()) if not packed_attention.has_flash(device, loaded.model.dtype) else None
    )
    where = torch.from_numpy(masks)
    batch = packed.PackedBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(positions),
        None,
        torch.from_numpy(starts),
        shape.longest,
        where,
        torch.zeros_like(where),
        host_lengths,
    ).to(device)
    if loaded.what == "classes":
        probabilities = packed.classification_logits(loaded.model, batch).float().softmax(-1)
        return lambda: [_class(values, loaded.labels) for values in probabilities.cpu().tolist()]
    if loaded.what == "embeddings":
        vectors = _embed(packed.encode(loaded.model, batch)[: len(ids)], bounds, config.pooling, device)
        return lambda: [{"embedding": values} for values in vectors.cpu().tolist()]
    best = (
        packed.mlm_logits(loaded.model, batch)[:, : loaded.tokenizer.vocabulary.size]
        .float()
        .softmax(-1)
        .topk(config.top)
    )
    owner = np.searchsorted(bounds, masks, side="right") - 1
    return lambda: _guesses(
        best.values.cpu().tolist(), best.indices.cpu().tolist(), owner.tolist(), len(rows), loaded.tokenizer
    )


def _class(values: list[float], labels: list[str]) -> dict[str, Any]:
    best = max(range(len(values)), key=values.__getitem__)
    return {"label": labels[best], "probability": values[best], "probabilities": dict(zip(labels, values, strict=True))}


def _embed(hidden: torch.Tensor, bounds: np.ndarray, pooling: str, device: torch.device) -> torch.Tensor:
    """float32 [sequences, hidden]: the mean over the tokens of each sequence, or its first token."""
    if pooling == "cls":
        return hidden[torch.from_numpy(bounds[:-1]).to(device)].float()
    lengths = torch.from_numpy(np.diff(bounds)).to(device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=len(hidden))
    return (
        torch.zeros(len(lengths), hidden.shape[1], device=device).index_add_(0, owner, hidden.float())
        / lengths[:, None]
    )


def _guesses(
    values: list[list[float]], ids: list[list[int]], owner: list[int], count: int, tokenizer: BertTokenizer
) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [{"masks": []} for _ in range(count)]
    for row, probabilities, pieces in zip(owner, values, ids, strict=True):
        words = [tokenizer.backend.id_to_token(i) for i in pieces]
        answers[row]["masks"].append(
            [{"token": w, "probability": p} for w, p in zip(words, probabilities, strict=True)]
        )
    return answers


def check_files(files: tuple[str, ...]) -> None:
    """Raises Fault before a model is loaded if a file is missing or of an unknown form."""
    from pathlib import Path

    from app.train.readers import form

    for path in files:
        form(path)
        if not Path(path).is_file():
            raise Fault(f"{path}: no such file (looked from {Path.cwd()}). Check --file.", WRONG_INPUT)
