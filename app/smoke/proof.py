"""Proves an environment against its lock: ``python -m app.smoke.proof [--json]``, variant from KIT_VARIANT.

A lock that resolves may still not work: transformers switches PyTorch off without an error, pyarrow refuses an older
NumPy at import. So the proof imports everything, compares every version, and trains. It needs no GPU, no network and
no write access beyond a temporary folder. Exit code 0, or 3 where anything differs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from app.errors import DONE, WRONG_MACHINE, Fault
from app.host.variants import Variant, asked_for, choose, normal_name

# Parts that broke in the past although their package imported.
DEEP_IMPORTS = (
    "torch.distributed.run",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
)


class Wrong(Exception):
    """What differs from the lock or does not work; one sentence."""


def check_versions(variant: Variant) -> str:
    """Every locked package is installed in its version, once, and nothing else is."""
    locked = variant.locked()
    installed = {normal_name(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    wrong = [
        f"{name} is {installed.get(name, 'missing')}, the lock says {version}"
        for name, version in locked.items()
        if installed.get(name) != version
    ]
    wrong += [f"{name} {installed[name]} is not in the lock" for name in sorted(installed.keys() - locked.keys())]
    wrong += [f"{one} are both on the path" for one in installed_twice()]
    if wrong:
        raise Wrong("; ".join(wrong))
    return f"{len(locked)} packages, each in its locked version"


def installed_twice(seen: Iterable[tuple[str, str]] | None = None) -> list[str]:
    """Packages of which two different versions are on the path: the first is imported, pip may list the other."""
    if seen is None:
        seen = [(str(one.metadata["Name"]), one.version) for one in importlib.metadata.distributions()]
    versions: dict[str, list[str]] = {}
    for name, version in seen:
        found = versions.setdefault(normal_name(name), [])
        if version not in found:
            found.append(version)
    return [f"{name} {' and '.join(found)}" for name, found in sorted(versions.items()) if len(found) > 1]


def check_imports(variant: Variant) -> str:
    """Everything that requirements.in asks for imports, and the parts of it that broke before."""
    wanted = set(asked_for(variant.folder / "requirements.in"))
    modules = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if wanted & {normal_name(owner) for owner in owners} and module.isidentifier() and not module.startswith("_")
    }
    modules -= {"pkg_resources"}  # setuptools' own: torch.utils.cpp_extension imports it where it needs it
    for module in [*sorted(modules), *DEEP_IMPORTS, *(["torch._dynamo"] if variant.can["compile"] else [])]:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise Wrong(f"import {module}: {type(error).__name__}: {error}") from error
    return f"{len(modules)} packages"


def check_torch(variant: Variant) -> str:
    """torch's CUDA, cuDNN, NCCL and compiled architectures are the ones of variant.toml."""
    import torch
    from transformers.utils import is_torch_available

    code = torch.backends.cudnn.version()
    found = {
        "torch.version.cuda": torch.version.cuda,
        "cuDNN": _cudnn_version(code),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "architectures": " ".join(sorted(torch._C._cuda_getArchFlags().split(), key=lambda one: int(one[3:]))),
        "transformers uses torch": str(is_torch_available()),
    }
    wanted = {
        "torch.version.cuda": variant.torch_cuda,
        "cuDNN": variant.cudnn,
        "NCCL": variant.nccl,
        "architectures": " ".join(variant.architectures),
        "transformers uses torch": "True",
    }
    wrong = [f"{key} is {found[key]}, variant.toml says {wanted[key]}" for key in wanted if found[key] != wanted[key]]
    if wrong:
        raise Wrong("; ".join(wrong))
    return ", ".join(f"{key} {value}" for key, value in found.items() if key != "transformers uses torch")


