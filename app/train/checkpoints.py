"""Checkpoints that are whole or not there at all: written beside, hashed, synced, renamed; verified before they are read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.errors import WRONG_INPUT, WRONG_MACHINE, Fault

MANIFEST = "manifest.json"


def folder_of(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step-{step:08d}"


def steps(output: Path) -> list[int]:
    """Steps that have a folder, lowest first; whole or not."""
    found = (p.name.removeprefix("step-") for p in (output / "checkpoints").glob("step-*"))
    return sorted(int(name) for name in found if name.isdigit())


def save(
    output: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    extra: Callable[[Path], None],
) -> Path:
    """Write checkpoint ``step``: weights and optimizer moments as safetensors, ``state`` as JSON, and what ``extra`` puts there.

    One process calls it. Raises Fault when there is no room; then and after a kill at any moment every older checkpoint is untouched and
    no folder of this name exists that is not whole.
    """
    from safetensors.torch import save_file

    target = folder_of(output, step)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    moments = _moments(model, optimizer)
    need = sum(t.numel() * t.element_size() for t in [*weights.values(), *moments.values()]) + (8 << 20)
    free = shutil.disk_usage(output).free
    if free < need:
        raise Fault(
            f"checkpoint {target} needs {need >> 20} MiB and {free >> 20} MiB are free; the run stops with older checkpoints whole. "
            "Make room, or lower --keep, and run the same command to go on.",
            WRONG_MACHINE,
        )
    making = target.with_name(f"making-{step:08d}")
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir(parents=True)
        save_file(weights, str(making / "weights.safetensors"))
        save_file(moments, str(making / "optimizer.safetensors"))
        (making / "state.json").write_text(json.dumps(state, ensure_ascii=False, indent=1))
        extra(making)
        files = {}
        for path in sorted(p for p in making.rglob("*") if p.is_file()):
            files[str(path.relative_to(making))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            _sync(path)
        (making / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1))
        _sync(making / MANIFEST)
        _sync(making)
        if target.exists():  # a damaged one that was passed over
            shutil.rmtree(target)
        os.replace(making, target)
        _sync(target.parent)
    except OSError as e:
        shutil.rmtree(making, ignore_errors=True)
        raise Fault(
            f"checkpoint {target} could not be written: {e.strerror or e}. Older checkpoints are whole; mend it and run the same command to go on.",
            WRONG_MACHINE,
        ) from None
    except Exception as e:  # safetensors reports a full disk as an error of its own
        shutil.rmtree(making, ignore_errors=True)
        if "SafetensorError" not in type(e).__name__:
            raise
        raise Fault(
            f"checkpoint {target} could not be written: {e}. Older checkpoints are whole; mend it and run the same command to go on.",
            WRONG_MACHINE,
        ) from None
    return target


def rotate(output: Path, keep: int, protected: set[int]) -> None:
    """Remove all but the ``keep`` newest steps and the ``protected`` ones, and what a kill left half-written or half-removed."""
    known = steps(output)
    for step in known[:-keep]:
        if step not in protected:
            going = folder_of(output, step).with_name(f"removing-{step:08d}")
            os.replace(folder_of(output, step), going)
    for pattern in ("making-*", "removing-*"):
        for path in (output / "checkpoints").glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint, "" if it is whole: every file there, of its size and hash."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = dict(manifest["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"{MANIFEST} cannot be read ({e})"
    for name in ("weights.safetensors", "optimizer.safetensors", "state.json"):
        if name not in files:
            return f"{MANIFEST} does not name {name}"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        if _sha256(path) != expected["sha256"]:
            return f"{name} has another content than was written"
    return ""


def newest_whole(output: Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint; says which newer ones were passed over and why. Raises Fault if there are some and none is whole."""
    passed = []
    for step in reversed(steps(output)):
        folder = folder_of(output, step)
        wrong = damage(folder)
        if not wrong:
            return folder
        passed.append(f"{folder.name}: {wrong}")
        say(f"checkpoint {folder} is passed over: {wrong}")
    if passed:
        raise Fault(
            f"no checkpoint in {output / 'checkpoints'} is whole ({'; '.join(passed)}); restore one, or remove the folder to begin anew."
        )
    return None


def read_state(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "state.json").read_text()))


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a whole checkpoint's weights and moments into ``model`` and ``optimizer``. Raises Fault if they are of another model."""
    from safetensors.torch import load_file

    weights = load_file(str(folder / "weights.safetensors"))
    mine = dict(model.named_parameters())
    if weights.keys() != mine.keys() or any(weights[n].shape != mine[n].shape for n in mine):
        other = sorted(set(weights) ^ set(mine)) or [n for n in mine if weights[n].shape != mine[n].shape]
        raise Fault(
            f"{folder} holds another model: {other[0]} differs. Give its own --model, or another --output-dir.",
            WRONG_INPUT,
        )
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(weights[name])
    moments = load_file(str(folder / "optimizer.safetensors"))
    for name, parameter in mine.items():
        own = {key.rsplit("|", 1)[1]: value for key, value in moments.items() if key.startswith(name + "|")}
        if own:
            step = own["step"] if _step_on_device(optimizer) else own["step"].cpu()
            optimizer.state[parameter] = {k: (step if k == "step" else v.to(parameter.device)) for k, v in own.items()}
            if _step_on_device(optimizer):
                optimizer.state[parameter]["step"] = step.to(parameter.device)


def _step_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """``name|exp_avg`` and so on for every parameter that has been stepped."""
    made = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            made[f"{name}|{key}"] = (
                value.detach().contiguous() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            )
    return made


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
