""".env and the overlay: the user's own lines stay, nobody becomes root, each kind of host gets what it can use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.host import compose
from app.host.engine import Gpus

SERVICES: dict[str, Any] = {"train": {"labels": {"kit.gpus": "all"}}, "tensorboard": {"labels": None}}


class Folder:
    """A project folder with an owner, for a function that only asks stat()."""

    def __init__(self, uid: int, gid: int) -> None:
        self.owner = SimpleNamespace(st_uid=uid, st_gid=gid)

    def stat(self) -> SimpleNamespace:
        return self.owner


@pytest.mark.parametrize(
    ("euid", "environment", "folder", "rootless", "expected"),
    [
        (1001, {}, (1001, 1001), False, 1001),
        (1001, {"SUDO_UID": "7"}, (0, 0), False, 1001),
        (0, {"SUDO_UID": "1002", "SUDO_GID": "1003"}, (0, 0), False, 1002),
        (0, {"SUDO_UID": "0", "SUDO_GID": "0"}, (1004, 1004), False, 1004),
        (0, {}, (1004, 1005), False, 1004),
        (0, {}, (0, 0), False, 1000),
        (1001, {}, (1001, 1001), True, 0),
    ],
)
def test_outputs_never_belong_to_root(
    euid: int, environment: dict[str, str], folder: tuple[int, int], rootless: bool, expected: int
) -> None:
    """A rootless engine is the exception: its uid 0 is the caller."""
    found = compose.owner(Folder(*folder), rootless, environment, euid)  # type: ignore[arg-type]
    assert found.uid == expected


def test_lines_of_the_user_stay_and_ours_are_written_once() -> None:
    old = "HF_ENDPOINT=https://mirror.example\n# mine\nKIT_SHM=16gb\nKIT_UID=0\n"
    values = {"KIT_VARIANT": "1", "KIT_UID": "1000"}
    once = compose.settings_text(old, values)
    assert once == compose.settings_text(once, values)
    assert once.startswith("HF_ENDPOINT=https://mirror.example\n# mine\nKIT_SHM=16gb\n")
    assert once.count("KIT_UID=") == 1
    assert once.endswith("KIT_VARIANT=1\nKIT_UID=1000\n")


def test_a_host_without_anything_special_adds_nothing() -> None:
    assert compose.overlay(Gpus("none", False, ""), SERVICES, None, False) == {}


def test_cdi_devices_are_named_and_only_for_services_that_want_gpus() -> None:
    added = compose.overlay(Gpus("cdi", True, ""), SERVICES, None, False)["services"]
    assert list(added) == ["train"]
    (device,) = added["train"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "cdi", "device_ids": ["nvidia.com/gpu=all"], "capabilities": ["gpu"]}


def test_the_nvidia_runtime_gives_all_gpus_and_locked_memory() -> None:
    added = compose.overlay(Gpus("nvidia", True, ""), SERVICES, None, True)["services"]["train"]
    (device,) = added["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert added["ulimits"] == {"memlock": -1}


def test_certificates_reach_every_service() -> None:
    added = compose.overlay(Gpus("none", False, ""), SERVICES, Path("/own.crt"), False)["services"]
    assert set(added) == set(SERVICES)
    assert added["train"]["volumes"] == [f"/own.crt:{compose.CERTIFICATES}:ro"]
    assert added["train"]["environment"]["SSL_CERT_FILE"] == compose.CERTIFICATES


def test_settings_are_read_back(tmp_path: Path) -> None:
    assert compose.read_settings(tmp_path) == {}
    values = {"KIT_VARIANT": "12.1", "KIT_UID": "1000"}
    (tmp_path / ".env").write_text(compose.settings_text("A=b=c\n", values))
    assert compose.read_settings(tmp_path) == {"A": "b=c", **values}
