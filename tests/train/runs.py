"""What tests of the trainer share: its command line, what it leaves behind, and files that it takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from app.train.sample import rows

ROOT = Path(__file__).resolve().parents[2]


class Outcome:
    """What a run of the trainer left: exit code, stderr, the last line of stdout."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def result(self) -> dict[str, Any]:
        assert self.code == 0, self.stderr
        return json.loads(self.stdout.strip().splitlines()[-1])


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "app.train", *map(str, arguments)]


def write_rows(path: Path, count: int = 64) -> Path:
    """``count`` rows of the sample as JSONL."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows(count)), encoding="utf-8")
    return path


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def accelerate_file(path: Path, processes: int, accumulation: int) -> Path:
    kind = "MULTI_CPU" if processes > 1 else "'NO'"
    path.write_text(
        f"distributed_type: {kind}\nuse_cpu: true\nnum_processes: {processes}\ngradient_accumulation_steps: {accumulation}\nmixed_precision: 'no'\n"
    )
    return path
