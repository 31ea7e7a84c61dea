"""From Accelerate config files to processes: every key takes effect or is refused by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import Fault
from app.train import launch


def config(tmp_path: Path, **keys: object) -> str:
    import yaml

    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(keys))
    return str(path)


def resolved(tmp_path: Path, gpus: int, environment: dict[str, str] | None = None, **keys: object) -> launch.Launch:
    return launch.resolve(config(tmp_path, **keys), gpus, environment or {})


@pytest.mark.parametrize(("gpus", "local", "precision"), [(0, 1, "no"), (1, 1, "fp16"), (4, 4, "fp16")])
def test_auto_takes_every_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int, local: int, precision: str) -> None:
    monkeypatch.setattr(launch, "host_has_gpus", lambda: gpus > 0)
    found = launch.resolve("auto", gpus, {})
    assert (found.local, found.precision, found.cpu) == (local, precision, gpus == 0)


def test_auto_never_takes_the_cpu_where_the_host_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "host_has_gpus", lambda: True)
    with pytest.raises(Fault) as caught:
        launch.resolve("auto", 0, {})
    assert caught.value.code == 3 and "--accelerate cpu" in str(caught.value)
    assert launch.resolve("cpu", 0, {}).cpu


@pytest.mark.parametrize("path", sorted(launch.SHIPPED.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_file_resolves(path: Path) -> None:
    environment = {"KIT_MAIN_PROCESS_IP": "10.0.0.1"}
    found = launch.resolve(path.stem, 4, environment)
    assert found.accumulation == (4 if "accum4" in path.stem else 1)
    assert found.processes == {"two-nodes-fp16": 8, "two-cpu": 2, "cpu": 1, "gpu-fp16": 1}.get(path.stem, 4)


def test_two_nodes_count_the_processes_of_both(tmp_path: Path) -> None:
    keys = {
        "distributed_type": "MULTI_GPU",
        "num_machines": 2,
        "num_processes": 8,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
    }
    second = resolved(tmp_path, 4, machine_rank=1, **keys)
    assert [launch.rank_environment(second, i, 29500)["RANK"] for i in range(second.local)] == ["4", "5", "6", "7"]
    assert resolved(tmp_path, 4, {"KIT_MACHINE_RANK": "1"}, **keys).machine_rank == 1


@pytest.mark.parametrize(
    ("gpus", "keys", "said"),
    [
        (0, {"distributed_type": "MULTI_GPU"}, "torch sees none here"),
        (2, {"distributed_type": "MULTI_GPU", "num_processes": 4}, "4 processes on this machine, but 2 GPUs"),
        (2, {"distributed_type": "MULTI_GPU", "gpu_ids": "2,3"}, "gpu_ids is 2,3, but torch sees 2 GPUs"),
        (4, {"distributed_type": "MULTI_GPU", "gpu_ids": "0,0"}, "gpu_ids"),
        (
            4,
            {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 7, "main_process_ip": "10.0.0.1"},
            "not a multiple of num_machines",
        ),
        (4, {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 8}, "main_process_ip 127.0.0.1"),
        (
            4,
            {
                "distributed_type": "MULTI_GPU",
                "num_machines": 2,
                "num_processes": 8,
                "machine_rank": 2,
                "main_process_ip": "10.0.0.1",
            },
            "machine_rank is 2",
        ),
        (
            4,
            {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 8, "main_process_ip": "10.0.0.1"},
            "main_process_port is missing",
        ),
        (1, {"distributed_type": "NO", "num_processes": 2}, "needs distributed_type"),
        (1, {"distributed_type": "FSDP"}, "distributed_type is FSDP"),
        (1, {"distributed_type": "NO", "mixed_precision": "fp8"}, "mixed_precision is 'fp8'"),
        (1, {"distributed_type": "NO", "gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        (1, {"distributed_type": "NO", "gradient_accumulation_steps": "4"}, "gradient_accumulation_steps is '4'"),
        (1, {"distributed_type": "NO", "rdzv_backend": "c10d"}, "rdzv_backend"),
        (1, {"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config"),
        (1, {"distributed_type": "NO", "main_training_function": "train"}, "main_training_function"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, gpus: int, keys: dict[str, object], said: str) -> None:
    with pytest.raises(Fault) as caught:
        resolved(tmp_path, gpus, **keys)
    assert said in str(caught.value)


def test_some_gpus_are_made_visible_by_the_names_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = resolved(tmp_path, 4, distributed_type="MULTI_GPU", gpu_ids="1,3")
    assert launch.rank_environment(found, 0, 1)["CUDA_VISIBLE_DEVICES"] == "5,7"


def test_cores_are_shared_by_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    found = resolved(tmp_path, 0, distributed_type="MULTI_CPU", num_processes=2)
    assert launch.rank_environment(found, 0, 1)["OMP_NUM_THREADS"] == "4"
    threads = resolved(tmp_path, 0, distributed_type="MULTI_CPU", num_cpu_threads_per_process=3)
    assert launch.rank_environment(threads, 0, 1)["OMP_NUM_THREADS"] == "3"


def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[int, list[str]]:
    """Run ``script`` as two training processes; (exit code, what the launcher said)."""
    package = tmp_path / "fake" / "app" / "train"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    said: list[str] = []
    found = resolved(tmp_path, 0, distributed_type="MULTI_CPU", num_processes=2)
    return launch.run_processes(found, "app.train", [], said.append), said


def test_exit_codes_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes(tmp_path, monkeypatch, "raise SystemExit(0)")[0] == 0


def test_stopped_by_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes(tmp_path, monkeypatch, "raise SystemExit(75)")[0] == 75


def test_one_failing_process_ends_a_hanging_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ignores SIGTERM, as a process stuck in a collective does; it is killed after the grace time."""
    script = (
        "import os, signal, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(2)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n"
    )
    code, said = processes(tmp_path, monkeypatch, script)
    assert (
        code == 2
        and any("process 1 of 2 ended with exit code 2" in s for s in said)
        and any("are killed" in s for s in said)
    )


def test_a_killed_process_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, signal\nif os.environ['RANK'] == '0':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    code, said = processes(tmp_path, monkeypatch, script)
    assert code == 3 and "ended by SIGKILL" in said[0] and "memory" in said[0]


def test_processes_do_not_outlive_the_launcher(tmp_path: Path) -> None:
    """The launcher is killed with kill -9; its process, started as training processes are, gets SIGTERM from the kernel."""
    child = (
        "import signal, sys, time\nfrom app.train.launch import die_with_parent\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(open(sys.argv[1], 'w').write('ended')))\n"
        "die_with_parent()\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    parent = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}, sys.argv[1]])\ntime.sleep(600)\n"
    mark = tmp_path / "mark"
    environment = {**os.environ, "PYTHONPATH": str(launch.SHIPPED.parent.parent)}
    started = subprocess.Popen(
        [sys.executable, "-c", parent, str(mark)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert started.stdout and started.stdout.readline() == "up\n"
    started.send_signal(signal.SIGKILL)
    assert started.stdout.read() == ""  # closed when the child, too, is gone
    started.wait()
    assert mark.read_text() == "ended"
