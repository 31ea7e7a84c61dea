"""The output folder: run.json, metrics.jsonl, TensorBoard, and whether the folder belongs to this run."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from app.errors import WRONG_MACHINE, Fault

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "triton",
)


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` in one step, so that a reader never sees half of it."""
    beside = path.with_name(path.name + ".making")
    with open(beside, "w", encoding="utf-8") as f:
        json.dump(value, f, ensure_ascii=False, indent=2)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)


def open_folder(output: Path) -> None:
    """Make the output folder. Raises Fault if it cannot be made or written."""
    try:
        (output / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = output / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as e:
        owner = ""
        there = next((p for p in [output, *output.parents] if p.exists()), None)
        if there is not None:
            owner = f" ({there} belongs to uid {there.stat().st_uid}, this process is uid {os.getuid()})"
        raise Fault(
            f"--output-dir {output} cannot be written: {e.strerror}{owner}. Change its owner (sudo chown -R {os.getuid()} {there}), or give another "
            "folder.",
            WRONG_MACHINE,
        ) from None


def earlier_run(output: Path) -> dict[str, Any] | None:
    """run.json of the run that used this folder before, None if there was none. Raises Fault if the folder holds something else."""
    path = output / "run.json"
    if path.is_file():
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            raise Fault(f"{path} is no JSON any more; give another --output-dir, or move the folder away.") from None
    others = [p.name for p in output.iterdir() if p.name not in ("checkpoints", "cache", ".gitkeep")]
    if others or any((output / "checkpoints").iterdir()):
        raise Fault(
            f"--output-dir {output} holds files that are no run ({', '.join(others[:5]) or 'checkpoints'}); give an empty or new folder."
        )
    return None


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """``key: old, now new`` for every entry of two flat dictionaries that differs."""
    return [
        f"{k} was {_short(then.get(k))}, now {_short(now.get(k))}"
        for k in sorted({*then, *now})
        if then.get(k) != now.get(k)
    ]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def still_there(files: dict[str, str]) -> bool:
    """True when every data file of a run has the content it had."""
    from app.train.store import content_hash

    return all(Path(path).is_file() and content_hash(path) == digest for path, digest in files.items())


def environment() -> dict[str, Any]:
    """What the run ran on: versions, lock, image, driver, GPUs, git revision, with the time of day."""
    import torch

    variant = os.environ.get("KIT_VARIANT", "")
    lock = ROOT / "pinned" / variant / "requirements.txt"
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "variant": variant or None,
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest() if variant and lock.is_file() else None,
        "image": os.environ.get("KIT_IMAGE") or None,
        "git_revision": os.environ.get("KIT_REVISION") or _git_revision(),
        "machine": _machine(),
        "command": [sys.executable, *sys.argv],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    try:
        asked = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git in the image: the build passes KIT_REVISION instead
    return asked.stdout.strip() or None


def _machine() -> dict[str, Any]:
    from app.hardware import nvml

    seen = nvml.read()
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "driver": seen.driver,
        "gpus": [{"name": g.name, "memory_mib": g.memory_mib} for g in seen.gpus],
        "topology": seen.cells,
    }


class Metrics:
    """metrics.jsonl and TensorBoard of one run; only the main process has one."""

    def __init__(self, output: Path, done: int) -> None:
        """Open for appending after update ``done``: lines of later updates, written before a kill, are removed."""
        self.path = output / "metrics.jsonl"
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= done:
                        kept.append(line + "\n")
                except (ValueError, KeyError):
                    continue  # the last line, cut off by a kill
        beside = self.path.with_name("metrics.jsonl.making")
        beside.write_text("".join(kept), encoding="utf-8")
        os.replace(beside, self.path)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(output / "tensorboard"), purge_step=done + 1 if done else None)

    def write(self, values: dict[str, Any]) -> None:
        """One line, on disk when this returns; every number but ``step`` becomes a TensorBoard scalar."""
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        for key, value in values.items():
            if key not in ("step", "epoch") and isinstance(value, (int, float)):
                self.board.add_scalar(
                    ("eval/" + key.removeprefix("eval_")) if "eval_loss" in values else "train/" + key,
                    value,
                    values["step"],
                )

    def histogram(self, name: str, values: Any) -> None:
        """A histogram at step 0, through the raw form: torch 1.13's own counts fail with numpy 1.26."""
        import numpy as np

        counts, edges = np.histogram(values, bins=min(64, int(values.max()) or 1))
        self.board.add_histogram_raw(
            name,
            min=float(values.min()),
            max=float(values.max()),
            num=len(values),
            sum=float(values.sum()),
            sum_squares=float((values.astype(float) ** 2).sum()),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=0,
        )

    def close(self) -> None:
        self.file.close()
        self.board.close()
