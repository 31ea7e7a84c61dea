"""docker compose itself: who owns what is written, what a service may do, signals, exit codes, and GPUs through CDI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import docker
import pytest

from app.host import compose, engine, programs
from app.host.engine import Gpus
from app.host.variants import ROOT, Variant

pytestmark = pytest.mark.engine


def run(project: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """docker compose run with these words, in the copied project."""
    command = ["docker", "compose", "run", "--rm", "-T", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=project, capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL
    )


def test_no_service_may_do_more_than_it_must(project: Path) -> None:
    services = compose.services(project)
    assert {"train", "tensorboard"} <= set(services)
    for name, service in services.items():
        assert not service.get("privileged"), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert service.get("network_mode") != "host", name
        assert service.get("ipc") != "host", name
        assert "deploy" not in service, "a reservation keeps hosts without GPUs from starting"
        assert service["stop_grace_period"] == "10m0s", name
        if service["user"].startswith("0:"):
            assert service["cap_add"] == ["CHOWN"], name
            assert service["network_mode"] == "none", name


def test_outputs_belong_to_the_uid_in_the_settings(project: Path, variant: Variant) -> None:
    """In a folder of root's, as on many rented machines, and in one of the caller's."""
    project.chmod(0o755)
    if os.geteuid() == 0:
        done = run(project, "--entrypoint", "sh", "train", "-c", "echo x >out/file", KIT_UID="4321", KIT_GID="8765")
        assert done.returncode == 0, done.stderr
        made = (project / "out" / "file").stat()
        assert (made.st_uid, made.st_gid) == (4321, 8765)
        shutil.rmtree(project / "out")
        os.chown(project, 4321, 8765)
        uid, gid = 4321, 8765
    else:
        uid, gid = os.geteuid(), os.getegid()
    done = run(
        project,
        *("--entrypoint", "sh", "train", "-c", "mkdir -p out && echo x >out/file"),
        KIT_UID=str(uid),
        KIT_GID=str(gid),
    )
    assert done.returncode == 0, done.stderr
    assert (project / "out" / "file").stat().st_uid == uid


def test_without_settings_nothing_runs_as_root(project: Path, variant: Variant) -> None:
    done = run(project, "--entrypoint", "id", "train", "-u", KIT_UID="", KIT_GID="")
    assert done.stdout == "1000\n", done.stderr


def test_a_fresh_cache_volume_is_writable_for_any_uid(project: Path, variant: Variant) -> None:
    done = run(project, "--entrypoint", "touch", "train", "/cache/x", KIT_UID="54321", KIT_GID="54321")
    assert done.returncode == 0, done.stderr


def test_the_limits_hold_inside(project: Path, variant: Variant) -> None:
    script = "df -k /dev/shm | tail -n 1; ulimit -s; grep -E 'CapEff|NoNewPrivs' /proc/self/status"
    done = run(project, "--entrypoint", "sh", "train", "-c", script, KIT_SHM="2gb")
    shm, stack, capabilities, privileges = done.stdout.splitlines()
    assert int(shm.split()[1]) == 2 * 1024**2
    assert stack == "65536"  # KiB: 67108864 bytes
    assert int(capabilities.split()[1], 16) == 0
    assert privileges.split()[1] == "1"


def test_variables_are_passed_on_only_when_set(project: Path, variant: Variant) -> None:
    (project / ".env").write_text("HF_ENDPOINT=https://mirror.example\n")
    done = run(project, "--entrypoint", "env", "train", HTTPS_PROXY="http://proxy.example:3128")
    lines = done.stdout.splitlines()
    assert "HF_ENDPOINT=https://mirror.example" in lines
    assert "HTTPS_PROXY=http://proxy.example:3128" in lines
    assert not any(line.startswith(("HF_TOKEN=", "NCCL_DEBUG=")) for line in lines)


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_exit_code_is_the_programs(project: Path, variant: Variant, code: int) -> None:
    """Through the very function behind ./inv train, without a terminal."""
    arguments = ["-c", f"raise SystemExit({code})"]
    assert programs.run_service("train", arguments, variant, project, entrypoint="python", terminal=False) == code


RUNNER = """\
import sys
from pathlib import Path
from app.host import programs
from app.host.variants import default_variant
code = programs.run_service(
    "train", ["-c", sys.argv[2]], default_variant(), Path(sys.argv[1]), entrypoint="python", terminal=False
)
raise SystemExit(code)
"""
STOPPED_GENTLY = """\
import signal, sys, time
def stop(*_):
    print("saving", flush=True)
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_program_and_it_may_finish(project: Path, variant: Variant, number: int) -> None:
    """A signal to ./inv train: the program inside gets it and saves, its exit code comes back, no container stays."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, project, STOPPED_GENTLY],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert rest == "saving\nsaved\n"
    assert process.returncode == 75
    names = [one.name for one in docker.from_env().containers.list(all=True)]
    assert not any(f"-train-{process.pid}-" in name for name in names)


def test_docker_stop_does_not_cut_a_checkpoint_short(project: Path, variant: Variant) -> None:
    """The container carries its grace and its signal, so `docker stop` from another shell waits too."""
    done = subprocess.run(
        ["docker", "compose", "create", "tensorboard"], cwd=project, capture_output=True, text=True, check=True
    )
    assert done.returncode == 0
    listed = subprocess.run(
        ["docker", "compose", "ps", "-aq", "tensorboard"], cwd=project, capture_output=True, text=True, check=True
    )
    found = docker.from_env().containers.get(listed.stdout.strip()).attrs["Config"]
    assert found["StopTimeout"] == 600
    assert found["StopSignal"] == "SIGTERM"


def test_the_engine_says_whether_memory_may_be_locked(client: docker.DockerClient, variant: Variant) -> None:
    """Whatever the answer, a service with that overlay starts, and no container stays behind."""
    before = {one.id for one in client.containers.list(all=True)}
    answer = engine.may_lock_memory(client, variant.image)
    assert answer in (True, False)
    assert {one.id for one in client.containers.list(all=True)} <= before


@pytest.fixture
def tiny(second_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> docker.DockerClient:
    """The second engine with an image that holds one static program, tini, named bert-kit:tiny."""
    monkeypatch.setenv("KIT_SECOND", second_engine)
    client = docker.DockerClient(base_url=second_engine)
    archive = tmp_path / "tiny.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(os.path.realpath(shutil.which("docker-init") or "/usr/bin/tini-static"), "tini")
    client.api.import_image_from_file(str(archive), repository="bert-kit", tag="tiny")
    return client


def cdi_project(folder: Path, mode: str) -> None:
    """A compose project with one service and the overlay that build would write for this kind of host."""
    services = {"train": {"labels": {"kit.gpus": "all"}}}
    base = {
        "services": {"train": {"image": "bert-kit:tiny", "network_mode": "none", "entrypoint": ["/tini", "--version"]}}
    }
    (folder / "docker-compose.yml").write_text(json.dumps(base))
    (folder / ".compose.host.yml").write_text(json.dumps(compose.overlay(Gpus(mode, True, ""), services, None, False)))
    (folder / ".env").write_text("COMPOSE_FILE=docker-compose.yml:.compose.host.yml\n")


@pytest.mark.parametrize(
    ("mode", "described", "words"),
    [
        ("cdi", True, "tini version"),
        ("cdi", False, "unresolvable CDI devices"),
        ("nvidia", False, 'could not select device driver "nvidia"'),
    ],
)
def test_gpus_through_a_real_engine(
    tiny: docker.DockerClient, tmp_path: Path, mode: str, described: bool, words: str
) -> None:
    """CDI with a file that describes a device, CDI without, and the nvidia driver on a host that has no toolkit."""
    devices = Path(tiny.info()["CDISpecDirs"][0])
    spec = devices / "nvidia.json"
    if described:
        device = {"name": "all", "containerEdits": {"env": ["KIT_CDI=1"]}}
        spec.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": engine.CDI_KIND, "devices": [device]}))
    try:
        assert engine.gpu_access(tiny.info(), True, lambda name: None).mode == ("cdi" if described else "none")
        cdi_project(tmp_path, mode)
        done = run(tmp_path, "train", DOCKER_HOST=os.environ["KIT_SECOND"])
    finally:
        spec.unlink(missing_ok=True)
    assert words in done.stdout + done.stderr
    assert (done.returncode == 0) == described
    if not described:
        fault = engine.translate(docker.errors.APIError("500", explanation=done.stderr), "starting training")
        assert "nvidia-ctk" in str(fault)


def test_what_build_writes_makes_a_plain_compose_run_do_the_same(
    project: Path, client: docker.DockerClient, variant: Variant
) -> None:
    """.env and the overlay as build writes them, read by docker compose without any help, and old once something changed."""
    assert compose.is_stale(client, project)
    said = compose.write(client, variant, "some-base", project)
    assert variant.image in said
    assert "GPUs: " in said
    assert not compose.is_stale(client, project)
    settings = compose.read_settings(project)
    assert settings["KIT_BASE"] == "some-base"
    assert settings["KIT_IMAGE"] == f"{variant.image}@{client.images.get(variant.image).id}"
    assert settings["KIT_UID"] != "0" or os.geteuid() != 0
    done = run(project, "--entrypoint", "sh", "train", "-c", "id -u; echo $KIT_VARIANT $KIT_IMAGE; touch out/x")
    assert done.stdout.split() == [settings["KIT_UID"], variant.cuda, settings["KIT_IMAGE"]], done.stderr
    with (project / "docker-compose.yml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert compose.is_stale(client, project)


def test_a_missing_image_is_built_by_compose_itself(
    project: Path, client: docker.DockerClient, variant: Variant
) -> None:
    """A plain docker compose run with no image: it builds from the Dockerfile (every step here is in the cache)."""
    text = (project / "docker-compose.yml").read_text(encoding="utf-8")
    text = text.replace("image: bert-kit:", "image: kit-test-unbuilt:").replace("context: .", f"context: {ROOT}")
    (project / "docker-compose.yml").write_text(text, encoding="utf-8")
    base = client.images.get(variant.image).labels["kit.base"]
    try:
        done = run(project, "--entrypoint", "id", "train", "-u", **({"KIT_BASE": base} if base else {}))
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("\n1000\n")  # after the builder's progress
    finally:
        for image in client.images.list("kit-test-unbuilt"):
            client.images.remove(image.tags[0], force=True)  # the container of `out` is still there
