"""The environment check: a swapped version, two copies of a library, another NCCL are found and named."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.smoke.environment import (
    check_arithmetic,
    check_duplicates,
    check_library_path,
    loaded_libraries,
)
from app.smoke.proof import installed_twice

ROOT = Path(__file__).parents[2]


def test_a_swapped_package_is_named(tmp_path: Path) -> None:
    """A copy of the metadata of this environment with one version changed, put before the real one."""
    installed = {str(one.metadata["Name"]).lower(): one.version for one in importlib.metadata.distributions()}
    pinned = tmp_path / "pinned" / "9.9"
    shutil.copytree(ROOT / "pinned" / "12.1", pinned)
    text = (pinned / "variant.toml").read_text().replace('cuda = "12.1"', 'cuda = "9.9"', 1)
    (pinned / "variant.toml").write_text(text)
    (pinned / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in installed.items()))
    code = (
        "import sys; from pathlib import Path; from app.host.variants import variants; "
        "from app.smoke.proof import check_versions, Wrong\n"
        f"try: print('fine:', check_versions(variants(Path({str(tmp_path / 'pinned')!r}))['9.9']))\n"
        "except Wrong as wrong: print('wrong:', wrong)"
    )

    site = tmp_path / "site"
    for one in importlib.metadata.distributions():
        copied = site / f"{one.metadata['Name']}.dist-info"
        copied.mkdir(parents=True, exist_ok=True)
        (copied / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {one.metadata['Name']}\nVersion: {one.version}\n"
        )

    def seen() -> str:
        """What the proof says where only the copied metadata is on the path (-S leaves out the real packages)."""
        environment = {"PYTHONPATH": f"{ROOT}:{site}"}
        command = [sys.executable, "-S", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    assert seen() == f"fine: {len(installed)} packages, each in its locked version"
    metadata = site / "tqdm.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"Version: {installed['tqdm']}", "Version: 0.0.1"))
    assert seen() == f"wrong: tqdm is 0.0.1, the lock says {installed['tqdm']}"
    other = site / "tqdm-other.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tqdm\nVersion: {installed['tqdm']}\n")
    assert "are both on the path" in seen()


def test_a_package_that_is_there_twice_is_named() -> None:
    seen = [("tqdm", "4.66"), ("torch", "2.4.1"), ("torch", "2.4.1"), ("tqdm", "0.0.1")]
    assert installed_twice(seen) == ["tqdm 4.66 and 0.0.1"]
    assert installed_twice(seen[:3]) == []


def test_two_copies_of_one_library() -> None:
    one = {"nvidia-nccl-cu12": "2.20.5", "nvidia-cudnn-cu12": "9.1.0.70", "nvidia-ml-py": "13.0"}
    assert check_duplicates(one).status == "passed"
    report = check_duplicates({**one, "nvidia-nccl-cu13": "2.28.9"})
    assert report.status == "failed"
    assert "nvidia-nccl-cu12 2.20.5 and nvidia-nccl-cu13 2.28.9" in report.summary


def test_library_path(tmp_path: Path) -> None:
    assert check_library_path(None).status == "passed"
    assert check_library_path(str(tmp_path)).status == "passed"
    (tmp_path / "libcublas.so.11").touch()
    assert "libcublas.so.11" in check_library_path(f"/usr/lib:{tmp_path}").summary
    assert check_library_path("/usr/local/cuda/compat").status == "warning"


def test_loaded_libraries_from_maps() -> None:
    maps = [
        "7f00-7f01 r-xp 00000000 00:1b 12 /opt/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "7f01-7f02 r--p 00000000 00:1b 12 /opt/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "7f02-7f03 r-xp 00000000 00:1b 13 /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06",
        "7f03-7f04 rw-p 00000000 00:00 0",
        "7ffc-7ffd rw-p 00000000 00:00 0 [stack]",
    ]
    found = loaded_libraries(maps)
    assert set(found) == {"libcuda.so", "libnccl.so"}
    assert len(found["libnccl.so"]) == 1


def test_arithmetic_here() -> None:
    assert check_arithmetic().status == "passed"


def test_numpy_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(self):  # type: ignore[no-untyped-def]
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", broken)
    assert check_arithmetic().status == "failed"