def check_compiler(variant: Variant) -> str:
    """A C file that includes Python.h compiles, as Triton asks for, and a function compiled by torch is right."""
    if variant.triton is None:
        return "not needed: this variant has no Triton"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n")
        include = sysconfig.get_paths()["include"]
        command = ["gcc", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(Path(folder, "probe.so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise Wrong("no gcc: torch.compile cannot work") from None
        if done.returncode:
            raise Wrong(f"gcc cannot compile against Python.h: {_first_error(done.stderr)}")
    import torch

    numbers = torch.arange(8.0)
    compiled = torch.compile(lambda x: torch.relu(x - 3).sum() * 2)
    if compiled(numbers).item() != 20.0:
        raise Wrong(f"torch.compile gives {compiled(numbers).item()} where 20 is right")
    return "gcc compiles against Python.h, torch.compile gives the right result"


def check_data(variant: Variant) -> str:
    """datasets reads CSV, JSON lines, text and Parquet files, and TensorBoard writes a scalar."""
    import datasets
    from torch.utils.tensorboard import SummaryWriter

    datasets.disable_progress_bars()
    rows = {"text": ["one", "二"], "label": [0, 1]}
    with tempfile.TemporaryDirectory() as folder:
        table = datasets.Dataset.from_dict(rows)
        paths = {kind: str(Path(folder, f"rows.{kind}")) for kind in ("csv", "json", "parquet", "text")}
        table.to_csv(paths["csv"])
        table.to_json(paths["json"])
        table.to_parquet(paths["parquet"])
        Path(paths["text"]).write_text("one\n二\n", encoding="utf-8")
        for kind, path in paths.items():
            read = datasets.load_dataset(kind, data_files=path, split="train", cache_dir=f"{folder}/cache")
            if read["text"][:] != rows["text"]:
                raise Wrong(f"datasets read {read['text'][:]} from a {kind} file that holds {rows['text']}")
        with SummaryWriter(f"{folder}/events") as writer:
            writer.add_scalar("loss", 1.0, 0)
        if not any(Path(folder, "events").iterdir()):
            raise Wrong("TensorBoard wrote no event file")
    return "CSV, JSON, Parquet and text read back"


def check_training(variant: Variant) -> str:
    """Three steps of a tiny masked-language BERT on one batch: finite, and the loss falls."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    size = BertConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 128, (4, 16))
    mask = torch.ones_like(tokens)
    mask[0, 8:] = 0
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    text = " -> ".join(f"{loss:.3f}" for loss in losses)
    if not losses[-1] < losses[0]:
        raise Wrong(f"the loss of a tiny BERT does not fall: {text}")
    return f"loss of a tiny BERT {text}"


CHECKS: dict[str, Callable[[Variant], str]] = {
    "versions": check_versions,
    "imports": check_imports,
    "torch": check_torch,
    "compiler": check_compiler,
    "data": check_data,
    "training": check_training,
}


def prove(variant: Variant) -> Iterator[dict[str, Any]]:
    """Run every check, later ones too when an earlier one failed; a report after each, in the shape of smoke's."""
    for name, check in CHECKS.items():
        start = time.perf_counter()
        status, summary, cause = "passed", "", ""
        try:
            summary = check(variant)
        except Wrong as wrong:
            status, cause = "failed", str(wrong)
        except Exception as error:  # a broken package may raise anything; the report names it and the run fails
            status, cause = "failed", f"{type(error).__name__}: {error}"
        fix = f"./inv build --cuda {variant.cuda} --no-cache" if status == "failed" else ""
        yield {
            "name": name,
            "status": status,
            "summary": summary or cause,
            "cause": cause,
            "fix": fix,
            "seconds": round(time.perf_counter() - start, 3),
            "data": {},
        }


def main(arguments: list[str] | None = None) -> int:
    """Print the reports, as lines or as JSON; 0 where all passed, else 3."""
    parser = argparse.ArgumentParser(prog="python -m app.smoke.proof", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of workers that import torch for one function
    try:
        variant = choose(None)
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.code
    reports = []
    for report in prove(variant):
        reports.append(report)
        if not options.json:
            line = f"{report['status']:7} {report['name']:9} {report['summary']}  ({report['seconds']:.1f} s)"
            print(line, flush=True)
    if options.json:
        print(json.dumps({"variant": variant.cuda, "lock": variant.lock_hash, "reports": reports}, ensure_ascii=False))
    return WRONG_MACHINE if any(report["status"] == "failed" for report in reports) else DONE


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[-1])


def _cudnn_version(code: int | None) -> str:
    """cuDNN's version from its number: major*1000 + minor*100 + patch up to 8, major*10000 + ... from 9 on."""
    if not code:
        return "none"
    major = 10000 if code >= 90000 else 1000
    return f"{code // major}.{code % major // 100}.{code % 100}"


if __name__ == "__main__":
    sys.exit(main())
