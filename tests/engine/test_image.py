"""The image that was built: who it runs as, what it holds, what it does not hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import docker
import docker.errors
import pytest

from app.errors import WRONG_MACHINE, Fault
from app.host import base, engine, images, network
from app.host.variants import ROOT, Variant, variants

pytestmark = pytest.mark.engine


def run(client: docker.DockerClient, variant: Variant, *command: str, **settings: object) -> tuple[int, str]:
    """Exit code and output of a command in a fresh container."""
    said: list[str] = []
    code = engine.run(client, variant.image, list(command), write=said.append, network_mode="none", **settings)
    return code, "".join(said)


def test_it_runs_as_an_ordinary_user_and_under_any_other(client: docker.DockerClient, variant: Variant) -> None:
    script = "import getpass, os, pathlib; pathlib.Path('/cache/x').mkdir(); print(os.getuid(), getpass.getuser())"
    assert run(client, variant, "python", "-c", script) == (0, "1000 kit\n")
    assert run(client, variant, "python", "-c", script, user="4321:8765") == (0, "4321 kit\n")


def test_the_callers_folder_does_not_shadow_a_package(
    client: docker.DockerClient, variant: Variant, tmp_path: Path
) -> None:
    """A file named like a package in the mounted folder, and a folder named app."""
    (tmp_path / "yaml.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "app").mkdir()
    tmp_path.chmod(0o755)
    command = ["python", "-c", "import yaml, app.errors; print(app.errors.__file__)"]
    volumes = {str(tmp_path): {"bind": "/work", "mode": "ro"}}
    assert run(client, variant, *command, volumes=volumes) == (0, "/opt/kit/app/errors.py\n")


def test_an_exit_code_and_both_streams_come_through(client: docker.DockerClient, variant: Variant) -> None:
    code, said = run(client, variant, "sh", "-c", "echo out; echo err >&2; exit 75")
    assert code == 75
    assert sorted(said.split()) == ["err", "out"]
    left = client.containers.list(all=True, filters={"ancestor": variant.image})
    assert [one for one in left if one.attrs["Config"]["Cmd"] == ["sh", "-c", "echo out; echo err >&2; exit 75"]] == []


def test_labels_name_the_lock(client: docker.DockerClient, variant: Variant) -> None:
    labels = client.images.get(variant.image).labels
    assert labels["kit.variant"] == variant.cuda
    assert labels["kit.lock"] == variant.lock_hash
    assert labels["org.opencontainers.image.title"] == "bert-kit"


def test_no_proxy_index_or_certificate_stayed_inside(client: docker.DockerClient, variant: Variant) -> None:
    found = client.images.get(variant.image)
    kept = json.dumps([found.attrs["Config"]["Env"], found.history()])
    pip = network.pip_configuration()
    for value in [pip.get("index-url"), *(os.environ.get(name) for name in network.proxies())]:
        assert not value or value not in kept
    assert "proxy" not in kept.lower().replace("proxies", "")
    code, said = run(client, variant, "sh", "-c", "ls -A /tmp; ls /opt/venv/bin | grep '^pip' || true")
    assert (code, said) == (0, "")


def test_nothing_can_swap_a_package_inside(client: docker.DockerClient, variant: Variant) -> None:
    """There is no pip in the environment, and its files belong to root."""
    code, said = run(client, variant, "python", "-m", "pip", "--version")
    assert code != 0
    assert "No module named pip" in said
    assert run(client, variant, "sh", "-c", "test -w /opt/venv || test -w /opt/kit")[0] != 0


def test_only_what_the_image_holds_is_sent_to_the_builder(tmp_path: Path) -> None:
    """The real builder, asked for the context that it got."""
    recipe = tmp_path / "Dockerfile"
    recipe.write_text("FROM scratch\nCOPY . /\n")
    subprocess.run(
        ["docker", "buildx", "build", "-q", "-f", recipe, "--output", f"type=local,dest={tmp_path / 'out'}", ROOT],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    sent = tmp_path / "out"
    assert {path.name for path in sent.iterdir()} == {"app", "pinned", "tests", "pyproject.toml"}
    assert list(sent.rglob("*.pyc")) == []
    assert sum(path.stat().st_size for path in sent.rglob("*")) < 8_000_000


@pytest.fixture
def broken(client: docker.DockerClient, variant: Variant) -> str:
    """Id of an image like the real one, but with one package gone."""
    container = client.containers.create(
        variant.image, ["sh", "-c", "rm -r /opt/venv/lib/python3*/site-packages/six*"], user="0", network_mode="none"
    )
    try:
        container.start()
        assert container.wait()["StatusCode"] == 0
        return str(container.commit().id)
    finally:
        container.remove()


def test_a_failed_proof_leaves_no_image_and_the_old_name_where_it_was(
    client: docker.DockerClient,
    variant: Variant,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The whole of build, except that the builder hands out the broken image."""
    before = client.images.get(variant.image).id
    written = (ROOT / ".env").read_text() if (ROOT / ".env").exists() else None
    monkeypatch.setattr(images, "build_one", lambda *arguments: broken)
    with pytest.raises(Fault, match="does not hold what its lock says") as caught:
        images.build([variant], base_choice="local")
    assert caught.value.code == WRONG_MACHINE
    said = capfd.readouterr().out
    assert "six is missing, the lock says" in said
    assert "failed  versions" in said
    assert "passed  training" in said  # later checks run all the same
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(broken)
    assert client.images.get(variant.image).id == before
    assert ((ROOT / ".env").read_text() if (ROOT / ".env").exists() else None) == written


