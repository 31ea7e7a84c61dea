"""The tokenizer: the model's own, a given one, or a WordPiece vocabulary made from the training text."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import WRONG_MACHINE, Fault
from app.train.masking import Vocabulary

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VERSION = 1  #: raise it when the same texts would give another vocabulary
MADE_FROM_CHARACTERS = 200_000_000
"""A vocabulary is made from at most this many characters of the training text: more changes little and takes memory."""


@dataclass(frozen=True)
class BertTokenizer:
    """A tokenizer as the trainer needs it. ``folder`` holds the files that belong into a saved model."""

    folder: Path
    backend: Any  # tokenizers.Tokenizer, without truncation and padding
    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    vocabulary: Vocabulary
    fingerprint: str  # sha256 of the backend's JSON
    model_max_length: int  # of tokenizer_config.json; 2^30 where it names none


def wrap(folder: Path) -> BertTokenizer:
    """Read ``folder``/tokenizer.json. Raises Fault if one of BERT's five special tokens is missing."""
    import tokenizers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # said aloud, so that no warning follows when workers fork
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()
    # "[SEP]" in a user's text is text: it must not end the sequence.
    backend.encode_special_tokens = True
    vocabulary = backend.get_vocab()
    missing = [t for t in SPECIAL if t not in vocabulary]
    if missing:
        raise Fault(
            f"the tokenizer in {folder} has no {', '.join(missing)}; it is not BERT's. Give another with --tokenizer."
        )
    size = max(vocabulary.values()) + 1
    special, continues = np.zeros(size, bool), np.zeros(size, bool)
    for piece, number in vocabulary.items():
        special[number] = piece in SPECIAL and piece != "[UNK]"
        continues[number] = piece.startswith("##")
    pad, unk, cls, sep, mask = (vocabulary[t] for t in SPECIAL)
    settings = folder / "tokenizer_config.json"
    named = json.loads(settings.read_text(encoding="utf-8")).get("model_max_length") if settings.is_file() else None
    length = int(min(named, 2**30)) if isinstance(named, (int, float)) else 2**30
    pieces = Vocabulary(size, mask, special, continues)
    return BertTokenizer(folder, backend, pad, unk, cls, sep, mask, pieces, fingerprint, length)


def load(name: str, cache: Path) -> BertTokenizer:
    """The tokenizer of a folder or hub name, converted once to tokenizer.json below ``cache``.

    Raises Fault that says what is missing, or that the hub cannot be reached.
    """
    if Path(name).is_dir() and (Path(name) / "tokenizer.json").is_file():
        return wrap(Path(name))
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(name, use_fast=True)
    except (OSError, ValueError, ImportError) as e:
        raise Fault(unreachable("tokenizer", name, e), WRONG_MACHINE if not Path(name).exists() else 2) from None
    if not getattr(made, "is_fast", False):
        raise Fault(
            f"the tokenizer of {name} has no fast form; give a folder with tokenizer.json or vocab.txt with --tokenizer."
        )
    folder = cache / "tokenizers" / hashlib.sha256(made.backend_tokenizer.to_str().encode()).hexdigest()[:24]
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        made.save_pretrained(folder)
    return wrap(folder)


def unreachable(what: str, name: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else error.__class__.__name__
    if Path(name).is_dir():
        there = ", ".join(sorted(p.name for p in Path(name).iterdir())[:12]) or "nothing"
        return f"the folder {name} has no usable {what} (it holds {there}); BERT needs config.json, model.safetensors and tokenizer.json or vocab.txt. {first}"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    return (
        f"{name!r} is no folder here and its {what} could not be had from {endpoint}{offline}: {first} Give a folder, or set HF_ENDPOINT to a mirror "
        "that answers."
    )


def make(texts: Callable[[], Iterable[str]], size: int, folder: Path) -> BertTokenizer:
    """Make a lower-casing WordPiece tokenizer of at most ``size`` pieces from ``texts()`` and save it to ``folder``.

    Chinese characters are words of their own, as in BERT. The same texts give the same vocabulary. ``texts`` is called twice. Raises Fault
    if the text holds no characters at all.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    def bert(vocabulary: dict[str, int] | None = None) -> Any:
        model = (
            models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
            if vocabulary
            else models.WordPiece(unk_token="[UNK]")
        )
        made = tokenizers.Tokenizer(model)
        made.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True
        )
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return made

    learner = bert()
    alphabet = _alphabet(_first(texts(), MADE_FROM_CHARACTERS), learner, max(len(SPECIAL), size // 2))
    if not alphabet:
        raise Fault("the training text holds no character to make a vocabulary from; check --text-column.")
    # The library numbers the alphabet in the order of a hash map that differs from run to run, and numbers decide between equally frequent
    # pairs. Named as special tokens, the alphabet has its numbers beforehand.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, min_frequency=2, special_tokens=SPECIAL + alphabet, limit_alphabet=1, show_progress=False
    )
    learner.train_from_iterator(_first(texts(), MADE_FROM_CHARACTERS), trainer)
    made = bert(learner.get_vocab())
    made.add_special_tokens(SPECIAL)
    made.decoder = decoders.WordPiece(prefix="##")
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))],
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    pieces = sorted(made.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(piece + "\n" for piece, _ in pieces), encoding="utf-8")
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "tokenize_chinese_chars": True,
        "strip_accents": None,
        "model_max_length": 512,
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return wrap(folder)


def _alphabet(texts: Iterable[str], tokenizer: Any, size: int) -> list[str]:
    """The most frequent characters, at most ``size`` pieces: each as the start of a word and, where it can stand inside one, as ##c."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    pieces: list[str] = []
    for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if character.isspace():
            continue
        inside = tokenizer.normalizer.normalize_str(f"a{character}a")
        joins = len(tokenizer.pre_tokenizer.pre_tokenize_str(inside)) == 1
        pieces += [character, "##" + character] if joins else [character]
        if len(pieces) >= size:
            break
    return pieces


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        characters -= len(text)
        if characters < 0:
            return
        yield text
