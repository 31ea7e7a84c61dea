"""A lock is resolved from nothing but requirements.in and pinned/lock.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import Fault
from app.host import locks
from app.host.variants import PINNED, ROOT, default_variant, lock_settings, variants


def test_all_means_every_variant_and_the_tools() -> None:
    assert [folder.name for folder in locks.folders("all")] == [*variants(), "tools"]
    assert [folder.name for folder in locks.folders("tools")] == ["tools"]
    assert [folder.name for folder in locks.folders(None)] == [default_variant().cuda]


@pytest.mark.parametrize("name", [*variants(), "tools"])
def test_the_command_asks_for_hashes_wheels_and_a_date(name: str) -> None:
    command = locks.command(PINNED / name, Path("/tmp/out"), lock_settings())
    for word in ("--generate-hashes", "--only-binary", "--exclude-newer", "--no-emit-index-url", "--no-config"):
        assert word in command
    assert ("--universal" in command) == (name == "tools")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("error: Failed to fetch: `https://x/simple/torch/`", "did not answer"),
        ("a has no versions published before the `exclude-newer` date", "upload times"),
        ("Because a==1 depends on b<1 and you require b==2, we can conclude ...", "do not fit together"),
    ],
)
def test_what_uv_says_gets_a_cause(words: str, cause: str) -> None:
    text = locks.explain(PINNED / "tools", words)
    assert cause in text
    assert words in text


def test_requirements_that_contradict_leave_the_old_lock(tmp_path: Path) -> None:
    """A real resolve that must fail: nothing is written, the sentence names the file."""
    folder = tmp_path / "pinned" / "tools"
    folder.mkdir(parents=True)
    (folder / "requirements.in").write_text("six<1\nsix>2\n")
    (folder / "requirements.txt").write_text("six==1.16.0\n")
    (tmp_path / "pinned" / "lock.toml").write_text((PINNED / "lock.toml").read_text())
    with pytest.raises(Fault, match=r"requirements\.in"):
        locks.lock("tools", tmp_path / "pinned")
    assert (folder / "requirements.txt").read_text() == "six==1.16.0\n"
    assert [path.name for path in folder.iterdir() if path.suffix == ".new"] == []


@pytest.mark.long
@pytest.mark.parametrize("name", [*variants(), "tools"])
def test_a_lock_made_anew_has_the_same_bytes(name: str) -> None:
    """Asks the package index."""
    assert locks.resolve(PINNED / name, lock_settings()) == (PINNED / name / "requirements.txt").read_text()


def test_the_task_ends_with_2_on_an_unknown_variant() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("invoke"), "--search-root", ROOT, "lock", "--cuda", "9.9"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd="/",
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown variant '9.9'")
    assert done.stdout == ""