def test_running_another_variant_once_does_not_switch_compose(
    client: docker.DockerClient, variant: Variant, tmp_path: Path
) -> None:
    """.env keeps its variant as long as the image of that one is there."""
    (tmp_path / "pinned").symlink_to(ROOT / "pinned")
    other = next(one for one in variants().values() if one.cuda != variant.cuda)
    assert images.in_use(client, other, tmp_path) == other
    (tmp_path / ".env").write_text(f"KIT_VARIANT={variant.cuda}\n")
    assert images.in_use(client, other, tmp_path).cuda == variant.cuda
    (tmp_path / ".env").write_text("KIT_VARIANT=0.0\n")
    assert images.in_use(client, other, tmp_path) == other


def test_a_registry_that_cannot_be_reached(client: docker.DockerClient, tmp_path: Path) -> None:
    """A real answer of the engine about a registry where nothing listens: said, and the local base taken."""
    reference = f"127.0.0.1:9/debian:none@sha256:{'0' * 64}"
    (tmp_path / "Dockerfile").write_text(f"ARG KIT_BASE={reference}\n")
    with pytest.raises(Fault, match="connection refused") as caught:
        base.resolve(client, "registry", tmp_path)
    assert "./inv build --base local" in str(caught.value)
    taken = base.resolve(client, None, tmp_path)
    assert taken.image == base.LOCAL
    with pytest.raises(Fault, match="no such image"):
        base.resolve(client, "127.0.0.1:9/own:1", tmp_path)


def test_a_disk_that_is_too_small(second_engine: str, variant: Variant) -> None:
    """The real command against an engine whose images lie on 64 MB."""
    done = subprocess.run(
        [ROOT / "inv", "build", "--cuda", variant.cuda],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DOCKER_HOST": second_engine},
    )
    assert done.returncode == WRONG_MACHINE
    assert "0.1 GB free" in done.stderr
    assert f"building {variant.image} takes" in done.stderr


def test_an_engine_that_is_down() -> None:
    done = subprocess.run(
        [ROOT / "inv", "build"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"},
    )
    assert done.returncode == WRONG_MACHINE
    assert "no Docker engine answers at unix:///nowhere/docker.sock" in done.stderr
