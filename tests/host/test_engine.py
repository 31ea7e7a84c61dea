"""What the engine answers becomes a sentence with a next command; how it gives GPUs is read from the daemon itself."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from app.errors import WRONG_MACHINE, Fault
from app.host import engine


def none(name: str) -> None:
    """No program is on PATH."""


# Answers of real engines (Docker 20 to 29), and a word of what a user is told.
RECORDED = [
    ('could not select device driver "nvidia" with capabilities: [[gpu]]', "no NVIDIA toolkit"),
    ('could not select device driver "" with capabilities: [[gpu]]', "no NVIDIA toolkit"),
    ("failed to discover GPU vendor from CDI: no known GPU vendor found", "no NVIDIA toolkit"),
    ("unknown or invalid runtime name: nvidia", "nvidia-ctk runtime configure"),
    ('could not select device driver "cdi" with capabilities: [[gpu]]', "CDI switched off"),
    ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all", "nvidia-ctk cdi generate"),
    (
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0, please update your driver",
        "too old",
    ),
    ("nvml error: driver/library version mismatch: unknown", "restart"),
    ("write /var/lib/docker/tmp/x: no space left on device", "disk is full"),
    ("manifest unknown: manifest unknown", "--base local"),
    ("dial tcp: lookup registry.example on 10.0.0.1:53: no such host", "cannot reach"),
    ("toomanyrequests: You have reached your pull rate limit.", "docker login"),
]


@pytest.mark.parametrize(("words", "told"), RECORDED, ids=[words[:40] for words, _ in RECORDED])
def test_what_the_engine_answers_is_explained(words: str, told: str) -> None:
    error = docker.errors.APIError("500", explanation=words)
    fault = engine.translate(error, "starting a container")
    assert told in str(fault)
    assert words in str(fault)
    assert fault.code == WRONG_MACHINE


def test_an_unknown_answer_is_passed_on_whole() -> None:
    assert "quite new" in str(engine.translate(docker.errors.APIError("500", explanation="quite new"), "doing this"))


NVIDIA = {"Runtimes": {"runc": {}, "nvidia": {}}}
PLAIN: dict[str, Any] = {"Runtimes": {"runc": {}}, "CDISpecDirs": []}


@pytest.mark.parametrize(
    ("info", "host", "which", "mode"),
    [
        (NVIDIA, True, none, "nvidia"),
        (PLAIN, True, {"nvidia-container-runtime-hook": "/usr/bin/h"}.get, "nvidia"),
        (PLAIN, True, none, "none"),
        (PLAIN, False, none, "none"),
        ({**PLAIN, "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}, True, none, "cdi"),
        ({"Runtimes": None, "CDISpecDirs": None}, False, none, "none"),
    ],
)
def test_the_kinds_of_hosts_are_told_apart(
    info: dict[str, Any], host: bool, which: Callable[[str], str | None], mode: str
) -> None:
    found = engine.gpu_access(info, host, which)
    assert found.mode == mode
    assert found.blocked == (host and mode == "none")


def test_cdi_counts_only_with_a_file_that_describes_the_gpus(tmp_path: Path) -> None:
    info = {"Runtimes": {"runc": {}}, "CDISpecDirs": [str(tmp_path)]}
    (tmp_path / "other.yaml").write_text("kind: vendor.example/net\n")
    assert engine.gpu_access(info, True, none).mode == "none"
    (tmp_path / "nvidia.yaml").write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    assert engine.gpu_access(info, True, none).mode == "cdi"


def test_a_host_has_gpus_where_the_driver_lists_one(tmp_path: Path) -> None:
    assert not engine.host_has_gpus(tmp_path / "gpus", tmp_path / "dxg")
    (tmp_path / "gpus").mkdir()
    assert not engine.host_has_gpus(tmp_path / "gpus", tmp_path / "dxg")
    (tmp_path / "gpus" / "0000:17:00.0").mkdir()
    assert engine.host_has_gpus(tmp_path / "gpus", tmp_path / "dxg")


def test_free_space_is_that_of_the_engines_folder(tmp_path: Path) -> None:
    usage = {str(tmp_path): SimpleNamespace(free=5_000_000_000)}
    assert engine.free_gigabytes({"DockerRootDir": str(tmp_path)}, usage.__getitem__) == 5.0
    assert engine.free_gigabytes({"DockerRootDir": "/not/on/this/host"}, usage.__getitem__) is None


def test_docker_host_wins_over_the_context() -> None:
    assert engine.address({"DOCKER_HOST": "tcp://10.0.0.9:2375"}) == "tcp://10.0.0.9:2375"


@pytest.mark.parametrize(
    ("address", "words"),
    [("unix:///nowhere/docker.sock", "no Docker engine answers"), ("nonsense://x", "DOCKER_HOST is 'nonsense://x'")],
)
def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch, address: str, words: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(Fault, match=words) as caught:
        engine.connect()
    assert caught.value.code == WRONG_MACHINE


def _connect_as(uid: int, results: Any) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setuid(uid)
    try:
        engine.connect()
        results.put("connected")
    except Fault as fault:
        results.put(str(fault))


def test_a_socket_that_this_user_may_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real socket, a real user without rights on it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o755)
        path = Path(folder, "docker.sock")
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        fork = multiprocessing.get_context("fork")
        results = fork.Queue()
        child = fork.Process(target=_connect_as, args=(65534, results))
        child.start()
        words = results.get(timeout=60)
        child.join()
    assert "may not use the Docker engine" in words
    assert "usermod -aG docker" in words
