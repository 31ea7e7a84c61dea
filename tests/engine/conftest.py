"""A real engine, and the image of the default variant built before."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from app.host import engine
from app.host.variants import ROOT, Variant, default_variant


@pytest.fixture(scope="session")
def client() -> docker.DockerClient:
    return engine.connect()


@pytest.fixture(scope="session")
def variant(client: docker.DockerClient) -> Variant:
    """The default variant; its image must be there: ./inv test builds it."""
    found = default_variant()
    client.images.get(found.image)
    return found


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A copy of the compose file with a project name of its own, taken down afterwards with its volume."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    name = f"kit-test-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    (tmp_path / "docker-compose.yml").write_text(text.replace("name: bert-kit", f"name: {name}", 1), encoding="utf-8")
    yield tmp_path
    subprocess.run(["docker", "compose", "down", "--remove-orphans"], cwd=tmp_path, check=True, capture_output=True)
    for volume in docker.from_env().volumes.list(filters={"name": f"{name}-caches-"}):  # one for each uid that ran
        volume.remove()


@pytest.fixture(scope="session")
def second_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second real engine with its images on a 64 MB tmpfs and CDI files of its own; its address. Needs root.

    It lives in a network of its own: an engine without a bridge takes away the one that the first engine uses.
    """
    if os.geteuid() or not shutil.which("dockerd") or not shutil.which("unshare"):
        pytest.skip("starting an engine needs root, dockerd and unshare")
    folder = tmp_path_factory.mktemp("engine")
    disk, devices = folder / "disk", folder / "cdi"
    disk.mkdir()
    devices.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    (folder / "daemon.json").write_text(
        f'{{"features": {{"cdi": true}}, "cdi-spec-dirs": ["{devices}"], "iptables": false, "ip6tables": false, '
        f'"bridge": "none", "storage-driver": "vfs"}}'
    )
    address = f"unix://{folder}/docker.sock"
    log = (folder / "log").open("w")
    daemon = subprocess.Popen(
        [
            *(
                "unshare",
                "--net",
                "dockerd",
                "--config-file",
                str(folder / "daemon.json"),
                "--data-root",
                str(disk),
                "--host",
                address,
            ),
            *("--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")),
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                docker.DockerClient(base_url=address).ping()
                break
            except (docker.errors.DockerException, OSError):
                if time.monotonic() > deadline or daemon.poll() is not None:
                    pytest.fail("the second engine did not start: " + (folder / "log").read_text()[-2000:])
                time.sleep(0.5)
        yield address
    finally:
        daemon.terminate()
        daemon.wait(60)
        log.close()
        subprocess.run(["umount", str(disk)], check=True)
