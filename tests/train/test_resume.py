"""A run that was stopped and goes on is the run that never stopped; what cannot be gone on with is named and refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from runs import accelerate_file, command, metrics, write_rows

TIMES = (
    "useful_tokens_per_s",
    "sequences_per_s",
    "update_ms",
    "tflops",
    "slowest_process",
    "slowest_over_median",
    "share_",
)
OPTIONS = (
    "--train-file",
    "rows.jsonl",
    "--batch-size",
    4,
    "--epochs",
    3,
    "--max-length",
    64,
    "--log-every",
    3,
    "--save-every",
    4,
    "--keep",
    3,
)


def timeless(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def same_files(one: Path, other: Path) -> None:
    """The same bytes of weights, and the same metrics but for times."""
    assert (one / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()
    assert timeless(metrics(one)) == timeless(metrics(other))


@pytest.mark.parametrize(("task", "padding", "accumulation"), [("classify", "packed", 1), ("mlm", "dynamic", 3)])
def test_going_on_from_any_checkpoint_gives_the_same_bytes(
    call, tmp_path: Path, task: str, padding: str, accumulation: int
) -> None:
    """Checkpoints inside an epoch and at its end, dropout on, with and without workers."""
    write_rows(tmp_path / "rows.jsonl", 60)
    config = accelerate_file(tmp_path / "a.yaml", 1, accumulation)
    options = (*OPTIONS, "--task", task, "--padding", padding, "--accelerate", config)
    whole = call(*options, "--output-dir", "whole").result
    states = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert len(states) >= 3
    for state in states[:-1]:
        again = tmp_path / f"from-{state.name}"
        shutil.copytree(tmp_path / "whole", again)
        for later in [s for s in sorted((again / "checkpoints").iterdir()) if s.name > state.name]:
            shutil.rmtree(later)
        shutil.rmtree(again / "model")
        described = json.loads((again / "run.json").read_text())
        (again / "run.json").write_text(json.dumps({**described, "status": "running", "result": None}))
        result = call(*options, "--output-dir", again.name, "--num-workers", 2).result
        assert result["updates"] == whole["updates"]
        same_files(tmp_path / "whole", again)


def test_a_pretrained_model_trains_with_dropout_from_the_first_update_on(call, tmp_path: Path) -> None:
    """Transformers hands it over set to evaluate; an evaluation on the way, or going on, must not be what switches dropout on."""
    write_rows(tmp_path / "rows.jsonl", 60)
    call("--train-file", "rows.jsonl", "--max-steps", 1, "--save-every", 0, "--output-dir", "first").result  # noqa: B018
    options = (
        *("--train-file", "rows.jsonl", "--model", "first/model", "--batch-size", 4, "--max-steps", 8),
        *("--eval-every", 3, "--save-every", 4, "--log-every", 1, "--keep", 9),
    )
    for drop in ("0.5", "0"):
        call(*options, "--dropout", drop, "--output-dir", f"drop{drop}").result  # noqa: B018
    losses = [[line["loss"] for line in metrics(tmp_path / f"drop{d}") if "loss" in line] for d in ("0.5", "0")]
    assert losses[0][0] != losses[1][0]
    there = tmp_path / "drop0.5" / "checkpoints" / "step-00000004"
    call(*options, "--dropout", "0.5", "--output-dir", "again", "--resume", there).result  # noqa: B018
    one, other = (tmp_path / folder / "model" / "model.safetensors" for folder in ("drop0.5", "again"))
    assert one.read_bytes() == other.read_bytes()


def test_a_run_that_diverges_ends_although_its_workers_are_at_work(run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    done = run(
        *("--train-file", "rows.jsonl", "--lr", 1e30, "--clip", 0, "--warmup-ratio", 0, "--log-every", 1),
        *("--num-workers", 1, "--batch-size", 4, "--eval-fraction", 0, "--output-dir", "out"),
        timeout=120,
    )
    assert done.code == 4
    assert "training diverged" in done.stderr


def start(environment: dict[str, str], cwd: Path, *arguments: object, own_group: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_group,
    )


def wait_for_update(output: Path, process: subprocess.Popen[str]) -> None:
    """Until the first line of metrics is there."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        if (output / "metrics.jsonl").exists() and (output / "metrics.jsonl").read_text().count("\n"):
            return
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.02)
    raise AssertionError("no update within 200 s")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_with_75(
    run, environment, tmp_path: Path, processes: int, number: signal.Signals
) -> None:
    write_rows(tmp_path / "rows.jsonl", 400)
    config = accelerate_file(tmp_path / "a.yaml", processes, 1)
    options = (*OPTIONS, "--accelerate", config, "--save-every", 0, "--log-every", 1)
    child = start(environment, tmp_path, *options, "--output-dir", "stopped")
    wait_for_update(tmp_path / "stopped", child)
    child.send_signal(number)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 75, err
    assert "the checkpoint is saved" in err
    left = json.loads(out.strip().splitlines()[-1])
    assert left["status"] == "stopped"
    steps = [m["step"] for m in metrics(tmp_path / "stopped") if "loss" in m]
    assert steps == list(range(1, left["updates"] + 1))
    if processes == 1 and number == signal.SIGTERM:
        run(*options, "--output-dir", "stopped").result  # noqa: B018
        run(*options, "--output-dir", "whole").result  # noqa: B018
        same_files(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_finds_the_workers_at_work(
    environment, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C, `timeout` and some supervisors signal every process of a group, the loader's workers, too."""
    write_rows(tmp_path / "rows.jsonl", 400)
    options = (*OPTIONS, "--accelerate", "cpu", "--save-every", 0, "--log-every", 1, "--num-workers", 2)
    child = start(environment, tmp_path, *options, "--output-dir", "out", own_group=True)
    wait_for_update(tmp_path / "out", child)
    os.killpg(child.pid, number)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 75, err
    assert "the checkpoint is saved" in err


def test_a_lost_process_ends_the_others(environment, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 400)
    config = accelerate_file(tmp_path / "a.yaml", 2, 1)
    child = start(environment, tmp_path, *OPTIONS, "--accelerate", config, "--output-dir", "out", "--log-every", 1)
    wait_for_update(tmp_path / "out", child)
    ranks = [process.pid for process in psutil.Process(child.pid).children()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, err = child.communicate(timeout=150)
    assert child.returncode == 3
    assert "was ended by SIGKILL" in err
    assert all(not Path(f"/proc/{rank}").exists() for rank in ranks)


def kill_in_a_loop(environment, tmp_path: Path, kills: int, epochs: int, seed: int) -> int:
    """Kill -9 at random moments until ``kills`` are done, then let it end; returns how many kills hit a started run."""
    write_rows(tmp_path / "rows.jsonl", 200)
    options = (*OPTIONS, "--epochs", epochs, "--save-every", 3, "--keep", 1)
    draw, survived = random.Random(seed), 0
    while survived < kills:
        if (tmp_path / "out" / "model").exists():  # it came to its end between two kills
            shutil.rmtree(tmp_path / "out")
        child = start(environment, tmp_path, *options, "--output-dir", "out")
        wait_for_update_or_end(tmp_path / "out", child)
        time.sleep(draw.uniform(0, 1.5))
        child.kill()
        child.communicate()
        if child.returncode == -signal.SIGKILL:
            survived += 1
        for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[:-1]:
            json.loads(line)
    final = subprocess.run(
        command(*options, "--output-dir", "out"),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert final.returncode == 0, final.stderr
    whole = subprocess.run(
        command(*options, "--output-dir", "whole"),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert whole.returncode == 0, whole.stderr
    same_files(tmp_path / "whole", tmp_path / "out")
    return survived


def wait_for_update_or_end(output: Path, process: subprocess.Popen[str]) -> None:
    before = (output / "metrics.jsonl").stat().st_mtime_ns if (output / "metrics.jsonl").exists() else 0
    until = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < until:
        if (output / "metrics.jsonl").exists() and (output / "metrics.jsonl").stat().st_mtime_ns != before:
            return
        time.sleep(0.01)


def test_kill_9_at_random_moments(environment, tmp_path: Path) -> None:
    assert kill_in_a_loop(environment, tmp_path, 3, 8, 1) == 3


@pytest.mark.long
def test_a_hundred_kills(environment, tmp_path: Path) -> None:
    assert kill_in_a_loop(environment, tmp_path, 100, 100, 2) == 100


@pytest.fixture
def trained(call, tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", 40)
    options = (
        "--train-file",
        "rows.jsonl",
        "--batch-size",
        4,
        "--max-steps",
        6,
        "--save-every",
        2,
        "--keep",
        5,
        "--max-length",
        64,
    )
    call(*options).result  # noqa: B018
    described = json.loads((tmp_path / "out" / "run.json").read_text())
    (tmp_path / "out" / "run.json").write_text(json.dumps({**described, "status": "running", "result": None}))
    return options


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["removed", "cut", "changed"])
def test_a_damaged_checkpoint_is_passed_over_and_named(call, trained, tmp_path: Path, name: str, how: str) -> None:
    file = tmp_path / "out" / "checkpoints" / "step-00000006" / name
    content = file.read_bytes()
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if how == "cut" else content[:-9] + b"X" + content[-8:])
    done = call(*trained)
    assert done.result["updates"] == 6
    assert "step-00000006 is passed over" in done.stderr and name in done.stderr
    assert "going on from out/checkpoints/step-00000004" in done.stderr


def test_no_whole_checkpoint_is_refused(call, trained, tmp_path: Path) -> None:
    for folder in (tmp_path / "out" / "checkpoints").iterdir():
        (folder / "weights.safetensors").write_bytes(b"")
    done = call(*trained)
    assert done.code == 2 and "no checkpoint in" in done.stderr and "0 bytes instead of" in done.stderr


def test_a_named_checkpoint_that_is_none(call, trained) -> None:
    done = call(*trained, "--resume", "elsewhere")
    assert done.code == 2 and "--resume elsewhere: manifest.json is missing" in done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--lr", 1e-3), "lr was 0.0, now 0.001"),
        (("--seed", 5), "seed was 0, now 5"),
        (("--batch-size", 8), "sequences_an_update"),
        (("--max-steps", 9), "max_steps was 6, now 9"),
    ],
)
def test_other_options_are_named_and_refused(call, trained, more: tuple[object, ...], said: str) -> None:
    done = call(*trained, *more)
    assert done.code == 2 and said in done.stderr


def test_other_data_is_refused(call, trained, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 41)
    done = call(*trained)
    assert done.code == 2 and "data was" in done.stderr


def test_other_processes_with_the_same_global_batch_go_on_and_other_batches_do_not(
    run, trained, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000006")
    config = accelerate_file(tmp_path / "two.yaml", 2, 1)
    refused = run(*trained, "--accelerate", config)
    assert refused.code == 2 and 'sequences_an_update was "1 rows' in refused.stderr
    done = run(*trained, "--accelerate", config, "--padding", "auto", "--batch-size", 2)
    assert done.code == 2, "packed rows of another length are other updates"


def test_other_processes_with_the_same_sequences_go_on(run, call, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 40)
    options = (
        "--train-file",
        "rows.jsonl",
        "--padding",
        "dynamic",
        "--max-steps",
        6,
        "--save-every",
        4,
        "--max-length",
        64,
        "--dropout",
        0,
    )
    whole = call(*options, "--batch-size", 4, "--output-dir", "whole").result
    call(*options, "--batch-size", 4).result  # noqa: B018
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000006")
    described = json.loads((tmp_path / "out" / "run.json").read_text())
    (tmp_path / "out" / "run.json").write_text(json.dumps({**described, "status": "running"}))
    done = run(*options, "--batch-size", 2, "--accelerate", accelerate_file(tmp_path / "two.yaml", 2, 1))
    assert "1 processes before, 2 now" in done.stderr
    assert done.result["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-5)


def test_rotation_keeps_the_newest_by_number_and_the_best(tmp_path: Path) -> None:
    from app.train import checkpoints

    for step in (9, 10, 100, 11):
        checkpoints.folder_of(tmp_path, step).mkdir(parents=True)
    (tmp_path / "checkpoints" / "making-00000012").mkdir()
    checkpoints.rotate(tmp_path, 2, {9})
    assert checkpoints.steps(tmp_path) == [9, 11, 100]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000009",
        "step-00000011",
        "step-00000100",
    ]
