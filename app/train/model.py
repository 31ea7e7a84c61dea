"""The model: a plain Hugging Face BERT inside a module that turns a micro-batch into a sum of losses."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from app.errors import WRONG_INPUT, WRONG_MACHINE, Fault
from app.train import packed
from app.train.config import TrainConfig
from app.train.data import TrainingData

PRESETS = {
    "bert-tiny": (2, 128),
    "bert-mini": (4, 256),
    "bert-small": (4, 512),
    "bert-base": (12, 768),
    "bert-large": (24, 1024),
}
"""Layers and hidden size: Google's BERT miniatures (Turc et al. 2019) and originals; heads of 64, feed-forward of 4 x hidden."""
PRESET_VOCABULARY = 30522
PRESET_POSITIONS = 512
BASE_WIDTH = 768  #: hidden size of bert-base, from which on models are trained as BERT was


@dataclass(frozen=True)
class Choice:
    """The model that ``--model`` names. ``source`` is "" for a preset, else the folder or hub name that weights come from."""

    name: str
    source: str
    tokenizer: str
    positions: int
    vocabulary: int
    labels: list[str]


def choose(config: TrainConfig) -> Choice:
    """Look at ``--model`` without loading weights. Raises Fault for an unknown name, a folder without a model, another architecture."""
    if config.model in PRESETS:
        return Choice(config.model, "", "", PRESET_POSITIONS, PRESET_VOCABULARY, [])
    if (
        config.model.startswith("bert-")
        and "/" not in config.model
        and config.model.removeprefix("bert-") in ("medium", "huge")
    ):
        raise Fault(f"--model {config.model} is no preset; allowed are {', '.join(PRESETS)}, a folder or a hub name.")
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(config.model)
    except (OSError, ValueError, KeyError) as e:
        from app.train.tokenizers import unreachable

        raise Fault(
            unreachable("model configuration", config.model, e),
            WRONG_INPUT if Path(config.model).is_dir() else WRONG_MACHINE,
        ) from None
    if found.model_type != "bert":
        raise Fault(
            f"{config.model} is a {found.model_type} model; this trainer trains BERT: presets are {', '.join(PRESETS)}."
        )
    names = [str(found.id2label[i]) for i in sorted(found.id2label)] if found.id2label else []
    labels = [] if all(n.startswith("LABEL_") for n in names) else names
    return Choice(config.model, config.model, config.model, found.max_position_embeddings, found.vocab_size, labels)


