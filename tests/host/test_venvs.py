"""An environment without an engine: made whole and proven, or not counted as there."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.errors import WRONG_MACHINE, Fault
from app.host import venvs
from app.host.variants import PINNED, Variant, default_variant


@pytest.fixture
def small(tmp_path: Path) -> Variant:
    """The default variant, but with a lock of one small package and this interpreter's Python version."""
    text = (PINNED / "tools" / "requirements.txt").read_text(encoding="utf-8")
    entry = re.search(r"^iniconfig==.*(?:\n    --hash.*)+", text, re.MULTILINE)
    assert entry
    folder = tmp_path / "pinned" / default_variant().cuda
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text(entry[0] + "\n", encoding="utf-8")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return dataclasses.replace(default_variant(), folder=folder, python=version)


def test_an_environment_counts_only_whole_of_this_lock_and_alive(tmp_path: Path, small: Variant) -> None:
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    assert not venvs.is_ready(folder, small)  # half made: no marker
    (folder / venvs.READY).write_text("another lock")
    assert not venvs.is_ready(folder, small)
    (folder / venvs.READY).write_text(small.lock_hash)
    assert venvs.is_ready(folder, small)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/nowhere/python3")  # the system's Python was upgraded away
    assert not venvs.is_ready(folder, small)


def test_an_environment_that_fails_its_proof_is_no_environment(
    tmp_path: Path, small: Variant, capfd: pytest.CaptureFixture[str]
) -> None:
    """Really made from the index; the proof then misses torch and all the rest. A leftover is made anew first."""
    leftover = tmp_path / venvs.FOLDER / small.cuda / "bin"
    leftover.mkdir(parents=True)
    (leftover / "half-made").touch()
    shutil.copytree(PINNED.parent / "app", tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (PINNED / small.cuda).glob("*.*"):
        if path.name != "requirements.txt":
            shutil.copy(path, small.folder)
    (small.folder / "requirements.in").write_text("iniconfig\n")
    with pytest.raises(Fault, match="does not hold what") as caught:
        venvs.ensure(small, tmp_path)
    assert caught.value.code == WRONG_MACHINE
    said = capfd.readouterr().out
    assert "passed  versions" in said
    assert "failed  torch" in said
    assert not (leftover / "half-made").exists()
    assert not (tmp_path / venvs.FOLDER / small.cuda / venvs.READY).exists()


def test_a_python_that_is_nowhere_is_named_with_how_to_get_it(small: Variant) -> None:
    with pytest.raises(Fault, match=r"needs Python 3\.99") as caught:
        venvs.find_python(dataclasses.replace(small, python="3.99"), os.environ)
    assert "uv python install 3.99" in str(caught.value)


def test_a_small_disk_is_refused_before_anything_is_made(
    tmp_path: Path, small: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_500_000_000))
    with pytest.raises(Fault, match=r"1\.5 GB free"):
        venvs.ensure(small, tmp_path)
    assert not (tmp_path / venvs.FOLDER / small.cuda).exists()


def test_programs_see_the_variant_and_not_the_callers_python(small: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    monkeypatch.setenv("KIT_IMAGE", "an image")
    made = venvs.program_environment(small, Path("/project"))
    assert made["KIT_VARIANT"] == small.cuda
    assert made["PYTHONPATH"] == "/project"
    assert made["PATH"].startswith(f"/project/{venvs.FOLDER}/{small.cuda}/bin")
    assert "PYTHONHOME" not in made
    assert "KIT_IMAGE" not in made
