"""The real program on small data: in this process where that is the same, in processes of its own where it is not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from runs import ROOT, Outcome, command


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(shared_cache: Path) -> dict[str, str]:
    """Variables for a child process: one thread, so that processes do not fight for the cores of a small machine."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KIT_CACHE": str(shared_cache),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """Run the trainer as a user does; returns an Outcome."""
    monkeypatch.chdir(tmp_path)

    def go(*arguments: object, timeout: float = 240, **more: str) -> Outcome:
        done = subprocess.run(
            command(*arguments),
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return go


@pytest.fixture
def call(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call the trainer's main in this process: the same code without the start-up. For single-process runs."""
    import torch

    from app.train.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIT_CACHE", str(shared_cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)

    def go(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        seen = capsys.readouterr()
        return Outcome(code, seen.out, seen.err)

    return go
