"""Words behind -- reach the program as they were typed, and the choice of a runtime is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import WRONG_INPUT, Fault
from app.host import compose, engine, programs
from app.host.variants import ROOT, default_variant, variants


@given(st.lists(st.text(min_size=1)), st.lists(st.text(min_size=1)))
def test_everything_behind_the_first_dashes_is_kept(before: list[str], after: list[str]) -> None:
    before = [word for word in before if word != "--"]
    assert programs.remainder([*before, "--", *after]) == after
    assert programs.remainder(before) == []


def test_arguments_with_spaces_quotes_and_dashes_survive_invoke(tmp_path: Path) -> None:
    """The real Invoke, with a task that prints what it got."""
    (tmp_path / "tasks.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import json\nfrom invoke import task\nfrom app.host.programs import remainder\n"
        "@task\ndef show(c, cuda=''):\n    print(json.dumps([cuda, remainder(sys.argv)]))\n"
    )
    words = ["--task", "mlm", "--train-file", "my file.csv", "--text-column", 'a "b"', "--", "-x", "中文"]
    invoke = str(Path(sys.executable).with_name("invoke"))
    done = subprocess.run(
        [invoke, "show", "--cuda", "1.0", "--", *words], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(done.stdout) == ["1.0", words]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--accelerate", "cpu"], True),
        (["--accelerate=cpu"], True),
        (["--accelerate", "ddp-fp16"], False),
        (["--output-dir", "cpu"], False),
        ([], False),
        (["--gpus", "0"], True),
        (["--gpus=0"], True),
        (["--gpus", "2"], False),
    ],
)
def test_the_cpu_must_be_asked_for(arguments: list[str], expected: bool) -> None:
    assert programs.wants_cpu(arguments) is expected


def test_gpus_that_no_container_would_see_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def info(self) -> dict[str, object]:
            return {"Runtimes": {"runc": {}}, "CDISpecDirs": []}

    monkeypatch.setattr(engine, "connect", Client)
    monkeypatch.setattr(engine, "host_has_gpus", lambda: True)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Fault, match="would train on the CPU") as caught:
        programs.check_gpus([])
    assert "nvidia-ctk runtime configure" in str(caught.value)
    programs.check_gpus(["--accelerate", "cpu"])
    monkeypatch.setattr(engine, "host_has_gpus", lambda: False)
    programs.check_gpus([])


def test_no_terminal_is_asked_for_where_there_is_none() -> None:
    assert "-T" in programs.compose_command("train", [], ROOT, terminal=False, name="x")
    assert "-T" not in programs.compose_command("train", [], ROOT, terminal=True, name="x")
    assert programs.compose_command("train", ["--task", "mlm"], ROOT, False, "x")[-3:] == ["train", "--task", "mlm"]


def test_the_variant_built_last_is_used_unless_another_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "pinned").symlink_to(ROOT / "pinned")
    assert programs.variant_in_use(None, tmp_path) == programs.variant_in_use("", tmp_path)
    assert programs.variant_in_use(None, tmp_path).cuda == default_variant().cuda
    other = next(name for name in variants() if name != default_variant().cuda)
    (tmp_path / ".env").write_text(compose.settings_text("", {"KIT_VARIANT": other}))
    assert programs.variant_in_use(None, tmp_path).cuda == other
    assert programs.variant_in_use(default_variant().cuda, tmp_path).cuda == default_variant().cuda


def test_an_unknown_runtime_lists_the_ones_there_are() -> None:
    with pytest.raises(Fault, match="auto, docker, venv") as caught:
        programs.pick_runtime("podman")
    assert caught.value.code == WRONG_INPUT


def test_without_an_engine_auto_says_so_and_takes_the_venv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert programs.pick_runtime("auto") == "venv"
    said = capsys.readouterr().err
    assert "no Docker engine answers at unix:///nowhere/docker.sock" in said
    assert "virtual environment" in said


def test_docker_that_was_asked_for_by_name_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert programs.pick_runtime("docker") == "docker"
    with pytest.raises(Fault, match="no Docker engine"):
        programs.run("train", [], default_variant().cuda, "docker")


def test_cuda_of_one_run_wins_over_env_for_that_run() -> None:
    made = programs.compose_environment(default_variant(), "sha256:1", {"KIT_VARIANT": "x", "HOME": "/h"})
    assert made["KIT_VARIANT"] == default_variant().cuda
    assert made["KIT_IMAGE"] == f"{default_variant().image}@sha256:1"
    assert made["HOME"] == "/h"
