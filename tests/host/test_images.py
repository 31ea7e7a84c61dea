"""What a build asks for and what it refuses; the Dockerfile keeps the promises that only its text can show."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.errors import WRONG_MACHINE, Fault
from app.host import base, engine, images, network
from app.host.variants import ROOT, default_variant, read_variant

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
VARIANT = default_variant()


def test_a_small_disk_is_refused_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "free_gigabytes", lambda info: 2.0)
    with pytest.raises(Fault, match=r"2\.0 GB free") as caught:
        images.check_disk([VARIANT, VARIANT], {"DockerRootDir": str(tmp_path)})
    assert f"{2 * (VARIANT.gigabytes + images.WHEELS_GIGABYTES):.1f} GB" in str(caught.value)
    assert caught.value.code == WRONG_MACHINE


def test_a_large_disk_and_a_remote_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (500.0, None):
        monkeypatch.setattr(engine, "free_gigabytes", lambda info, free=free: free)
        images.check_disk([VARIANT], {"DockerRootDir": "/"})
    monkeypatch.setattr(engine, "free_gigabytes", lambda info: 0.1)
    images.check_disk([], {"DockerRootDir": "/"})  # everything is built: only the code's small layers are new


def test_the_image_counts_as_old_once_a_file_in_it_changed(tmp_path: Path) -> None:
    for part in (*images.SOURCES, "pinned"):
        source = ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / part)
    variant = read_variant(tmp_path / "pinned" / VARIANT.cuda)
    before = images.source_hash(variant, tmp_path)
    assert before == images.source_hash(VARIANT)
    (tmp_path / "app" / "errors.py").write_text("changed = 1\n")
    after = images.source_hash(variant, tmp_path)
    assert after != before
    (tmp_path / "app" / "__pycache__").mkdir(exist_ok=True)
    (tmp_path / "app" / "__pycache__" / "x.pyc").write_text("x")
    assert images.source_hash(variant, tmp_path) == after


def test_labels_tell_what_an_image_holds() -> None:
    found = images.labels(VARIANT, base.Base(None, "registry"))
    assert found["kit.variant"] == VARIANT.cuda
    assert found["kit.lock"] == VARIANT.lock_hash
    assert found["kit.torch"] == VARIANT.torch


def test_index_and_proxy_go_into_secrets_and_predefined_arguments_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "pip_configuration", lambda: {"index-url": "https://user:word@mirror.example/simple"})
    for name in [*network.proxies(), "KIT_APT_SOURCES"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:7890")
    options = images.reach(tmp_path)
    assert "mirror.example" not in " ".join(options)
    assert f"id=pip,src={tmp_path / 'pip.conf'}" in options
    assert (tmp_path / "pip.conf").stat().st_mode & 0o077 == 0
    assert options[options.index("--build-arg") + 1] == "https_proxy"
    assert options[-2:] == ["--network", "host"]  # a proxy on this host's loopback


def test_a_missing_list_of_apt_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_APT_SOURCES", "/nowhere/sources.list")
    with pytest.raises(Fault, match=r"/nowhere/sources\.list"):
        images.reach(tmp_path)


def test_without_buildx_or_docker_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Fault, match="no docker command"):
        images.buildx()
    fake = tmp_path / "docker"
    fake.write_text("#!/bin/sh\necho \"docker: 'buildx' is not a docker command.\" >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(Fault, match="docker-buildx"):
        images.buildx()


def test_the_base_is_pinned_by_digest_and_is_no_nvidia_image() -> None:
    reference = base.named_in_dockerfile()
    assert re.fullmatch(r"debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", reference)
    froms = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert froms == [("${KIT_BASE}", "base"), ("base", "environment"), ("environment", "app")]


def test_every_stage_that_uses_the_variant_declares_it() -> None:
    """An ARG before FROM is empty behind it."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert len(stages) == 3
    for stage in stages:
        used = re.search(r"\$\{?CUDA\b", stage)
        assert not used or stage.index("ARG CUDA") < used.start()


def test_no_proxy_and_no_address_stays_in_the_image() -> None:
    assert not re.search(r"^\s*(ENV|ARG)\b.*proxy", DOCKERFILE, re.IGNORECASE | re.MULTILINE)
    assert "://" not in DOCKERFILE
    assert "trusted-host" not in DOCKERFILE


def test_gpus_are_asked_for_with_compute() -> None:
    """`utility` alone gives nvidia-smi but no CUDA."""
    assert re.search(r"NVIDIA_DRIVER_CAPABILITIES=\S*compute", DOCKERFILE)
    assert "LD_LIBRARY_PATH" not in DOCKERFILE


@pytest.mark.parametrize("word", ["--require-hashes", "unchecked-hash", "PYTHONDONTWRITEBYTECODE=1", "type=cache"])
def test_the_habits_that_give_the_same_bytes_are_kept(word: str) -> None:
    assert word in DOCKERFILE


def test_a_registry_that_is_silent_is_told_from_one_that_lacks_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --base registry the fault says why, and what to do without one."""
    monkeypatch.setattr(base, "registry_silence", lambda client, reference: "dial tcp: no such host")
    with pytest.raises(Fault, match="--base local") as caught:
        base.resolve(SimpleNamespace(), "registry")  # type: ignore[arg-type]
    assert "no such host" in str(caught.value)
