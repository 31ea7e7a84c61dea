"""A trained model and files to run it on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier and a masked-language model, trained for two updates each on the sample."""
    import json

    import torch

    from app.train.__main__ import main
    from app.train.sample import rows

    torch.set_num_threads(1)  # threads of a small model only fight for the cores
    folder = tmp_path_factory.mktemp("models")
    os.environ["KIT_CACHE"] = str(folder / "cache")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows(80)), encoding="utf-8")
    for task in ("classify", "mlm"):
        options = [
            "--task",
            task,
            "--train-file",
            str(data),
            "--max-steps",
            "2",
            "--max-length",
            "64",
            "--output-dir",
            str(folder / task),
        ]
        assert main([*options, "--accelerate", "cpu"]) == 0
    return {"classes": folder / "classify" / "model", "masks": folder / "mlm" / "model"}


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call the program's main in this process; gives code, out and err."""
    from app.predict.__main__ import main

    monkeypatch.chdir(tmp_path)

    def go(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = main([str(a) for a in (*arguments, "--accelerate", "cpu")])
        seen = capsys.readouterr()
        return SimpleNamespace(code=code, out=seen.out, err=seen.err)

    return go


@pytest.fixture
def start(tmp_path: Path):
    """Start the real program; gives the process."""

    def go(*arguments: object) -> subprocess.Popen[Any]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "app.predict", *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return go
