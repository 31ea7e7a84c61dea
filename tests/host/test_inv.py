"""./inv on machines that lack something: a sentence and a non-zero exit, never a half-made environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from app.host.variants import ROOT

TOOLS = ("sh", "sha256sum", "cut", "cat", "dirname", "flock", "rm", "mkdir", "env")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A copy of what ./inv reads, and a PATH with only the tools that it needs."""
    (tmp_path / "pinned" / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "inv", tmp_path)
    shutil.copy(ROOT / "pinned" / "tools" / "requirements.txt", tmp_path / "pinned" / "tools")
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, name
        (tmp_path / "bin" / name).symlink_to(found)
    return tmp_path


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def inv(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(folder / "bin"), "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([folder / "inv", *words], capture_output=True, text=True, check=False, env=environment)


def test_no_python_at_all(bare: Path) -> None:
    done = inv(bare, "--list")
    assert done.returncode == 3
    assert "no Python 3.10 or newer" in done.stderr
    assert "apt-get install python3" in done.stderr
    assert not (bare / ".venv").exists()


def test_a_python_that_is_too_old_is_named(bare: Path) -> None:
    """A stand-in that answers like Python 3.8: it fails the version check and prints its version."""
    script(bare / "bin" / "python3", '[ "$1" = --version ] && echo "Python 3.8.10" && exit 0; exit 1')
    done = inv(bare, "--list")
    assert done.returncode == 3
    assert "Python 3.8.10" in done.stderr


def test_a_python_without_the_venv_module(bare: Path) -> None:
    """Debian's python3 without python3-venv: the version fits, the import fails."""
    script(
        bare / "bin" / "python3",
        '[ "$1" = --version ] && echo "Python 3.11.2" && exit 0; case "$2" in *venv*) exit 1;; esac; exit 0',
    )
    done = inv(bare, "--list")
    assert done.returncode == 3
    assert "apt-get install python3-venv" in done.stderr


def test_a_failed_installation_leaves_no_environment_that_counts_as_ready(bare: Path) -> None:
    """pip fails: no marker is written, so the next ./inv starts anew."""
    script(
        bare / "bin" / "python3",
        'if [ "$1" = -m ]; then mkdir -p "$3/bin"; printf "#!/bin/sh\\nexit 7\\n" >"$3/bin/python"; '
        '/bin/chmod +x "$3/bin/python"; fi; exit 0',
    )
    done = inv(bare, "--list")
    assert done.returncode == 3
    assert "could not be installed" in done.stderr
    assert not (bare / ".venv" / ".lock-hash").exists()


def test_the_real_one_lists_the_tasks_from_any_folder() -> None:
    done = subprocess.run([ROOT / "inv", "--list"], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    for name in ("build", "train", "lock", "verify", "shell", "test"):
        assert f"  {name} " in done.stdout


def test_an_unknown_variant_ends_with_2() -> None:
    done = subprocess.run([ROOT / "inv", "build", "--cuda", "9.9"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown variant '9.9'" in done.stderr