def build(choice: Choice, config: TrainConfig, data: TrainingData, say: Callable[[str], None]) -> nn.Module:
    """A float32 BertForSequenceClassification or BertForMaskedLM on the CPU; new weights follow ``config.seed``.

    Raises Fault when weights cannot be had or do not belong to the configuration.
    """
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = BertForSequenceClassification if config.task == "classify" else BertForMaskedLM
    more: dict[str, Any] = {}
    if config.task == "classify":
        more["id2label"] = dict(enumerate(data.label_names))
        more["label2id"] = {n: i for i, n in enumerate(data.label_names)}
    if config.dropout >= 0:
        more["hidden_dropout_prob"] = more["attention_probs_dropout_prob"] = config.dropout
    if not choice.source:
        layers, hidden = PRESETS[choice.name]
        made = kind(
            BertConfig(
                # A multiple of 128 keeps the head's products on the fast path; pieces beyond the tokenizer's are never targets.
                vocab_size=-(-data.tokenizer.vocabulary.size // 128) * 128,
                hidden_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=hidden // 64,
                intermediate_size=4 * hidden,
                max_position_embeddings=PRESET_POSITIONS,
                pad_token_id=data.tokenizer.pad,
                **more,
            )
        )
        initialise(made, None, config.seed)
        return made
    try:
        model, info = kind.from_pretrained(
            choice.source, output_loading_info=True, ignore_mismatched_sizes=True, **more
        )
    except (OSError, ValueError, RuntimeError) as e:
        from app.train.tokenizers import unreachable

        code = WRONG_INPUT if Path(choice.source).is_dir() else WRONG_MACHINE
        raise Fault(unreachable("weights", choice.source, e), code) from None
    fresh = {str(k[0] if isinstance(k, tuple) else k) for k in (*info["missing_keys"], *info["mismatched_keys"])}
    if body := sorted(k for k in fresh if (".encoder." in k or ".embeddings." in k) and "position_ids" not in k):
        raise Fault(f"{choice.source} lacks weights of its own layers, {body[0]} first; it is no whole BERT.")
    if any(p.dtype != torch.float32 for p in model.parameters()):
        say(f"model: the weights of {choice.source} are in half precision; they are trained in float32")
        model = model.float()
    if fresh:
        say(
            f"model: {', '.join(sorted({k.rsplit('.', 1)[0] for k in fresh}))} start from new weights; {choice.source} has none that fit"
        )
        initialise(model, fresh, config.seed)
    return model


def initialise(model: nn.Module, names: set[str] | None, seed: int) -> None:
    """Give the parameters in ``names`` (None: all) new weights, as BERT does: normal with the configuration's deviation, biases 0, norms 1.

    Each follows from ``seed`` and its name by NumPy's PCG64, so that every version of torch and transformers begins with the same numbers.
    """
    deviation = model.config.initializer_range  # type: ignore[union-attr]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if names is not None and name not in names:
                continue
            if parameter.ndim < 2:
                parameter.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
                continue
            draw = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
            parameter.copy_(
                torch.from_numpy(draw.standard_normal(tuple(parameter.shape), np.float32) * np.float32(deviation))
            )
            if name.endswith("word_embeddings.weight"):
                parameter[model.config.pad_token_id].zero_()  # type: ignore[union-attr]


def save_beside(model: nn.Module, data: TrainingData, folder: Path) -> None:
    """Put config.json and the tokenizer's files into ``folder``: with weights beside them it is a Hugging Face folder."""
    import shutil

    model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
    for file in data.tokenizer.folder.iterdir():
        if file.name in ("tokenizer.json", "vocab.txt", "special_tokens_map.json"):
            shutil.copyfile(file, folder / file.name)
    settings = data.tokenizer.folder / "tokenizer_config.json"
    known = (
        json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {"tokenizer_class": "BertTokenizer"}
    )
    known["model_max_length"] = data.max_length
    (folder / "tokenizer_config.json").write_text(
        json.dumps(known, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )


def publish(model: nn.Module, data: TrainingData, folder: Path) -> None:
    """Write the plain Hugging Face folder (config.json, model.safetensors, tokenizer), replacing an older one in one step."""
    import os
    import shutil

    making, old = folder.with_name(folder.name + ".making"), folder.with_name(folder.name + ".old")
    for left in (making, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        model.save_pretrained(making, safe_serialization=True)  # type: ignore[operator]
        save_beside(model, data, making)
        if folder.exists():
            os.replace(folder, old)
        os.replace(making, folder)
    except OSError as e:
        shutil.rmtree(making, ignore_errors=True)
        raise Fault(
            f"{folder} could not be written: {e.strerror or e}. The last checkpoint is whole; make room and run the same command.",
            WRONG_MACHINE,
        ) from None
    shutil.rmtree(old, ignore_errors=True)


class Learner(nn.Module):
    """From a micro-batch (see ``collate``) to the sum of its losses; the trainer divides by the targets of the whole update."""

    def __init__(self, model: nn.Module, task: str) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self._packed_logits: Callable[..., torch.Tensor] = (
            packed.mlm_logits if task == "mlm" else packed.classification_logits
        )

    def logits(self, batch: dict[str, Any]) -> torch.Tensor:
        """Logits at the targets: MLM [targets, vocabulary], classification [sequences, classes]."""
        if "cu_seqlens" in batch:
            return self._packed_logits(self.model, packed.PackedBatch(**batch))
        if self.task == "classify":
            return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        hidden = self.model.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]  # type: ignore[operator,union-attr]
        # The vocabulary head on the masked positions only: it is the dearest product of a small model.
        return self.model.cls(hidden.flatten(0, 1)[batch["target_positions"]])  # type: ignore[operator]

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """float32 [], the sum of the cross-entropies over targets that are not -100."""
        if "cu_seqlens" in batch:
            return packed.loss(self.model, packed.PackedBatch(**batch))
        return F.cross_entropy(self.logits(batch).float(), batch["targets"], ignore_index=-100, reduction="sum")


def optimizer_for(model: nn.Module, config: TrainConfig, rate: float, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; no decay on biases and layer norms, as in BERT; fused on a GPU where torch has it."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    fused = (
        {"fused": True} if device.type == "cuda" and "fused" in inspect.signature(torch.optim.AdamW).parameters else {}
    )
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-8, **fused)


def peak_rate(config: TrainConfig, pretrained: bool, hidden: int) -> float:
    """--lr, or a rate by what is trained: 5e-5 to fine-tune; from scratch 5e-4, and 1e-4 from bert-base's width on, as BERT was."""
    return config.lr or (5e-5 if pretrained else 5e-4 if hidden < BASE_WIDTH else 1e-4)


def warm_up(config: TrainConfig, pretrained: bool, hidden: int, total: int) -> int:
    """Updates of ``total`` over which the rate rises: --warmup-ratio of them, and by default 6 %.

    From scratch, from bert-base's width on, by default the 10,000 updates that BERT took (Devlin et al. 2018, appendix
    A.2), but at most 30 % of the run. Layers with the norm behind them need a slow rise (Liu et al. 2020, arXiv 2004.08249): of six
    BERT-base runs of 700 updates with 42 to rise in, two fell back to the frequencies of words and stayed there.
    """
    if config.warmup_ratio >= 0:
        return round(total * config.warmup_ratio)
    if pretrained or hidden < BASE_WIDTH:
        return round(total * 0.06)
    return min(10_000, round(total * 0.3))


def rate(applied: int, total: int, peak: float, warm: int) -> float:
    """Learning rate of the update after ``applied`` ones: a linear rise over ``warm``, then a linear fall to 0 after the last."""
    if applied < warm:
        return peak * (applied + 1) / (warm + 1)
    return peak * max(0.0, (total - applied) / max(1, total - warm))
