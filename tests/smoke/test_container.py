"""The container's limits, read from files as kernels write them, and a /dev/shm that is really too small."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.smoke.container import (
    check_cgroup,
    check_folders,
    check_limits,
    check_shm,
    check_user,
    cpu_limit,
    killed_for_memory,
    memory_limit,
    needed_shm_mib,
)


def test_needed_shared_memory() -> None:
    assert needed_shm_mib(0) == needed_shm_mib(1) == 32
    assert needed_shm_mib(2) == 2 * 16 + 2 * 128
    assert needed_shm_mib(8) == 1152


def test_missing_shared_memory() -> None:
    assert check_shm(0, "/no/such/mount").status == "failed"


def test_shared_memory_of_one_megabyte_is_found_by_the_check_and_by_the_loader() -> None:
    """A real tmpfs of 1 MB over /dev/shm, in a mount namespace of its own."""
    script = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && "
        f"{sys.executable} -c 'from app.smoke.container import check_shm; print(check_shm(0).status)' && "
        f"{sys.executable} -c 'from app.smoke.stage import Stage, module, reports_of; "
        'r = reports_of("data loader", Stage(module("app.smoke.loader"), limit=60, quiet=60).outcome(), "")[-1]; '
        "print(r.status, r.cause)'"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("mounting needs root and CAP_SYS_ADMIN; tests/host/test_doctor_engine.py does this in a container")
    first, second = done.stdout.strip().splitlines()
    assert first == "failed"
    assert second.startswith("failed a data loader worker ran out of /dev/shm")


def cgroup(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_cgroup_version_2(tmp_path: Path) -> None:
    root = cgroup(tmp_path, memory_DOT_max="1073741824\n", cpu_DOT_max="50000 100000\n")
    assert memory_limit(root) == 1 << 30
    assert cpu_limit(root) == 0.5
    (report,) = check_cgroup(0, root)
    assert report.status == "warning"
    assert "limit of the container" in report.summary


def test_cgroup_version_2_without_limits(tmp_path: Path) -> None:
    root = cgroup(tmp_path, memory_DOT_max="max\n", cpu_DOT_max="max 100000\n")
    assert memory_limit(root) is None
    assert cpu_limit(root) == len(os.sched_getaffinity(0))


def test_cgroup_version_1(tmp_path: Path) -> None:
    root = cgroup(
        tmp_path,
        memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
        cpu__cpu_DOT_cfs_quota_us="-1\n",
        cpu__cpu_DOT_cfs_period_us="100000\n",
    )
    assert memory_limit(root) is None
    assert cpu_limit(root) == len(os.sched_getaffinity(0))
    cgroup(tmp_path, memory__memory_DOT_limit_in_bytes="536870912\n", cpu__cpu_DOT_cfs_quota_us="100000\n")
    assert memory_limit(root) == 512 << 20
    assert cpu_limit(root) == min(1.0, len(os.sched_getaffinity(0)))


def test_killed_processes_are_told(tmp_path: Path) -> None:
    root = cgroup(tmp_path, memory_DOT_events="low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n")
    assert killed_for_memory(root) == 2
    (report,) = check_cgroup(0, root)
    assert "2 processes of this container were already killed" in report.summary


def test_too_few_cores_for_the_gpus(tmp_path: Path) -> None:
    (report,) = check_cgroup(10_000, tmp_path)
    assert report.status == "warning"
    assert "for 10000 GPUs" in report.summary


def test_locked_memory_matters_where_infiniband_is(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(65536, before[1]) if before[1] >= 0 else 65536, before[1]))
    try:
        assert check_limits(tmp_path).status == "failed"
        assert check_limits(tmp_path / "none").status == "passed"
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_folders_that_can_and_cannot_be_written(tmp_path: Path) -> None:
    good = check_folders({"output": tmp_path / "not" / "yet" / "there"})
    assert good.status in ("passed", "warning")
    assert list(tmp_path.iterdir()) == []
    bad = check_folders({"output": tmp_path, "cache": Path("/proc/self")})
    assert bad.status == "failed"
    assert "cache /proc/self" in bad.summary


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nameless)
    report = check_user()
    assert report.status == "warning"
    assert "USER" in report.fix
