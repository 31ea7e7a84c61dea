"""Smoke in a real container that lacks something: found, named, and ended by itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest

from app.host import engine
from app.host.variants import ROOT, variants

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def image() -> str:
    """The image of some variant that was built here, the newest first."""
    client = engine.connect()
    for variant in reversed(list(variants().values())):
        try:
            client.images.get(variant.image)
        except docker.errors.ImageNotFound:
            continue
        return variant.image
    pytest.skip("no image was built here: ./inv build")


def smoke(image: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and reports by name of smoke in a container with these options of docker run."""
    folder.chmod(0o777)
    mounts = [f"{ROOT}/app:/opt/kit/app:ro", f"{ROOT}/pinned:/opt/kit/pinned:ro", f"{folder}:/report"]
    command = ["docker", "run", "--rm", "--network", "none", "--workdir", "/tmp", *options]
    command += [word for mount in mounts for word in ("-v", mount)]
    command += [image, "python", "-m", "app.smoke", "--json", "/report/smoke.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    document = json.loads((folder / "smoke.json").read_text(encoding="utf-8"))
    assert document["exit_code"] == done.returncode, done.stderr
    return done.returncode, {report["name"]: report for report in document["reports"]}


def test_a_good_container_passes(image: str, tmp_path: Path) -> None:
    code, reports = smoke(image, tmp_path, "--shm-size", "1g")
    assert code == 0, {name: report for name, report in reports.items() if report["status"] == "failed"}
    for name in ("environment", "data loader", "gloo", "shared memory", "folders", "user"):
        assert reports[name]["status"] == "passed", reports[name]


def test_shared_memory_of_one_megabyte_and_a_user_nobody_knows(image: str, tmp_path: Path) -> None:
    code, reports = smoke(image, tmp_path, "--shm-size", "1m", "--user", "4711:4711", "--env", "HOME=/nonexistent")
    assert code == 1
    assert reports["shared memory"]["status"] == "failed"
    assert reports["data loader"]["status"] == "failed"
    assert "/dev/shm" in reports["data loader"]["cause"]
    assert reports["user"]["status"] == "warning"
    assert reports["gloo"]["status"] == "passed"


def test_a_package_that_was_swapped_in_the_image(image: str, tmp_path: Path) -> None:
    """Another version of a package before the locked one on the path, as pip install --target would put it."""
    info = tmp_path / "site" / "tqdm-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tqdm\nVersion: 0.0.1\n", encoding="utf-8")
    path = ("--env", "PYTHONPATH=/opt/kit:/report/site")
    code, reports = smoke(image, tmp_path, "--shm-size", "1g", *path)
    assert code == 1
    assert reports["environment"]["status"] == "failed"
    assert "tqdm" in reports["environment"]["summary"]
